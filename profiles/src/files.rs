//! Files that are whole or not there: written to a temporary name beside the final one, then renamed.

use std::fs::Permissions;
use std::io::{self, BufWriter, Write};
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
        .permissions(default_permissions())
        .tempfile_in(folder)?;
    let mut writer = BufWriter::with_capacity(1 << 20, file.as_file_mut());
    fill(&mut writer)?;
    writer.flush()?;
    drop(writer);
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

/// What a file created the ordinary way may do; a temporary file's own default is private.
fn default_permissions() -> Permissions {
    use std::os::unix::fs::PermissionsExt as _;
    Permissions::from_mode(0o666)
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
    }
}
