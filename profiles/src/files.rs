//! Files that are whole or not there: written to a temporary name beside the final one, then renamed.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use tempfile::NamedTempFile;

/// Writes `path` through `fill`. Until it returns and the data is out, the old content stays.
pub fn write_atomically(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = beside(path)?;
    let mut writer = BufWriter::with_capacity(1 << 20, file.as_file_mut());
    fill(&mut writer)?;
    writer.flush()?;
    drop(writer);
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// Whether [`write_atomically`] may write `path`: it is no folder, and the one that it is in takes files.
pub fn check_writable(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    beside(path).map(drop)
}

/// A new file in the folder of `path`, which is gone when it is let go of.
fn beside(path: &Path) -> io::Result<NamedTempFile<File>> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    tempfile::Builder::new()
        .prefix(".moefold-")
        // With the permissions of a file created the ordinary way, and errors that do not name what nobody asked for.
        .make_in(folder, |path| {
            let mut options = OpenOptions::new();
            options.write(true).create_new(true).mode(0o666).open(path)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("plan.json");
        write_atomically(&path, |out| out.write_all(b"1\n")).expect("writes");
        let failed = write_atomically(&path, |out| {
            out.write_all(b"half")?;
            Err(io::Error::other("disk full"))
        });
        assert_eq!(failed.expect_err("fails").to_string(), "disk full");
        assert_eq!(std::fs::read_to_string(&path).expect("there"), "1\n");
        assert_eq!(std::fs::read_dir(folder.path()).expect("there").count(), 1);
        assert!(check_writable(&path).is_ok());
        assert_eq!(std::fs::read_dir(folder.path()).expect("there").count(), 1);
        let nowhere = folder.path().join("no/plan.json");
        for refused in [
            write_atomically(&nowhere, |_| Ok(())),
            check_writable(&nowhere),
        ] {
            let said = refused.expect_err("no folder").to_string();
            assert_eq!(said, "No such file or directory (os error 2)");
        }
        let said = check_writable(folder.path()).expect_err("a folder");
        assert_eq!(said.kind(), io::ErrorKind::IsADirectory);
    }
}
