//! [`Conversion`]: weights from a Hugging Face folder into a checkpoint, and from a checkpoint into a folder.
//!
//! Tensors go through the host's memory in blocks of rows, so that how much of it is needed depends on no model:
//! it is known before the first is read ([`Conversion::host`]). Both sides hold global tensors, so no layout is
//! asked for. A dense model may become a mixture of experts on its way ([`Upcycle`]).

mod upcycle;

use std::path::Path;

use moefold_planner::model::{Model, hf};
use moefold_profiles::units::{Bytes, MIB};

use crate::checkpoint::{self, Checkpoint, Found, Index, Written, write_initial};
use crate::environment::resident_peak;
use crate::error::Error;
use crate::files::{check_directory, write_directory};
use crate::model::global_tensors;
use crate::support;
use crate::weights::{
    Blocks, FILE_BYTES, GlobalTensor, HuggingFace, Region, Source, hf_config, write_folder,
};

pub use upcycle::Upcycle;
use upcycle::Upcycled;

/// Most bytes of the values of one block.
const BLOCK: u64 = 64 * MIB;

/// Bytes of names, shapes and places of a tensor, its entries in headers and indices among them, several times over:
/// a name has some 60 characters, and a checkpoint three entries for it.
const OF_NAMES: u64 = 4096;

/// Buffers of files, and what allocators keep beyond what is asked of them.
const OF_FILES: u64 = 8 * MIB;

/// Weights that are about to be written in another form.
#[derive(Debug)]
pub struct Conversion {
    weights: Weights,
    model: Model,
    tensors: Vec<GlobalTensor>,
    found: Option<Found>,
}

/// Where they come from.
#[derive(Debug)]
enum Weights {
    Plain(Source),
    Upcycled(Upcycled),
}

/// Memory of the host that a conversion takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPlan {
    /// All of it, what the process has already among it.
    pub peak: Bytes,
    /// Elements of a block.
    elements: usize,
}

impl Conversion {
    /// Of a Hugging Face folder, or of a checkpoint or the newest of a run.
    pub fn open(from: &Path, upcycle: Option<&Upcycle>) -> Result<Self, Error> {
        if from.join("config.json").is_file() {
            let model = hf::read(from).map_err(|error| Error::Request(error.to_string()))?;
            runs(&model)?;
            if let Some(upcycle) = upcycle {
                let (model, weights) = Upcycled::open(from, &model, upcycle)?;
                return Ok(Self::of(Weights::Upcycled(weights), model));
            }
            let folder = HuggingFace::open(from, &global_tensors(&model))?;
            return Ok(Self::of(Weights::Plain(Source::HuggingFace(folder)), model));
        }
        if upcycle.is_some() {
            return Err(Error::malformed(
                from,
                "has no config.json; a dense model is upcycled from a Hugging Face folder: convert a checkpoint to \
                 one first",
            ));
        }
        if HuggingFace::are_in(from) {
            return Err(Error::malformed(
                from,
                "has weights and no config.json, which says of what model they are: put it beside them",
            ));
        }
        let found = checkpoint::find(from)?;
        let dir = &found.resumed.checkpoint;
        let model = Index::load(dir)?.model;
        runs(&model)?;
        let saved = Checkpoint::open(dir, &model)?;
        let source = Source::Checkpoint(Box::new(saved));
        Ok(Self {
            found: Some(found),
            ..Self::of(Weights::Plain(source), model)
        })
    }

    fn of(weights: Weights, model: Model) -> Self {
        Self {
            tensors: global_tensors(&model),
            weights,
            model,
            found: None,
        }
    }

    /// The checkpoint that is read, where it is one.
    pub fn found(&self) -> Option<&Found> {
        self.found.as_ref()
    }

    /// The model that is written.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Tensors, and their bytes in f32.
    pub fn size(&self) -> (usize, Bytes) {
        let elements: usize = self.tensors.iter().map(GlobalTensor::len).sum();
        (
            self.tensors.len(),
            Bytes((elements * size_of::<f32>()) as u64),
        )
    }

