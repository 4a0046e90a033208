//! Files that are whole or not there: written to a temporary name beside the final one, then renamed.

use std::fs::OpenOptions;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Writes `path` through `fill`. Until it returns and the data is out, the old content stays.
pub fn write_atomically(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut file = tempfile::Builder::new()
        .prefix(".moefold-")
        // With the permissions of a file created the ordinary way, and errors that do not name what nobody asked for.
        .make_in(folder, |path| {
            let mut options = OpenOptions::new();
            options.write(true).create_new(true).mode(0o666).open(path)
        })?;
    let mut writer = BufWriter::with_capacity(1 << 20, file.as_file_mut());
    fill(&mut writer)?;
    writer.flush()?;
    drop(writer);
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
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
        let nowhere = write_atomically(&folder.path().join("no/plan.json"), |_| Ok(()));
        let said = nowhere.expect_err("no folder").to_string();
        assert_eq!(said, "No such file or directory (os error 2)");
    }
}
