//! [`Checkpoint`]: a checkpoint, read rectangle by rectangle.
//!
//! Its files are open only while something is read from them: every rank of a run knows all of them, and
//! there may be more than a process may have open.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use moefold_planner::model::Model;
use safetensors::tensor::Dtype;

use super::{Fingerprint, INDEX, Index, differences, name_of, of_other_model};
use crate::error::Error;
use crate::model::{Parameter, global_tensors};
use crate::optimizer::ZeroAdam;
use crate::store::Store;
use crate::sums::hash_of;
use crate::transport::Communicator;
use crate::weights::stored::{Stored, read_header};
use crate::weights::{Rectangle, Region, State};

/// A checkpoint that holds the states of a model, every element once. Files are as long as they should
/// be; that they hold what was written is seen by [`Checkpoint::verify`].
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    index: Index,
    /// The files, as the index lists them.
    files: Vec<PathBuf>,
    /// By tensor.
    pieces: BTreeMap<String, Vec<Piece>>,
}

/// A rectangle of a tensor in a file.
#[derive(Debug)]
struct Piece {
    file: usize,
    rectangle: Rectangle,
    /// Where its states begin in the file, in the order of [`State::ALL`], bytes; 0 of those it has not.
    at: [u64; 3],
}

impl Checkpoint {
    /// Opens the checkpoint in `dir`, which must be of `model`.
    pub fn open(dir: &Path, model: &Model) -> Result<Self, Error> {
        let index = Index::load(dir)?;
        if let Some(differs) = of_other_model(&index.model, model) {
            return Err(Error::Request(format!(
                "{}: is a checkpoint of another model than {}: {differs}",
                dir.display(),
                model.name
            )));
        }
        index.check_files(dir)?;
        let covered = index.check_cover(&global_tensors(model));
        covered.map_err(|why| Error::malformed(dir.join(INDEX), why))?;
        // After what says more of it.
        index.check_seal(dir)?;
        let mut files = Vec::new();
        let mut pieces: BTreeMap<String, Vec<Piece>> = BTreeMap::new();
        for (number, listed) in index.files.iter().enumerate() {
            let path = dir.join(&listed.name);
            let file = File::open(&path).map_err(Error::io(&path, "open"))?;
            let mut stored = BTreeMap::new();
            read_header(&path, &file, number, &mut stored)?;
            for rectangle in &listed.regions {
                let piece = locate(rectangle, number, &stored)
                    .map_err(|reason| Error::malformed(&path, reason))?;
                let of_tensor = pieces.entry(rectangle.tensor.clone()).or_default();
                of_tensor.push(piece);
            }
            files.push(path);
        }
        Ok(Self {
            dir: dir.to_owned(),
            index,
            files,
            pieces,
        })
    }

    /// Its folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Steps taken.
    pub fn step(&self) -> u64 {
        self.index.step
    }

    /// A hash of its index, which holds those of its files.
    pub(crate) fn mark(&self) -> String {
        let hash = blake3::hash(self.index.sealed().as_bytes());
        hash.to_hex()[..16].to_owned()
    }

    /// Refuses to go on otherwise than it was trained, or where nothing is left of `steps` steps.
    pub fn check(&self, fingerprint: &Fingerprint, steps: u64) -> Result<(), Error> {
        let value =
            |fingerprint| serde_json::to_value(fingerprint).expect("options are plain data");
        let saved = self.index.fingerprint.as_ref().map(value);
        let now = value(fingerprint);
        let differ = saved.map_or(Vec::new(), |saved| differences(&saved, &now));
        if !differ.is_empty() {
            return Err(Error::Request(format!(
                "{}: was trained otherwise, so a run that resumes it would not go on as it began: {}; \
                 give what was given then, or start anew from saved weights",
                self.dir.display(),
                differ.join(", ")
            )));
        }
        if self.step() >= steps {
            return Err(Error::Request(format!(
                "{}: {} steps are done, of {steps} that are asked for in all: ask for more",
                self.dir.display(),
                self.step()
            )));
        }
        Ok(())
    }

    /// Sees that all ranks have opened the same checkpoint, and that its files hold what was written.
    /// The ranks share out the files, since each is read in full.
    pub(crate) fn verify(&self, world: &Communicator) -> Result<(), Error> {
        for number in (world.index()..self.files.len()).step_by(world.size()) {
            self.verify_file(number)?;
        }
        let named = blake3::hash(&serde_json::to_vec(&self.index).expect("plain data"));
        let (word, _) = named.as_bytes().split_first_chunk().expect("32 bytes");
        let words = world.exchange_counts(&[u64::from_le_bytes(*word)])?;
        if let Some(other) = words.iter().position(|word| *word != words[0]) {
            return Err(Error::Request(format!(
                "{}: ranks 0 and {other} read different checkpoints of this name: resume from a folder \
                 that all ranks share",
                self.dir.display()
            )));
        }
        Ok(())
    }

