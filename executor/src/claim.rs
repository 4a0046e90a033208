//! [`Claim`]: a directory that one process writes to, and nobody else.
//!
//! It is held by a lock of the directory itself (`flock(2)`), which the system lets go of with the process, however
//! that ends. Nothing is left in the directory, so one of a run that took no step is as good as new. The lock is of
//! one machine; between machines that share a file system a run's `steps.jsonl` is created by one of them alone, unless the
//! run goes on in its own directory.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use moefold_profiles::units::Bytes;

use crate::error::Error;
use crate::files::{beside, check_directory, check_new, free};

/// What a probe is called.
pub(crate) const PROBE: &str = ".moefold-probe";

/// A directory that is held.
#[derive(Debug)]
pub struct Claim {
    dir: PathBuf,
    held: File,
    /// Whether it was made to be held, and goes again where nothing is put into it.
    is_made: bool,
    /// Whether there may be something in it, which whoever holds it goes on with.
    is_again: bool,
}

fn in_use(dir: &Path, what: &str) -> Error {
    Error::Request(format!(
        "{}: another run writes to it, or it is named twice; {what} to a directory of its own: choose another",
        dir.display()
    ))
}

impl Claim {
    /// Holds `dir`, which must not exist or be empty: `what` is written to it.
    pub fn new(dir: &Path, what: &str) -> Result<Self, Error> {
        check_new(dir, what).map_err(|refused| {
            // What another writes is not to be removed.
            if Self::is_held(dir) {
                in_use(dir, what)
            } else {
                refused
            }
        })?;
        Self::made(dir, what, false)
    }

    /// Whether somebody holds a directory.
    pub fn is_held(dir: &Path) -> bool {
        File::open(dir).is_ok_and(|dir| {
            let tried = dir.try_lock();
            matches!(tried, Err(TryLockError::WouldBlock))
        })
    }

    /// Holds `dir`, whatever is in it: `what` is written to it, where it was before.
    pub fn again(dir: &Path, what: &str) -> Result<Self, Error> {
        Self::made(dir, what, true)
    }

    fn made(dir: &Path, what: &str, is_again: bool) -> Result<Self, Error> {
        let is_made = !dir.exists();
        fs::create_dir_all(dir).map_err(Error::io(dir, "create"))?;
        Self::hold(dir, is_made, is_again)?.ok_or_else(|| in_use(dir, what))
    }

    /// Holds the first of `folder/stem-1`, `folder/stem-2`, ... that nobody has made yet.
    pub fn numbered(folder: &Path, stem: &str) -> Result<Self, Error> {
        fs::create_dir_all(folder).map_err(Error::io(folder, "create"))?;
        for number in 1..=u32::MAX {
            let dir = folder.join(format!("{stem}-{number}"));
            match fs::create_dir(&dir) {
                Ok(()) => {
                    if let Some(claim) = Self::hold(&dir, true, false)? {
                        return Ok(claim);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::io(&dir, "create")(error)),
            }
        }
        unreachable!("numbers do not run out")
    }

    /// Holds `dir` for [`crate::files::write_directory`], and sees that it can make another beside it.
    pub fn of_directory(dir: &Path, what: &str) -> Result<Self, Error> {
        check_directory(dir, what)?;
        let claim = Self::new(dir, what)?;
        let beside = beside(dir);
        // Left by one that was ended while it wrote, whose number this process has.
        drop(fs::remove_dir_all(&beside));
        fs::create_dir(&beside).map_err(Error::io(&beside, "create"))?;
        let probed = probe(&beside, 1);
        // What cannot be removed is in nobody's way.
        drop(fs::remove_dir(&beside));
        probed.map(|()| claim)
    }

    /// None where another holds it, or has done so a moment ago.
    fn hold(dir: &Path, is_made: bool, is_again: bool) -> Result<Option<Self>, Error> {
        let held = match File::open(dir) {
            Ok(held) => held,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io(dir, "open")(error)),
        };
        match held.try_lock() {
            // A file system that knows no locks leaves it to the files of a run.
            Ok(()) | Err(TryLockError::Error(_)) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
        }
        let claim = Self {
            dir: dir.to_owned(),
            held,
            is_made,
            is_again,
        };
        let is_ours = claim.is_there() && (is_again || check_new(dir, "").is_ok());
        Ok(is_ours.then_some(claim))
    }

