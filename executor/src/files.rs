//! Files that are whole or not there: written to a temporary name, then renamed.

use std::io::{BufWriter, Write};
use std::path::Path;

use crate::error::Error;

/// Writes `path` through `fill`. Until it returns and the data is out, the old content stays.
pub fn write_atomically(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
) -> Result<(), Error> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut file = tempfile::Builder::new()
        .prefix(".moefold-")
        .permissions(default_permissions())
        .tempfile_in(folder)
        .map_err(Error::io(path, "create"))?;
    let mut writer = BufWriter::with_capacity(1 << 20, file.as_file_mut());
    fill(&mut writer)
        .and_then(|()| writer.flush())
        .map_err(Error::io(path, "write"))?;
    drop(writer);
    file.persist(path)
        .map_err(|error| Error::io(path, "rename")(error.error))?;
    Ok(())
}

/// Writes `path` as JSON on indented lines, atomically.
pub fn write_json(path: &Path, value: &impl serde::Serialize) -> Result<(), Error> {
    write_atomically(path, |out| {
        serde_json::to_writer_pretty(&mut *out, value)?;
        out.write_all(b"\n")
    })
}

/// What a file created the ordinary way may do; a temporary file's own default is private.
fn default_permissions() -> std::fs::Permissions {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::Permissions::from_mode(0o666)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("plan.json");
        write_json(&path, &1).expect("writes");
        let failed = write_atomically(&path, |out| {
            out.write_all(b"half")?;
            Err(std::io::Error::other("disk full"))
        });
        let text = failed.expect_err("fails").to_string();
        assert!(
            text.contains("plan.json: could not write: disk full"),
            "{text}"
        );
        assert_eq!(std::fs::read_to_string(&path).expect("there"), "1\n");
        assert_eq!(std::fs::read_dir(folder.path()).expect("there").count(), 1);
    }
}