    /// Sees that all files hold what was written.
    pub(crate) fn verify_alone(&self) -> Result<(), Error> {
        (0..self.files.len()).try_for_each(|number| self.verify_file(number))
    }

    fn verify_file(&self, number: usize) -> Result<(), Error> {
        let path = &self.files[number];
        if hash_of(path)? == self.index.files[number].blake3 {
            return Ok(());
        }
        Err(Error::malformed(
            path,
            "does not hold what was written: resume from another checkpoint of the run",
        ))
    }

    /// A state of the elements of a region, row by row.
    pub fn read(&self, state: State, region: &Region<'_>) -> Result<Vec<f32>, Error> {
        let width = region.cols.len();
        let mut values = vec![0.0; region.len()];
        for piece in &self.pieces[region.tensor] {
            let of = piece.rectangle.region();
            let rows = of.rows.start.max(region.rows.start)..of.rows.end.min(region.rows.end);
            let cols = of.cols.start.max(region.cols.start)..of.cols.end.min(region.cols.end);
            if rows.is_empty() || cols.is_empty() {
                continue;
            }
            // Whole rows of the piece: its columns lie next to each other.
            let path = &self.files[piece.file];
            let file = File::open(path).map_err(Error::io(path, "open"))?;
            let mut bytes = vec![0; rows.len() * of.cols.len() * size_of::<f32>()];
            let skipped = (rows.start - of.rows.start) * of.cols.len() * size_of::<f32>();
            let at = piece.at[state as usize] + skipped as u64;
            file.read_exact_at(&mut bytes, at)
                .map_err(Error::io(path, "read"))?;
            let found = bytes.as_chunks::<4>().0;
            for (row, found) in rows.zip(found.chunks(of.cols.len())) {
                let to = (row - region.rows.start) * width + cols.start - region.cols.start;
                let from = cols.start - of.cols.start;
                let to = &mut values[to..to + cols.len()];
                for (value, bytes) in to.iter_mut().zip(&found[from..]) {
                    *value = f32::from_le_bytes(*bytes);
                }
            }
        }
        Ok(values)
    }

    /// Gives an optimizer the moments and the count of steps that it had; masters are given their values
    /// with the weights.
    pub(crate) fn restore(&self, store: &Store, optimizer: &mut ZeroAdam) -> Result<(), Error> {
        for parameter in &store.shard.parameters {
            for state in [State::FirstMoment, State::SecondMoment] {
                self.restore_state(state, parameter, optimizer)?;
            }
        }
        optimizer.resume_at(self.step());
        Ok(())
    }

    fn restore_state(
        &self,
        state: State,
        parameter: &Parameter,
        optimizer: &ZeroAdam,
    ) -> Result<(), Error> {
        let slices = parameter.slices.iter();
        for slice in slices.filter(|slice| State::of(&slice.tensor).contains(&state)) {
            if let Some(elements) = optimizer.elements(parameter, slice) {
                let mut values = Vec::with_capacity(elements.len());
                for part in slice.region().parts(elements) {
                    values.extend(self.read(state, &part)?);
                }
                optimizer.put(state, parameter, slice, &values);
            }
        }
        Ok(())
    }
}

/// Finds the states of a rectangle among the tensors of a file.
fn locate(
    rectangle: &Rectangle,
    file: usize,
    stored: &BTreeMap<String, Stored>,
) -> Result<Piece, String> {
    let region = rectangle.region();
    let mut at = [0; 3];
    for &state in State::of(region.tensor) {
        let name = name_of(rectangle, state);
        let found = stored
            .get(&name)
            .ok_or_else(|| format!("lacks {name}, which {INDEX} says it holds"))?;
        let shape = [region.rows.len(), region.cols.len()];
        if found.dtype != Dtype::F32 || found.shape != shape {
            return Err(format!(
                "{name} is {:?} {:?}, expected F32 {shape:?}",
                found.dtype, found.shape
            ));
        }
        at[state as usize] = found.at;
    }
    Ok(Piece {
        file,
        rectangle: rectangle.clone(),
        at,
    })
}
