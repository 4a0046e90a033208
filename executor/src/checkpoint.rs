//! Checkpoints: all that training needs to go on, so that a run can stop and another take it up.
//!
//! `RUN_DIR/checkpoints/step-N/` is the state after `N` steps: a safetensors file a rank with the f32
//! masters and both moments of what that rank updates, and `checkpoint.json`, the [`Index`]. Everything
//! is keyed by rectangles of global tensors, so any layout, number of ranks and device reads what any
//! other has written; under the same layout training goes on to the bit. Weights are not saved: they
//! are the masters, rounded.
//!
//! A checkpoint is written as `step-N.partial`, the index last, and renamed; so one under its final name
//! is whole, whenever the run is stopped. Training goes on while it is written ([`Saver`]). Reading checks sizes first,
//! then the hash of every file, that of the index among them.

mod read;
mod room;
mod save;
#[cfg(test)]
mod tests;
mod write;

use std::borrow::Cow;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use moefold_planner::layout::Batch;
use moefold_planner::model::Model;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::data::{Order, Packing, Samples};
use crate::error::Error;
use crate::lr::{Anneal, Decay};
use crate::options::{BIAS_UPDATE_RATE, MTP_LOSS_SCALING_FACTOR, Resumed, TrainOptions};
use crate::weights::{GlobalTensor, Rectangle, State};

pub use read::Checkpoint;
pub use room::bytes;
pub(crate) use save::Saver;
pub use write::Written;
pub(crate) use write::{discard_partial, write_initial};

/// Version of the format of `checkpoint.json`.
pub const CHECKPOINT_VERSION: u32 = 1;

/// Complete checkpoints that a run keeps: the newest, and one more should a file of it go bad.
pub const KEPT: usize = 2;

/// The index of a checkpoint, in its folder.
const INDEX: &str = "checkpoint.json";

/// Where a run's checkpoints are, in its directory.
pub(crate) const FOLDER: &str = "checkpoints";

/// What a checkpoint is of, and what is in which of its files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Index {
    /// Format version, [`CHECKPOINT_VERSION`].
    pub version: u32,
    /// Steps taken.
    pub step: u64,
    /// How it was trained; absent of weights that no run of this program has trained.
    #[serde(rename = "course", default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Fingerprint>,
    /// The model, as in a plan.
    pub model: Model,
    /// A file of every rank, in rank order.
    pub files: Vec<ShardFile>,
    /// Whether the file of it holds what was written.
    #[serde(skip)]
    seal: Seal,
}

/// Whether an index holds what was written, by the hash that ends its file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Seal {
    /// It has no hash: it was not read from a file, or from one of before there was a hash.
    #[default]
    None,
    Whole,
    Broken,
}

/// Between the text of an index and the hash of that text, which is the last key.
const SEAL: &str = r#","blake3":""#;

/// One file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardFile {
    /// Its name, in the folder of the index.
    name: String,
    /// Its size.
    bytes: u64,
    /// Its BLAKE3, in hexadecimal.
    blake3: String,
    /// The rectangles whose states it holds.
    regions: Vec<Rectangle>,
}

/// What must be the same for training to go on as if it had not stopped. Keys are those of plans, or
/// flags of the command line without their dashes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint {
    seq_len: u64,
    global_batch: u64,
    /// Tokens of the data, and [`Samples::fingerprint`].
    data_tokens: u64,
    data_blake3: String,
    /// None where samples are taken in the order of the data.
    shuffle_seed: Option<u64>,
    lr: f64,
    lr_schedule: Decay,
    warmup: u64,
    /// Steps until the rate has decayed, where it does.
    steps: Option<u64>,
    /// As [`LearningRate`] has them; absent where they are its own.
    ///
    /// [`LearningRate`]: crate::lr::LearningRate
    #[serde(default, skip_serializing_if = "Option::is_none")]
    min_lr: Option<f64>,
    #[serde(default)]
    wsd_decay: Anneal,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    wsd_decay_steps: Option<u64>,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    clip: Option<f64>,
    aux_loss_coef: f64,
    #[serde(default = "mtp_loss_scaling_factor")]
    mtp_loss_scaling_factor: f64,
    #[serde(default)]
    seq_aux_loss_coef: f64,
    #[serde(default)]
    global_aux_loss_coef: f64,
    #[serde(default)]
    z_loss_coef: f64,
    #[serde(default = "bias_update_rate")]
    bias_update_rate: f64,
    /// Absent where samples are whole sequences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    packing: Option<Packing>,
}

/// That of checkpoints from before it could be given, whose models have no such bias.
fn bias_update_rate() -> f64 {
    BIAS_UPDATE_RATE
}