    /// Lets go of it, for another process to hold. It stays, also where it was made to be held.
    pub fn hand_on(mut self) -> PathBuf {
        self.is_made = false;
        self.dir.clone()
    }

    /// The directory, as it was named.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Whether it was held for going on with what is in it.
    pub(crate) fn is_again(&self) -> bool {
        self.is_again
    }

    /// Whether the name still leads to it.
    fn is_there(&self) -> bool {
        let same = |held: fs::Metadata, named: fs::Metadata| {
            (held.dev(), held.ino()) == (named.dev(), named.ino())
        };
        let both = self.held.metadata().ok().zip(fs::metadata(&self.dir).ok());
        both.is_some_and(|(held, named)| same(held, named))
    }

    /// Refuses to go on in a directory that was removed or renamed.
    pub fn check(&self) -> Result<(), Error> {
        if self.is_there() {
            return Ok(());
        }
        Err(Error::Lost {
            dir: self.dir.clone(),
            why: "was removed or renamed while a run wrote to it",
        })
    }

    /// Refuses where the file system has no room for so many bytes; one that does not say how much it has is trusted.
    pub fn check_room(&self, bytes: u64, what: &str) -> Result<(), Error> {
        let Some(free) = free(&self.dir).filter(|&free| bytes > free) else {
            return Ok(());
        };
        let [needed, free] = [bytes, free].map(Bytes);
        Err(Error::Request(format!(
            "{}: {needed} are needed for {what}, and {free} are free: make room, or choose another directory",
            self.dir.display()
        )))
    }

    /// Sees that so many bytes can be written: they are, and are removed again.
    pub fn probe(&self, bytes: u64) -> Result<(), Error> {
        probe(&self.dir, bytes)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.is_made && self.is_there() {
            // Where something is in it, it stays.
            let _ = fs::remove_dir(&self.dir);
        }
    }
}

