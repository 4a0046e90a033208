//! Initial and final weights, by global tensor.
//!
//! A rank asks a [`Source`] for the [`Region`]s of global tensors it holds: a checkpoint on disk (of
//! Hugging Face, or of a run), or random numbers that depend on the seed and the tensor's name only. None
//! knows layouts, so the same weights come out of every one. Global tensors are named as the model's
//! Hugging Face checkpoints name them, one per expert; other spellings are the checkpoint reader's
//! business.

mod config;
mod hugging_face;
mod random;
mod region;
mod save;
pub(crate) mod stored;

use std::path::Path;

pub use config::hf_config;
pub use hugging_face::HuggingFace;
pub use region::{GlobalTensor, Region, State};
pub(crate) use region::{Rectangle, check_finite};
pub(crate) use save::{Blocks, FILE_BYTES, write_folder};
pub use save::{Collector, saved_bytes};

use self::random::normal_region;
use crate::checkpoint::Checkpoint;
use crate::error::Error;

/// Where initial weights come from.
#[derive(Debug)]
pub enum Source {
    /// Norms at one, biases at zero, the rest normal, sinks of attention among it.
    Random {
        /// The seed.
        seed: u64,
        /// Standard deviation.
        std: f64,
    },
    /// A Hugging Face checkpoint.
    HuggingFace(HuggingFace),
    /// A checkpoint of a run.
    Checkpoint(Box<Checkpoint>),
}

impl Source {
    /// A Hugging Face folder, whose tensors must be exactly `expected`.
    pub fn hugging_face(dir: &Path, expected: &[GlobalTensor]) -> Result<Self, Error> {
        HuggingFace::open(dir, expected).map(Self::HuggingFace)
    }

    /// What tells it from others, for ranks to compare: what is trained differs almost everywhere, so of every tensor
    /// of a folder its first bytes are enough.
    pub(crate) fn described(&self) -> Result<String, Error> {
        Ok(match self {
            Self::Random { seed, .. } => format!("random, seed {seed}"),
            Self::HuggingFace(folder) => format!("weights {}", folder.mark()?),
            Self::Checkpoint(saved) => {
                format!(
                    "a checkpoint after {} steps, {}",
                    saved.step(),
                    saved.mark()
                )
            }
        })
    }

    /// The run's checkpoint, where that is what it is.
    pub(crate) fn saved(&self) -> Option<&Checkpoint> {
        match self {
            Self::Checkpoint(saved) => Some(saved),
            Self::Random { .. } | Self::HuggingFace(_) => None,
        }
    }

    /// The values of a region, row by row. Refuses those of others that are no finite numbers.
    pub fn read(&self, region: &Region<'_>) -> Result<Vec<f32>, Error> {
        match self {
            Self::HuggingFace(folder) => {
                let values = folder.read(region)?;
                if let Some(value) = values.iter().find(|value| !value.is_finite()) {
                    let reason = format!(
                        "{} holds {value}; expected finite numbers: training from it would give none",
                        region.tensor
                    );
                    return Err(Error::malformed(folder.dir(), reason));
                }
                Ok(values)
            }
            Self::Checkpoint(saved) => saved.read(State::Master, region),
            Self::Random { .. } if region.tensor.ends_with("bias") => Ok(vec![0.0; region.len()]),
            Self::Random { .. } if region.dims.len() == 1 && !region.tensor.ends_with("sinks") => {
                Ok(vec![1.0; region.len()])
            }
            Self::Random { seed, std } => Ok(normal_region(*seed, region, *std)),
        }
    }
}