/// That of checkpoints from before it could be given.
fn mtp_loss_scaling_factor() -> f64 {
    MTP_LOSS_SCALING_FACTOR
}

impl Fingerprint {
    /// How `options` say to train.
    pub fn of(options: &TrainOptions, batch: &Batch, samples: &Samples) -> Result<Self, Error> {
        let (lr, adam, balancing) = (&options.lr, &options.adam, &options.balancing);
        Ok(Self {
            seq_len: batch.seq_len,
            global_batch: batch.global_batch,
            data_tokens: samples.num_tokens(),
            data_blake3: samples.fingerprint()?,
            shuffle_seed: match samples.order() {
                Order::TokenStream => None,
                Order::Shuffled { seed } => Some(seed),
            },
            lr: lr.peak,
            lr_schedule: lr.decay,
            warmup: lr.warmup,
            steps: (lr.decay != Decay::Constant).then_some(lr.steps),
            min_lr: lr.floor,
            wsd_decay: lr.anneal,
            wsd_decay_steps: lr.anneal_steps,
            beta1: adam.betas.0,
            beta2: adam.betas.1,
            eps: adam.eps,
            weight_decay: adam.weight_decay,
            clip: adam.clip,
            aux_loss_coef: balancing.aux_loss_coef,
            seq_aux_loss_coef: balancing.seq_aux_loss_coef,
            global_aux_loss_coef: balancing.global_aux_loss_coef,
            z_loss_coef: balancing.z_loss_coef,
            bias_update_rate: balancing.bias_update_rate,
            mtp_loss_scaling_factor: options.mtp_loss_scaling_factor,
            packing: Some(samples.packing()).filter(Packing::is_any),
        })
    }
}

impl Index {
    /// Reads the index of the checkpoint in `dir`.
    pub fn load(dir: &Path) -> Result<Self, Error> {
        Ok(Self::look(dir)?)
    }

    /// The same, telling what is not complete from what is.
    fn look(dir: &Path) -> Result<Self, Flaw> {
        let path = dir.join(INDEX);
        let text = fs::read(&path).map_err(Flaw::read(&path, "read"))?;
        let bad = |error: serde_json::Error| {
            let why = format!("is no index of a checkpoint: {error}");
            if error.is_eof() {
                return Flaw::incomplete(&path, why);
            }
            Flaw::Other(Error::malformed(&path, why))
        };
        let (text, seal) = unsealed(&text);
        let value: Value = serde_json::from_slice(&text).map_err(bad)?;
        let version = &value["version"];
        if *version != CHECKPOINT_VERSION {
            let reason = format!(
                "has version {version}, this program reads {CHECKPOINT_VERSION}: resume with the \
                 program that wrote it"
            );
            return Err(Flaw::Other(Error::malformed(&path, reason)));
        }
        let mut index: Self = serde_json::from_value(value).map_err(bad)?;
        index.seal = seal;
        let refuse = |reason: String| Err(Flaw::Other(Error::malformed(&path, reason)));
        let mut files = index.files.iter();
        if let Some(file) = files.clone().find(|file| file.name.contains('/')) {
            let name = &file.name;
            return refuse(format!("names the file {name:?}; expected files beside it"));
        }
        if files
            .try_fold(0_u64, |all, file| all.checked_add(file.bytes))
            .is_none()
        {
            return refuse("says that its files hold 2^64 bytes and more".to_owned());
        }
        Ok(index)
    }

    /// Its file: one object, of which the last key is the hash of the object without that key.
    fn sealed(&self) -> String {
        let text = serde_json::to_string(self).expect("plain data");
        let hash = blake3::hash(text.as_bytes());
        let open = text.strip_suffix('}').expect("an object");
        format!("{open}{SEAL}{}\"}}", hash.to_hex())
    }