    /// The memory it takes where it may have `room` bytes: blocks are made smaller to fit, down to one row.
    pub fn host(&self, room: Bytes) -> Result<HostPlan, Error> {
        let rows = self.tensors.iter().map(|tensor| tensor.matrix()[1]);
        let row = rows.max().unwrap_or(1) as u64;
        let largest = self.tensors.iter().map(|tensor| tensor.len() as u64).max();
        let fixed = resident_peak().unwrap_or(Bytes::ZERO).0
            + OF_FILES
            + OF_NAMES * self.tensors.len() as u64;
        let each = size_of::<f32>() as u64 * self.held();
        let wanted = largest
            .unwrap_or(1)
            .min(BLOCK / size_of::<f32>() as u64 / self.held());
        let fits = room.0.saturating_sub(fixed) / each;
        let elements = wanted.max(row).min(fits);
        if elements < row {
            let mib = |bytes: u64| bytes.div_ceil(MIB);
            return Err(Error::Request(format!(
                "this conversion needs {} MiB of the host's memory (one row of its widest tensor, the names of {} \
                 tensors, and the program), and may have {} MiB: allow more, or convert on a larger machine",
                mib(fixed + each * row),
                self.tensors.len(),
                mib(room.0),
            )));
        }
        Ok(HostPlan {
            peak: Bytes(fixed + each * elements),
            elements: elements as usize,
        })
    }

    /// For each element of a block, how many are in memory at once: as it is stored, and as f32; of a slice of
    /// columns whole rows of both.
    fn held(&self) -> u64 {
        match &self.weights {
            Weights::Plain(_) => 2,
            Weights::Upcycled(upcycled) => 2 * upcycled.granularity() + 1,
        }
    }

    /// Writes a Hugging Face folder, which must not be there or be empty.
    pub fn to_hugging_face(&self, dir: &Path, host: HostPlan) -> Result<(), Error> {
        self.to_hugging_face_in(dir, host, FILE_BYTES)
    }

    fn to_hugging_face_in(&self, dir: &Path, host: HostPlan, file_bytes: u64) -> Result<(), Error> {
        let config = hf_config(&self.model)?;
        self.begin(dir)?;
        write_directory(dir, |partial| {
            self.with_blocks(host, &|blocks| {
                write_folder(partial, &config, &self.tensors, file_bytes, blocks)
            })
        })
    }

    /// Writes a checkpoint before the first step into `dir`, which must not be there or be empty:
    /// `checkpoints/step-0`, as in the directory of a run.
    pub fn to_checkpoint(&self, dir: &Path, host: HostPlan) -> Result<Written, Error> {
        self.begin(dir)?;
        self.with_blocks(host, &|blocks| {
            write_initial(dir, &self.model, &self.tensors, blocks)
        })
    }

    /// Refuses to write over anything, and to read what is damaged.
    fn begin(&self, dir: &Path) -> Result<(), Error> {
        check_directory(dir, "weights are written")?;
        match &self.weights {
            Weights::Plain(Source::Checkpoint(saved)) => saved.verify_alone(),
            Weights::Plain(Source::HuggingFace(folder)) => folder.verify(),
            _ => Ok(()),
        }
    }

    fn with_blocks<T>(&self, host: HostPlan, write: &dyn Fn(&Blocks<'_>) -> T) -> T {
        let read = |region: &Region<'_>| match &self.weights {
            Weights::Plain(source) => source.read(region),
            Weights::Upcycled(upcycled) => upcycled.read(region),
        };
        write(&Blocks {
            elements: host.elements,
            read: &read,
        })
    }
}

/// Refuses a model whose tensors this program does not know by name.
fn runs(model: &Model) -> Result<(), Error> {
    let reasons = support::in_model(model);
    if reasons.is_empty() {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: format!("converting {}", model.name),
        instead: reasons.join("; "),
    })
}

#[cfg(test)]
mod tests;