fn probe(dir: &Path, bytes: u64) -> Result<(), Error> {
    let path = dir.join(PROBE);
    let write = || -> io::Result<()> {
        let mut file = File::create(&path)?;
        let block = [0; 1 << 13];
        let mut left = bytes;
        while left > 0 {
            let part = left.min(block.len() as u64);
            file.write_all(&block[..part as usize])?;
            left -= part;
        }
        // Some file systems say only now that they are full.
        file.sync_data()
    };
    let written = write();
    // What cannot be removed was not made.
    let _ = fs::remove_file(&path);
    written.map_err(|cause| Error::Io {
        path: dir.to_owned(),
        action: "write what a run leaves",
        cause,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    #[test]
    fn law_of_many_that_ask_at_once_each_gets_a_directory_of_its_own() {
        let all = tempfile::tempdir().expect("writable");
        let folder = all.path().join("runs");
        let barrier = Barrier::new(16);
        let claims: Vec<Claim> = thread::scope(|scope| {
            let threads: Vec<_> = (0..16)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        Claim::numbered(&folder, "run").expect("one is free")
                    })
                })
                .collect();
            let ended = threads.into_iter().map(thread::ScopedJoinHandle::join);
            ended.map(|claim| claim.expect("no panic")).collect()
        });
        let mut dirs: Vec<&Path> = claims.iter().map(Claim::path).collect();
        dirs.sort();
        dirs.dedup();
        assert_eq!(dirs.len(), 16);
    }

    #[test]
    fn law_of_many_that_name_one_directory_one_gets_it() {
        let all = tempfile::tempdir().expect("writable");
        for round in 0..20 {
            let dir = all.path().join(format!("run-{round}"));
            let barrier = Barrier::new(4);
            let claims: Vec<Result<Claim, Error>> = thread::scope(|scope| {
                let threads: Vec<_> = (0..4)
                    .map(|_| {
                        scope.spawn(|| {
                            barrier.wait();
                            Claim::new(&dir, "a run is written")
                        })
                    })
                    .collect();
                let ended = threads.into_iter().map(thread::ScopedJoinHandle::join);
                ended.map(|claim| claim.expect("no panic")).collect()
            });
            assert_eq!(claims.iter().filter(|claim| claim.is_ok()).count(), 1);
            for refused in claims.iter().filter_map(|claim| claim.as_ref().err()) {
                let text = refused.to_string();
                assert!(text.contains("another run writes to it"), "{text}");
                assert!(refused.is_bad_request());
            }
        }
    }

    #[test]
    fn a_directory_that_nothing_was_put_into_goes_with_its_claim() {
        let all = tempfile::tempdir().expect("writable");
        let (new, old) = (all.path().join("new"), all.path().join("old"));
        fs::create_dir(&old).expect("writable");
        for dir in [&new, &old] {
            let claim = Claim::new(dir, "a run is written").expect("is free");
            claim.probe(100_000).expect("room");
            assert!(check_new(dir, "").is_ok(), "nothing of the probe is left");
        }
        assert!(!new.exists() && old.exists());
        let claim = Claim::new(&new, "a run is written").expect("is free again");
        fs::write(new.join("file"), "").expect("writable");
        drop(claim);
        assert!(new.join("file").exists());
    }

    #[test]
    fn a_directory_with_something_in_it_is_held_again_by_one_at_a_time() {
        let all = tempfile::tempdir().expect("writable");
        let dir = all.path().join("run");
        let claim = Claim::numbered(all.path(), "run").expect("is free");
        assert_eq!(claim.hand_on(), all.path().join("run-1"));
        assert!(all.path().join("run-1").is_dir(), "it stays");
        fs::create_dir(&dir).expect("writable");
        fs::write(dir.join("file"), "").expect("writable");
        assert!(Claim::new(&dir, "a run is written").is_err());
        let claim = Claim::again(&dir, "a run goes on").expect("nobody has it");
        let text = Claim::again(&dir, "a run goes on")
            .expect_err("is held")
            .to_string();
        assert!(text.contains("another run writes to it"), "{text}");
        drop(claim);
        assert!(dir.join("file").is_file());
        Claim::again(&dir, "a run goes on").expect("nobody has it any more");
    }

    #[test]
    fn a_directory_that_was_renamed_is_lost() {
        let all = tempfile::tempdir().expect("writable");
        let dir = all.path().join("run");
        let claim = Claim::new(&dir, "a run is written").expect("is free");
        claim.check().expect("is there");
        fs::rename(&dir, all.path().join("other")).expect("renames");
        let lost = claim.check().expect_err("is elsewhere");
        assert!(lost.to_string().contains("removed or renamed"), "{lost}");
        // Another of the same name is not it.
        fs::create_dir(&dir).expect("writable");
        assert!(claim.check().is_err());
        drop(claim);
        assert!(dir.exists(), "it is somebody else's");
    }

    #[test]
    fn what_has_no_room_is_refused_and_leaves_nothing() {
        let all = tempfile::tempdir().expect("writable");
        let dir = all.path().join("weights");
        let claim = Claim::of_directory(&dir, "weights are written").expect("writable");
        claim.check_room(1, "the weights").expect("a byte");
        let refused = claim.check_room(u64::MAX, "the weights");
        let text = refused.expect_err("16 EiB").to_string();
        assert!(text.contains("are needed for the weights, and"), "{text}");
        drop(claim);
        assert!(!dir.exists());
    }

    #[test]
    fn a_directory_that_cannot_be_written_is_refused() {
        let all = tempfile::tempdir().expect("writable");
        let file = all.path().join("file");
        fs::write(&file, "").expect("writable");
        for dir in [file.join("within"), PathBuf::from("/proc/moefold")] {
            for claimed in [
                Claim::new(&dir, "a run is written"),
                Claim::of_directory(&dir, "weights are written"),
            ] {
                let text = claimed.expect_err("cannot be made").to_string();
                assert!(text.contains("could not create"), "{text}");
            }
        }
    }
}