    /// Refuses an index whose file does not hold what was written.
    fn check_seal(&self, dir: &Path) -> Result<(), Error> {
        if self.seal == Seal::Broken {
            return Err(Error::malformed(
                dir.join(INDEX),
                "does not hold what was written: resume from another checkpoint of the run",
            ));
        }
        Ok(())
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Refuses a checkpoint in `dir` of which a file is missing or is not as long as it was written.
    fn check_files(&self, dir: &Path) -> Result<(), Flaw> {
        for file in &self.files {
            let path = dir.join(&file.name);
            let found = fs::metadata(&path).map_err(Flaw::read(&path, "measure"))?;
            if found.len() != file.bytes {
                let why = format!("holds {} bytes; {} were written", found.len(), file.bytes);
                return Err(Flaw::incomplete(path, why));
            }
        }
        Ok(())
    }

    /// What is wrong where the files do not hold every element of `tensors` once and nothing else.
    fn check_cover(&self, tensors: &[GlobalTensor]) -> Result<(), String> {
        let mut found: Vec<&Rectangle> = self.files.iter().flat_map(|file| &file.regions).collect();
        found.sort_by_key(|region| (&region.tensor, region.rows, region.cols));
        let mut rest = &found[..];
        for tensor in tensors {
            let count = rest.partition_point(|region| region.tensor <= tensor.name);
            let (own, others) = rest.split_at(count);
            rest = others;
            if let Some(other) = own.iter().find(|region| region.tensor != tensor.name) {
                return Err(format!("{} is not of this model", other.tensor));
            }
            if let Some(other) = own.iter().find(|region| region.dims != tensor.dims) {
                return Err(format!(
                    "{} is {:?}, expected {:?}",
                    tensor.name, other.dims, tensor.dims
                ));
            }
            check_tiles(own, tensor).map_err(|why| format!("{} {why}", tensor.name))?;
        }
        match rest.first() {
            None => Ok(()),
            Some(other) => Err(format!("{} is not of this model", other.tensor)),
        }
    }
}

/// The text of an index without its hash, and what that says.
fn unsealed(file: &[u8]) -> (Cow<'_, [u8]>, Seal) {
    let hash_length = 2 * blake3::OUT_LEN;
    let parts = file.strip_suffix(b"\"}").and_then(|rest| {
        let (rest, hash) = rest.split_at_checked(rest.len().checked_sub(hash_length)?)?;
        Some((rest.strip_suffix(SEAL.as_bytes())?, hash))
    });
    let Some((open, hash)) = parts else {
        return (Cow::Borrowed(file), Seal::None);
    };
    let text = [open, b"}"].concat();
    let is_whole = blake3::hash(&text).to_hex().as_bytes() == hash;
    let seal = if is_whole { Seal::Whole } else { Seal::Broken };
    (Cow::Owned(text), seal)
}

/// Why a checkpoint cannot be used.
#[derive(Debug)]
enum Flaw {
    /// Part of it is not there: it was stopped while it was written, copied or removed.
    Incomplete { path: PathBuf, why: String },
    /// Anything else, which an older checkpoint would not mend.
    Other(Error),
}

impl Flaw {
    fn incomplete(path: impl AsRef<Path>, why: impl Into<String>) -> Self {
        Self::Incomplete {
            path: path.as_ref().to_owned(),
            why: why.into(),
        }
    }

    /// What a failure to read a file of a checkpoint says of it.
    fn read(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |cause| match cause.kind() {
            io::ErrorKind::NotFound => Self::incomplete(path, "is missing from its checkpoint"),
            _ => Self::Other(Error::io(path, action)(cause)),
        }
    }
}

impl From<Flaw> for Error {
    fn from(flaw: Flaw) -> Self {
        match flaw {
            Flaw::Incomplete { path, why } => Self::malformed(path, why),
            Flaw::Other(error) => error,
        }
    }
}

/// Whether rectangles, ordered by their first rows, tile a tensor.
fn check_tiles(rectangles: &[&Rectangle], tensor: &GlobalTensor) -> Result<(), &'static str> {
    let [rows, cols] = tensor.matrix();
    let within = |[start, end]: [usize; 2], len: usize| start < end && end <= len;
    let mut area = 0;
    for (i, one) in rectangles.iter().enumerate() {
        if !within(one.rows, rows) || !within(one.cols, cols) {
            return Err("has a part that lies outside it");
        }
        area += one.region().len();
        let below = rectangles[i + 1..].iter();
        // Those that follow begin at later rows, so the first that begins below ends the search.
        let mut beside = below.take_while(|other| other.rows[0] < one.rows[1]);
        if beside.any(|other| other.cols[0] < one.cols[1] && one.cols[0] < other.cols[1]) {
            return Err("has a part that is there twice");
        }
    }
    if area == tensor.len() {
        Ok(())
    } else {
        Err("is not there in full")
    }
}

/// A model by what decides how it trains on.
fn describe(model: &Model) -> Value {
    // What it is called, what lengths it is meant for, and how its weights were first drawn.
    const OTHER: [&str; 3] = ["name", "max_position", "initializer_range"];
    let mut value = serde_json::to_value(model).expect("a model is plain data");
    if let Some(keys) = value.as_object_mut() {
        keys.retain(|key, _| !OTHER.contains(&key.as_str()));
    }
    value
}

