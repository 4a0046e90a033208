//! Files of a report, each written under a temporary name and renamed: a reader never sees half of
//! one.

use std::path::{Path, PathBuf};

use moefold_profiles::files::write_atomically;

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
        let path = self.path.join(name);
        write_atomically(&path, |out| out.write_all(text.as_bytes()))
            .map_err(|error| failed(&path, &error))?;
        self.written.push(path);
        Ok(())
    }

    /// Writes a picture as PNG; `name` ends in `.png`. The backend opens its file itself, by a name
    /// whose ending says the format.
    pub(crate) fn png(&mut self, name: &str, scene: &Scene) -> Result<(), ReportError> {
        let path = self.path.join(name);
        let temporary = self.path.join(format!(".{}.{name}", std::process::id()));
        let done = png::write(scene, &temporary)
            .map_err(|error| failed(&temporary, &error))
            .and_then(|()| {
                std::fs::rename(&temporary, &path).map_err(|error| failed(&path, &error))
            });
        if done.is_err() {
            // The first failure is the one to report; a leftover may not exist at all.
            let _ = std::fs::remove_file(&temporary);
        }
        done?;
        self.written.push(path);
        Ok(())
    }

    /// The files written, in order.
    pub(crate) fn into_written(self) -> Vec<PathBuf> {
        self.written
    }
}

fn failed(path: &Path, error: &impl std::fmt::Display) -> ReportError {
    ReportError::Write {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}
