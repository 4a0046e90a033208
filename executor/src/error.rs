//! [`Error`]: everything that can go wrong while a plan runs.
//!
//! One enum for the crate, with the module errors as sources. Each message says what was found, what
//! was expected and where. Programmer errors (a tensor of the wrong shape handed to a collective)
//! are assertions instead. A message holds its cause, so causes are no `source`s: whoever prints the
//! chain of errors would print them twice.

use std::fmt;
use std::path::{Path, PathBuf};

use moefold_kernels::DeviceError;
use moefold_profiles::directory::ProfileError;

use crate::transport::TransportError;

/// A failure of a run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A collective failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// One rank failed; the others were stopped because of it.
    #[error("rank {rank}: {cause}")]
    Rank {
        /// The rank.
        rank: u32,
        /// Its failure.
        cause: Box<Error>,
    },
    /// Loss or gradient is no number any more; the step was not taken.
    #[error(
        "training diverged: loss {loss}, gradient norm {grad_norm}; the steps before it are in \
         steps.jsonl; a lower learning rate, steps of warmup or clipped gradients would help"
    )]
    Diverged {
        /// Loss of the step.
        loss: f64,
        /// Gradient norm of the step.
        grad_norm: f64,
    },
    /// What was measured could not be written.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// A rank's device failed.
    #[error("device: {0}")]
    Device(DeviceError),
    /// One rank panicked, which is a defect of this program.
    #[error("rank {rank} panicked {during}: {message}")]
    Panicked {
        /// The rank.
        rank: u32,
        /// The last collective it took part in.
        during: String,
        /// The panic's message.
        message: String,
    },
    /// A thread could not be started.
    #[error("could not start a thread for rank {rank} of {ranks}: {cause}")]
    Spawn {
        /// The rank.
        rank: u32,
        /// Ranks asked for.
        ranks: u32,
        /// What the system said.
        cause: std::io::Error,
    },
    /// The processes of a run did not find each other.
    #[error("rendezvous {0}")]
    Rendezvous(String),
    /// A file could not be read or written.
    #[error("{}: could not {action}: {cause}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried (`read`, `create`).
        action: &'static str,
        /// What the system said.
        cause: std::io::Error,
    },
    /// A rank's file of a checkpoint could not be written. Every rank removes what it wrote of that
    /// checkpoint, unless it is killed before it can.
    #[error(
        "{}: could not write the checkpoint, of which this rank's part takes {mib:.1} MiB: {cause}; once \
         it can be written, a run that resumes goes on from the last complete one, if any",
        path.display()
    )]
    Save {
        /// The file.
        path: PathBuf,
        /// How large it was to be.
        mib: f64,
        /// What the system said.
        cause: std::io::Error,
    },
    /// A run that ended could not write all that it was to leave.
    #[error("the run ended, and not all of it is there: {0}")]
    Unsaved(String),
    /// What was to be saved is no number.
    #[error(
        "{tensor}: {count} of {of} values of its {what} are no finite numbers (the first is {found}), so nothing of \
         this step is saved; a lower learning rate, steps of warmup or clipped gradients would help, and a \
         checkpoint of an earlier step can be resumed"
    )]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// What of it: its master, a moment, its weights.
        what: String,
        /// The first of them.
        found: f64,
        /// How many there are.
        count: usize,
        /// Of so many.
        of: usize,
    },
    /// The directory of a run is not this run's any more.
    #[error("{}: {why}; the run ends, since what it leaves would not be found", dir.display())]
    Lost {
        /// The directory, as it was named.
        dir: PathBuf,
        /// What became of it.
        why: &'static str,
    },
    /// A file does not hold what it should.
    #[error("{}: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What was found and what was expected.
        reason: String,
    },
    /// The plan, model or device asks for something this version does not run.
    #[error("{what} is not supported by the executor: {instead}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What would work.
        instead: String,
    },
    /// The plan or its model asks for what the executor does not run, everything listed.
    #[error(transparent)]
    Plan(#[from] Unsupported),
    /// An option or combination of options that cannot be honoured.
    #[error("{0}")]
    Request(String),
}

impl Error {
    /// Wraps an operating-system failure with the file and what was tried.
    pub fn io(path: impl AsRef<Path>, action: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.as_ref().to_owned();
        move |cause| Self::Io {
            path,
            action,
            cause,
        }
    }

    /// A file that does not hold what it should.
    pub fn malformed(path: impl AsRef<Path>, reason: impl Into<String>) -> Self {
        Self::Malformed {
            path: path.as_ref().to_owned(),
            reason: reason.into(),
        }
    }

    /// Whether the request was at fault (a bad file, flag or layout) rather than the run.
    pub fn is_bad_request(&self) -> bool {
        match self {
            Self::Malformed { .. }
            | Self::Unsupported { .. }
            | Self::Plan(_)
            | Self::Request(_) => true,
            Self::Io { action, cause, .. } => {
                matches!(*action, "open" | "read") || cause.kind() == std::io::ErrorKind::NotFound
            }
            Self::Rank { cause, .. } => cause.is_bad_request(),
            Self::Diverged { .. }
            | Self::Transport(_)
            | Self::Profile(_)
            | Self::Panicked { .. }
            | Self::Device(_)
            | Self::Rendezvous(_)
            | Self::Save { .. }
            | Self::Unsaved(_)
            | Self::Lost { .. }
            | Self::NotFinite { .. }
            | Self::Spawn { .. } => false,
        }
    }
}

/// Whose failure it is that a rank ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// Its own.
    Own,
    /// That of another rank, with which it ends.
    Rank(u32),
    /// That of another rank, which says nothing any more.
    Silent(u32),
    /// That of others, which it does not know.
    Others,
    /// That of the run: the same comes of the same steps, its directory is gone, or it has ended.
    Run,
}

impl Error {
    /// Whose failure it is.
    pub fn blame(&self) -> Blame {
        match self {
            Self::Rank { cause, .. } => cause.blame(),
            Self::Transport(
                TransportError::Deadline { missing, .. } | TransportError::Absent { missing, .. },
            ) => missing
                .first()
                .map_or(Blame::Others, |&rank| Blame::Rank(rank)),
            Self::Transport(TransportError::Stopped {
                failed_rank,
                is_silent,
                ..
            }) if *is_silent => Blame::Silent(*failed_rank),
            Self::Transport(TransportError::Stopped { failed_rank, .. }) => {
                Blame::Rank(*failed_rank)
            }
            // All ranks of a machine write to its disks: such a failure is at no place.
            Self::Rendezvous(_) | Self::Save { .. } | Self::Io { .. } | Self::Profile(_) => {
                Blame::Others
            }
            Self::Diverged { .. }
            | Self::NotFinite { .. }
            | Self::Lost { .. }
            | Self::Unsaved(_) => Blame::Run,
            _ => Blame::Own,
        }
    }
}

/// Everything in a plan that the executor does not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Unsupported {
    /// One line for each reason: what was asked for and what would work.
    pub reasons: Vec<String>,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reasons = self.reasons.join("; ");
        write!(f, "the executor does not run this plan: {reasons}")
    }
}
