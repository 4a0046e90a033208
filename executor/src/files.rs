//! Files and directories, written whole or not at all.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Serializer;

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

/// A path as text; bytes that are no UTF-8 are replaced.
pub fn shown<S: Serializer>(path: impl AsRef<Path>, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&path.as_ref().display())
}

/// Bytes that the file system of a folder has free, which need not be there yet; where it says so.
pub(crate) fn free(folder: &Path) -> Option<u64> {
    let there = folder.ancestors().find(|folder| folder.exists())?;
    let room = rustix::fs::statvfs(there).ok()?;
    Some(room.f_bavail * room.f_frsize)
}

/// Refuses a directory that something is in, and a file: `what` is written to a new or empty directory.
pub fn check_new(dir: &Path, what: &str) -> Result<(), Error> {
    let found = match fs::read_dir(dir).map(|mut entries| entries.next()) {
        Ok(Some(_)) => "is not empty",
        // What was not there may be made by another meanwhile.
        Err(error) if error.kind() != std::io::ErrorKind::NotFound && dir.exists() => {
            "is no directory"
        }
        Ok(None) | Err(_) => return Ok(()),
    };
    Err(Error::Request(format!(
        "{}: {found}; {what} to a new or empty directory: choose another, or remove this one",
        dir.display()
    )))
}

/// Refuses the directory of a run, whose files would be written over, and a file: `what` is written to another.
pub fn check_no_run(dir: &Path, what: &str) -> Result<(), Error> {
    if dir.is_file() {
        return check_new(dir, what);
    }
    let files = ["steps.jsonl", "summary.json"];
    let Some(file) = files.iter().find(|file| dir.join(file).exists()) else {
        return Ok(());
    };
    Err(Error::Request(format!(
        "{}: found a run's {file}; {what} to a directory of its own: choose another",
        dir.display()
    )))
}

/// Refuses what [`write_directory`] cannot make: what [`check_new`] refuses, and a path without a name.
pub fn check_directory(dir: &Path, what: &str) -> Result<(), Error> {
    if dir.file_name().is_none() {
        return Err(Error::Request(format!(
            "{}: has no name of its own; {what} to a directory that takes the place of another: name it",
            dir.display()
        )));
    }
    check_new(dir, what)
}

/// Makes the directory `dir`, which [`check_directory`] passes, through `fill`: it gets another beside it, which takes the
/// name once all is there.
pub fn write_directory(
    dir: &Path,
    fill: impl FnOnce(&Path) -> Result<(), Error>,
) -> Result<(), Error> {
    let beside = beside(dir);
    drop(fs::remove_dir_all(&beside));
    fs::create_dir_all(&beside).map_err(Error::io(&beside, "create"))?;
    let written = fill(&beside).and_then(|()| {
        let renamed = fs::rename(&beside, dir);
        renamed.map_err(Error::io(dir, "create"))
    });
    // What cannot be removed is in nobody's way.
    written.inspect_err(|_| drop(fs::remove_dir_all(&beside)))
}

/// A directory of this process's own, on the same file system.
pub(crate) fn beside(dir: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(dir.file_name().unwrap_or_default());
    name.push(format!(".{}.partial", std::process::id()));
    dir.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).expect("readable");
        let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
        entries
            .map(|entry| name(entry).to_string_lossy().into_owned())
            .collect()
    }

    #[test]
    fn a_directory_is_there_whole_or_not_at_all() {
        let all = tempfile::tempdir().expect("writable");
        // As shells complete it.
        let dir = all.path().join("out/");
        let fill = |dir: &Path| write_json(&dir.join("a.json"), &1);
        write_directory(&dir, fill).expect("written");
        assert_eq!(names(&dir), ["a.json"]);
        let failed = write_directory(&all.path().join("other"), |dir| {
            fill(dir)?;
            Err(Error::Request("no more".to_owned()))
        });
        assert!(failed.is_err());
        // Something is in the way.
        assert!(write_directory(&dir, fill).is_err());
        assert_eq!(names(all.path()), ["out"]);
    }

    #[test]
    fn what_is_there_is_not_written_over() {
        let all = tempfile::tempdir().expect("writable");
        let (full, file) = (all.path().join("full"), all.path().join("full/file"));
        fs::create_dir(&full).expect("writable");
        fs::write(&file, "").expect("writable");
        for (dir, found) in [
            (full.as_path(), "is not empty"),
            (file.as_path(), "is no directory"),
            (Path::new("."), "has no name"),
            (Path::new("/"), "has no name"),
        ] {
            let error = check_directory(dir, "weights are written").expect_err(found);
            assert!(error.to_string().contains(found), "{error}");
        }
        assert!(check_directory(&all.path().join("new"), "weights are written").is_ok());
        // A run is not written over, and what else is in a directory is nobody's concern.
        let of_profile = |dir: &Path| check_no_run(dir, "a profile is written");
        assert!(of_profile(&full).is_ok() && of_profile(&all.path().join("new")).is_ok());
        let refused = of_profile(&file).expect_err("a file").to_string();
        assert!(refused.contains("is no directory"), "{refused}");
        fs::write(full.join("steps.jsonl"), "").expect("writable");
        let refused = of_profile(&full).expect_err("a run").to_string();
        assert!(refused.contains("found a run's steps.jsonl"), "{refused}");
    }
}