/// The keys under which two JSON objects differ, with both values where they are short.
fn differences(saved: &Value, now: &Value) -> Vec<String> {
    let empty = serde_json::Map::new();
    let [saved, now] = [saved, now].map(|value| value.as_object().unwrap_or(&empty));
    let keys = now
        .keys()
        .chain(saved.keys().filter(|key| !now.contains_key(*key)));
    let differ = keys.filter(|&key| saved.get(key) != now.get(key));
    let short = |value: Option<&Value>| match value {
        None | Some(Value::Null) => Some("none".to_owned()),
        Some(Value::Object(_) | Value::Array(_)) => None,
        Some(value) => Some(value.to_string()),
    };
    differ
        .map(|key| match (short(saved.get(key)), short(now.get(key))) {
            (Some(saved), Some(now)) => format!("{key} was {saved} and is {now}"),
            _ => format!("{key} differs"),
        })
        .collect()
}

/// How a model differs from another that is to be trained on, in words.
pub fn of_other_model(found: &Model, now: &Model) -> Option<String> {
    let [found, now] = [found, now].map(describe);
    let differ = differences(&found, &now);
    (!differ.is_empty()).then(|| differ.join(", "))
}

/// The checkpoint that a path leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Which one.
    pub resumed: Resumed,
    /// Why newer ones were passed over, a sentence each.
    pub passed_over: Vec<String>,
}

/// The checkpoint at `path`, or the newest complete one of the run there. Only what is not complete is
/// passed over: steps that are saved, and cannot be read just now, are not lost without a word.
pub fn find(path: &Path) -> Result<Found, Error> {
    if path.join(INDEX).is_file() {
        return Ok(Found {
            resumed: Resumed {
                checkpoint: path.to_owned(),
                step: {
                    let index = Index::load(path)?;
                    index.check_seal(path)?;
                    index.step
                },
            },
            passed_over: Vec::new(),
        });
    }
    if !path.exists() {
        let reason = "does not exist; expected a checkpoint, or the directory of a run";
        return Err(Error::malformed(path, reason));
    }
    let folder = path.join(FOLDER);
    if !folder.is_dir() {
        return Err(Error::malformed(
            path,
            format!(
                "is no checkpoint and no run that has any: expected {INDEX} or a folder \
                 {FOLDER} in it, which a run has that was asked to save every some steps"
            ),
        ));
    }
    let (newest, passed_over) = newest(path)?;
    newest.map_or_else(
        || {
            let why = passed_over.join("; ");
            let separator = if why.is_empty() { "" } else { ": " };
            Err(Error::malformed(
                folder,
                format!("holds no complete checkpoint{separator}{why}"),
            ))
        },
        |resumed| {
            Ok(Found {
                resumed,
                passed_over: passed_over.clone(),
            })
        },
    )
}

/// The newest complete checkpoint of the run in `run_dir`, where it has one, and why newer ones were passed over.
pub fn newest(run_dir: &Path) -> Result<(Option<Resumed>, Vec<String>), Error> {
    let folder = run_dir.join(FOLDER);
    if !folder.is_dir() {
        return Ok((None, Vec::new()));
    }
    let mut passed_over = Vec::new();
    for (step, dir) in complete(&folder)?.into_iter().rev() {
        let looked = Index::look(&dir).and_then(|index| {
            index.check_files(&dir)?;
            Ok(index)
        });
        match looked {
            Ok(index) if index.step != step => {
                let found = index.step;
                let reason = format!(
                    "is of step {found}, in a folder named after step {step}: give that folder its name \
                     back, or name the one to resume"
                );
                return Err(Error::malformed(dir.join(INDEX), reason));
            }
            Ok(index) => {
                index.check_seal(&dir)?;
                let checkpoint = dir;
                return Ok((Some(Resumed { checkpoint, step }), passed_over));
            }
            Err(Flaw::Incomplete { path, why }) => {
                let file = path.display();
                passed_over.push(format!("{} is not complete: {file}: {why}", dir.display()));
            }
            Err(Flaw::Other(error)) => return Err(error),
        }
    }
    Ok((None, passed_over))
}

/// The folders that checkpoints have once they are complete, with their steps, in order.
fn complete(folder: &Path) -> Result<Vec<(u64, PathBuf)>, Error> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(Error::io(folder, "read"))? {
        let path = entry.map_err(Error::io(folder, "read"))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let step = name
            .strip_prefix("step-")
            .and_then(|step| step.parse().ok());
        if let Some(step) = step {
            found.push((step, path));
        }
    }
    found.sort();
    Ok(found)
}

/// The folder of the checkpoint after `step` steps.
fn folder_of(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("step-{step}"))
}

/// The same while it is written, or removed.
fn partial(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("step-{step}.partial"))
}

/// The name of a state of a rectangle in a file.
fn name_of(region: &Rectangle, state: State) -> String {
    let ([top, bottom], [left, right]) = (region.rows, region.cols);
    format!(
        "{}[{top}:{bottom},{left}:{right}].{}",
        region.tensor,
        state.name()
    )
}
