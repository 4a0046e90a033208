//! [`Error`]: why a check could not be made. What is wrong with a kernel or with training is no error of
//! the check but a line of its report.

use std::io;
use std::path::{Path, PathBuf};

use moefold_kernels::DeviceError;
use moefold_planner::model::ModelError;

use crate::trials;

/// Why a check could not be made. A message holds its cause.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device under test could not be opened.
    #[error(transparent)]
    NoDevice(DeviceError),
    /// A part of the check is not one that this crate wrote.
    #[error(transparent)]
    Part(serde_json::Error),
    /// No op or trial was asked for.
    #[error(
        "no op or trial has this in its name; gemm, grouped_gemm, attention, permute are some ops, the \
         trials are {}",
        trials::NAMES.join(", ")
    )]
    NothingWanted,
    /// The folder for what is found could not be made.
    #[error("{}: could not create it: {cause}", path.display())]
    Out {
        /// The folder.
        path: PathBuf,
        /// What the system says.
        cause: io::Error,
    },
    /// What was found could not be written.
    #[error("{}: could not write it: {cause}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system says.
        cause: io::Error,
    },
    /// A trial has no place to work in.
    #[error("{}: cannot be written: {cause}", path.display())]
    Trial {
        /// Its folder, or a file there.
        path: PathBuf,
        /// What the system says.
        cause: io::Error,
    },
    /// The device failed in a part that has no case to report it for.
    #[error(transparent)]
    Device(DeviceError),
    /// A case of a part failed, which the part has said.
    #[error("a case failed, and what the device does after it says nothing")]
    CaseFailed,
    /// A published model could not be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Data for a trial could not be written.
    #[error(transparent)]
    Data(#[from] moefold_executor::Error),
    /// What is to be written has no form in JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// A process could not be run, or a line could not be said.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Error {
    /// What becomes of a failure to make or write something of a trial.
    pub(crate) fn of_trial(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |cause| Self::Trial { path, cause }
    }
}
