//! Files of a report, each written under a temporary name and renamed: a reader never sees half of
//! one.

use std::path::{Path, PathBuf};

use crate::ReportError;
use crate::draw::png;
use crate::draw::scene::Scene;

/// A directory that files are written into.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    written: Vec<PathBuf>,
}

impl Directory {
    /// Makes the directory where it is not there.
    pub(crate) fn create(path: &Path) -> Result<Self, ReportError> {
        std::fs::create_dir_all(path).map_err(|error| failed(path, &error))?;
        Ok(Self {
            path: path.to_owned(),
            written: Vec::new(),
        })
    }

    /// Writes a text.
    pub(crate) fn text(&mut self, name: &str, text: &str) -> Result<(), ReportError> {
        let temporary = self.temporary(name);
        let done = std::fs::write(&temporary, text).map_err(|error| failed(&temporary, &error));
        self.finish(name, &temporary, done)
    }

    /// Writes a picture as PNG; `name` ends in `.png`.
    pub(crate) fn png(&mut self, name: &str, scene: &Scene) -> Result<(), ReportError> {
        let temporary = self.temporary(name);
        let done = png::write(scene, &temporary).map_err(|error| failed(&temporary, &error));
        self.finish(name, &temporary, done)
    }

    /// The files written, in order.
    pub(crate) fn into_written(self) -> Vec<PathBuf> {
        self.written
    }

    /// A name beside the final one; the ending stays, since it says the format.
    fn temporary(&self, name: &str) -> PathBuf {
        self.path.join(format!(".{}.{name}", std::process::id()))
    }

    fn finish(
        &mut self,
        name: &str,
        temporary: &Path,
        done: Result<(), ReportError>,
    ) -> Result<(), ReportError> {
        let path = self.path.join(name);
        let done = done.and_then(|()| {
            std::fs::rename(temporary, &path).map_err(|error| failed(&path, &error))
        });
        match done {
            Ok(()) => self.written.push(path),
            Err(error) => {
                // The first failure is the one to report; a leftover may not exist at all.
                let _ = std::fs::remove_file(temporary);
                return Err(error);
            }
        }
        Ok(())
    }
}

fn failed(path: &Path, error: &impl std::fmt::Display) -> ReportError {
    ReportError::Write {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}
