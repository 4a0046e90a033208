//! How a command fails: which exit code, and the one message a user sees.

use std::fmt;
use std::process::ExitCode;

use moefold_executor::Error;
use moefold_executor::error::Blame;

use crate::signals;

/// Why a command did not do what was asked.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Something broke while running: exit code 1.
    Runtime(anyhow::Error),
    /// What was asked cannot be done as asked (flag, file, layout): exit code 2.
    Request(anyhow::Error),
    /// A defect of this program, said by the panic hook already: exit code 1.
    Reported,
    /// The request is fine and nothing satisfies it: exit code 3.
    Infeasible(anyhow::Error),
    /// A signal asked for the end: exit code 128 and its number.
    Signalled(usize, anyhow::Error),
}

impl Failure {
    /// A failure of the request, from any error that explains itself.
    pub(crate) fn request(error: impl Into<anyhow::Error>) -> Self {
        Self::Request(error.into())
    }

    /// A failure while running.
    pub(crate) fn runtime(error: impl Into<anyhow::Error>) -> Self {
        Self::Runtime(error.into())
    }

    /// The exit code.
    pub(crate) fn code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Runtime(_) | Self::Reported => 1,
            Self::Request(_) => 2,
            Self::Infeasible(_) => 3,
            Self::Signalled(signal, _) => signals::code(*signal) as u8,
        })
    }

    /// Whose failure it is, where it is one of ranks.
    pub(crate) fn blame(&self) -> Blame {
        let error = self.error().and_then(|error| error.downcast_ref::<Error>());
        error.map_or(Blame::Own, Error::blame)
    }

    fn error(&self) -> Option<&anyhow::Error> {
        match self {
            Self::Runtime(error)
            | Self::Request(error)
            | Self::Infeasible(error)
            | Self::Signalled(_, error) => Some(error),
            Self::Reported => None,
        }
    }

    /// Whether the reader of our output went away, which is no failure of ours.
    pub(crate) fn is_broken_pipe(&self) -> bool {
        let Some(error) = self.error() else {
            return false;
        };
        error.chain().any(|cause| {
            cause
                .downcast_ref::<std::io::Error>()
                .is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.error() {
            Some(error) => write!(f, "{error:#}"),
            None => f.write_str("a defect of moefold"),
        }
    }
}

/// Lets `?` turn an operating failure into [`Failure::Runtime`].
impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::runtime(error)
    }
}

/// A failure of the executor, with the exit code that fits.
pub(crate) fn failure(error: Error) -> Failure {
    if error.is_bad_request() {
        Failure::request(error)
    } else {
        Failure::runtime(error)
    }
}
