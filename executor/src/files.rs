//! JSON files of a run, written whole or not at all.

use std::io::Write;
use std::path::Path;

use crate::error::Error;

/// Writes `path` through `fill`, atomically.
pub fn write_atomically(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
) -> Result<(), Error> {
    moefold_profiles::files::write_atomically(path, fill).map_err(Error::io(path, "write"))
}

/// Writes `path` as JSON on indented lines, atomically.
pub fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<(), Error> {
    write_atomically(path, |out| {
        serde_json::to_writer_pretty(&mut *out, value)?;
        out.write_all(b"\n")
    })
}
