//! Writes checkpoints: each rank its own file, rank 0 the index once all are there.

use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Read as _, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use moefold_planner::model::Model;
use serde::Serialize;

use super::{CHECKPOINT_VERSION, FOLDER, Fingerprint, Flaw, INDEX, Index, KEPT, ShardFile};
use super::{complete, folder_of, name_of, partial, room};
use crate::error::Error;
use crate::gather::{bytes_of, read, words, words_of};
use crate::model::global_tensors;
use crate::optimizer::Owned;
use crate::options::TrainOptions;
use crate::step::Stepper;
use crate::train::Trainer;
use crate::transport::{Communicator, RankContext};
use crate::weights::stored::header;
use crate::weights::{Blocks, GlobalTensor, Rectangle, Region, State};

/// A checkpoint that was written.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Written {
    /// Its folder.
    pub dir: PathBuf,
    /// Steps taken.
    pub step: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// What it took, from the end of a step on.
    pub seconds: f64,
    /// Why older ones that are not kept are still there, a sentence each; the next save tries again.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_removed: Vec<String>,
}

/// Saves the state of one rank, together with those of the others.
pub(crate) struct Saver<'a> {
    rank: &'a RankContext,
    every: u64,
    last: u64,
    folder: PathBuf,
    fingerprint: Fingerprint,
    model: Model,
    tensors: Vec<GlobalTensor>,
}

impl<'a> Saver<'a> {
    /// As `options` ask for it, which then have a `fingerprint`; agrees with the other ranks on where to save,
    /// and sees that there is room.
    pub(crate) fn of(
        rank: &'a RankContext,
        world: &Communicator,
        options: &TrainOptions,
        model: &Model,
        fingerprint: Option<&Fingerprint>,
    ) -> Result<Option<Self>, Error> {
        let (Some(saving), Some(fingerprint)) = (&options.save, fingerprint) else {
            return Ok(None);
        };
        let folder = said_by_first(world, &saving.run_dir)?.join(FOLDER);
        let tensors = global_tensors(model);
        if rank.rank() == 0 {
            let first = options.init.resumed().map_or(0, |resumed| resumed.step);
            let count = room::at_once(first, options.steps, saving.every);
            let elements: usize = tensors.iter().map(GlobalTensor::len).sum();
            let bytes = State::ALL.len() * elements * size_of::<f32>();
            room::check(&folder, count, bytes as u64)?;
        }
        Ok(Some(Self {
            rank,
            every: saving.every,
            last: options.steps,
            folder,
            fingerprint: fingerprint.clone(),
            model: model.clone(),
            tensors,
        }))
    }

    /// Whether a checkpoint is due after `step` steps.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.every) || step == self.last
    }

    /// Saves the state after `step` steps. When it returns, on any rank, the checkpoint is complete; a
    /// rank on which it fails leaves nothing that it wrote.
    pub(crate) fn save(&self, trainer: &Trainer, step: u64) -> Result<Written, Error> {
        let began = Instant::now();
        let (bytes, not_removed) = self
            .write(trainer, step)
            .inspect_err(|_| self.take_back(step))?;
        Ok(Written {
            dir: folder_of(&self.folder, step),
            step,
            bytes,
            seconds: began.elapsed().as_secs_f64(),
            not_removed,
        })
    }

    /// Writes this rank's file, on rank 0 the index too. On rank 0 the bytes are those of all files, and
    /// the sentences those of [`Written`].
    fn write(&self, trainer: &Trainer, step: u64) -> Result<(u64, Vec<String>), Error> {
        let dir = partial(&self.folder, step);
        fs::create_dir_all(&dir).map_err(Error::io(&dir, "create"))?;
        let own = write_file(&dir, self.rank.rank(), trainer.stepper())?;
        let (mut bytes, mut not_removed) = (own.bytes, Vec::new());
        if self.rank.rank() > 0 {
            self.rank.send_first(words(&own))?;
        } else {
            let mut files = vec![own];
            for other in 1..self.rank.ranks() {
                files.push(read(other, &self.rank.receive(other)?)?);
            }
            let index = Index {
                version: CHECKPOINT_VERSION,
                step,
                fingerprint: Some(self.fingerprint.clone()),
                model: self.model.clone(),
                files,
            };
            let covered = index.check_cover(&self.tensors);
            covered.unwrap_or_else(|why| panic!("the ranks saved other than the model: {why}"));
            commit(&self.folder, &index, self.rank.is_apart())?;
            not_removed = prune(&self.folder);
            bytes = index.bytes();
        }
        // Together into the next step, whose time would else hold the rest of this.
        trainer.cx.world.barrier()?;
        Ok((bytes, not_removed))
    }

    /// Removes what this rank has written of a checkpoint that is not complete, and its folder after the
    /// last rank.
    fn take_back(&self, step: u64) {
        let dir = partial(&self.folder, step);
        // The run has failed; what cannot be removed is in nobody's way.
        let _ = fs::remove_file(dir.join(name_of_file(self.rank.rank())));
        if self.rank.rank() == 0 {
            let _ = fs::remove_file(dir.join(INDEX));
        }
        let _ = fs::remove_dir(dir);
    }
}

/// Rank 0's path, made absolute, on every rank.
fn said_by_first(world: &Communicator, path: &Path) -> Result<PathBuf, Error> {
    use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
    let path = std::path::absolute(path).map_err(Error::io(path, "find"))?;
    let said = world.exchange_counts(&words_of(path.as_os_str().as_bytes()))?;
    let first = bytes_of(&said[0]).expect("rank 0 says a path");
    Ok(PathBuf::from(std::ffi::OsString::from_vec(first)))
}

fn name_of_file(rank: u32) -> String {
    format!("rank-{rank}.safetensors")
}

/// Writes the states of what a rank owns into a file of `dir`, a slice at a time.
fn write_file(dir: &Path, rank: u32, stepper: &Stepper) -> Result<ShardFile, Error> {
    let owned: Vec<_> = stepper.optimizer.owned(&stepper.store.shard).collect();
    let name = name_of_file(rank);
    let path = dir.join(&name);
    let write = || -> io::Result<Hashing> {
        let mut out = Hashing::create(&path)?;
        write_states(&mut out, &owned)?;
        out.finish()?;
        Ok(out)
    };
    let out = write().map_err(|cause| {
        let elements: usize = owned.iter().map(Owned::len).sum();
        let bytes = State::ALL.len() * elements * size_of::<f32>();
        Error::Save {
            path: path.clone(),
            mib: bytes as f64 / f64::from(1 << 20),
            cause,
        }
    })?;
    Ok(out.described(name, owned.iter().flat_map(Owned::regions)))
}

/// Writes into `run_dir` the checkpoint before the first step of weights that come block by block: with moments
/// of zero, of no course.
pub(crate) fn write_initial(
    run_dir: &Path,
    model: &Model,
    tensors: &[GlobalTensor],
    blocks: &Blocks<'_>,
) -> Result<Written, Error> {
    let began = Instant::now();
    let folder = run_dir.join(FOLDER);
    let dir = partial(&folder, 0);
    fs::create_dir_all(&dir).map_err(Error::io(&dir, "create"))?;
    let write = || -> Result<u64, Error> {
        let name = name_of_file(0);
        let path = dir.join(&name);
        let io = |cause| Error::io(&path, "write")(cause);
        let mut out = Hashing::create(&path).map_err(io)?;
        let entries = tensors.iter().flat_map(|tensor| {
            let states = State::of(&tensor.name).iter();
            states.map(|&state| entry(&tensor.whole(), state))
        });
        out.write_all(&header(None, entries)).map_err(io)?;
        for tensor in tensors {
            for state in State::of(&tensor.name) {
                if *state == State::Master {
                    blocks.each(tensor, &mut |values| {
                        out.write_all(bytemuck::cast_slice(values)).map_err(io)
                    })?;
                } else {
                    let bytes = (tensor.len() * size_of::<f32>()) as u64;
                    io::copy(&mut io::repeat(0).take(bytes), &mut out).map_err(io)?;
                }
            }
        }
        out.finish().map_err(io)?;
        let index = Index {
            version: CHECKPOINT_VERSION,
            step: 0,
            fingerprint: None,
            model: model.clone(),
            files: vec![out.described(name, tensors.iter().map(GlobalTensor::whole))],
        };
        let covered = index.check_cover(tensors);
        covered.unwrap_or_else(|why| panic!("other than the model was written: {why}"));
        commit(&folder, &index, false)?;
        Ok(index.bytes())
    };
    // What cannot be removed is in nobody's way, and what others have put there stays.
    let bytes = write().inspect_err(|_| {
        drop(fs::remove_dir_all(&dir));
        drop(fs::remove_dir(&folder).and_then(|()| fs::remove_dir(run_dir)));
    })?;
    Ok(Written {
        dir: folder_of(&folder, 0),
        step: 0,
        bytes,
        seconds: began.elapsed().as_secs_f64(),
        not_removed: Vec::new(),
    })
}

/// A state of a region as a tensor of a file.
fn entry(region: &Region<'_>, state: State) -> (String, Vec<usize>) {
    let shape = vec![region.rows.len(), region.cols.len()];
    (name_of(&Rectangle::from(region), state), shape)
}

fn write_states(out: &mut dyn Write, owned: &[Owned<'_>]) -> io::Result<()> {
    let named = owned.iter().flat_map(|owned| {
        let states = owned.states().iter();
        states.flat_map(|&state| owned.regions().into_iter().map(move |r| entry(&r, state)))
    });
    out.write_all(&header(None, named))?;
    for owned in owned {
        for &state in owned.states() {
            // Rectangles of a range follow each other as its elements do.
            out.write_all(bytemuck::cast_slice(&owned.state(state)))?;
        }
    }
    Ok(())
}

/// Hashes and counts what is written.
struct Hashing {
    out: BufWriter<File>,
    hash: blake3::Hasher,
    bytes: u64,
}

impl Hashing {
    fn create(path: &Path) -> io::Result<Self> {
        Ok(Self {
            out: BufWriter::with_capacity(1 << 20, File::create(path)?),
            hash: blake3::Hasher::new(),
            bytes: 0,
        })
    }

    /// A name is only given to what is on the disk.
    fn finish(&mut self) -> io::Result<()> {
        self.out.flush()?;
        self.out.get_ref().sync_all()
    }

    /// What was written, under a name, of some regions.
    fn described<'a>(&self, name: String, regions: impl Iterator<Item = Region<'a>>) -> ShardFile {
        ShardFile {
            name,
            bytes: self.bytes,
            blake3: self.hash.finalize().to_hex().to_string(),
            regions: regions.map(|region| Rectangle::from(&region)).collect(),
        }
    }
}

impl Write for Hashing {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let count = self.out.write(buffer)?;
        self.hash.update(&buffer[..count]);
        self.bytes += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Writes the index and gives the checkpoint its name; `apart` where the files come from other processes.
pub(super) fn commit(folder: &Path, index: &Index, apart: bool) -> Result<(), Error> {
    let (dir, path) = (partial(folder, index.step), folder_of(folder, index.step));
    index.check_files(&dir).map_err(|flaw| match flaw {
        Flaw::Incomplete { path, why } if apart => Error::Request(format!(
            "{}: {why}: ranks on several machines save to a run directory that all of them share",
            path.display()
        )),
        Flaw::Incomplete { path, why } => Error::io(path, "write")(io::Error::other(why)),
        Flaw::Other(error) => error,
    })?;
    let at = dir.join(INDEX);
    let write = || -> io::Result<()> {
        let mut out = BufWriter::new(File::create(&at)?);
        serde_json::to_writer(&mut out, index)?;
        out.flush()?;
        out.get_ref().sync_all()?;
        sync(&dir)
    };
    write().map_err(Error::io(&at, "write"))?;
    fs::rename(&dir, &path).map_err(Error::io(&path, "create"))?;
    sync(folder).map_err(Error::io(folder, "write"))
}

/// Removes the checkpoints that are not kept any more, and what an earlier try has left of others. Says
/// of those that it could not remove why: the newest is complete, so the run goes on.
fn prune(folder: &Path) -> Vec<String> {
    let mut left = Vec::new();
    let mut note = |done: Result<(), Error>| left.extend(done.err().map(|error| error.to_string()));
    let mut all = complete(folder).unwrap_or_else(|error| {
        note(Err(error));
        Vec::new()
    });
    all.truncate(all.len().saturating_sub(KEPT));
    for (step, old) in all {
        // Under another name first: what is half removed must not look whole.
        note(fs::rename(&old, partial(folder, step)).map_err(Error::io(&old, "remove")));
    }
    for path in partials(folder) {
        note(remove(&path).map_err(Error::io(&path, "remove")));
    }
    left
}

/// Makes the names in a folder last.
fn sync(folder: &Path) -> io::Result<()> {
    where_it_can(File::open(folder)?.sync_all())
}

/// Passes over that a file system does not know how to bring a folder to the disk, as some of networks.
fn where_it_can(synced: io::Result<()>) -> io::Result<()> {
    synced.or_else(|error| match error.kind() {
        ErrorKind::InvalidInput | ErrorKind::Unsupported => Ok(()),
        _ => Err(error),
    })
}

/// Removes what a run that failed was writing.
pub(crate) fn discard_partial(run_dir: &Path) {
    for path in partials(&run_dir.join(FOLDER)) {
        // The run has failed; what cannot be removed is in nobody's way.
        let _ = remove(&path);
    }
}

/// What lies in a folder under the name of what is not complete.
fn partials(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "partial"))
        .collect()
}

/// Removes a folder, or the file that somebody put where it would be.
fn remove(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_file_system_need_not_know_how_to_sync_a_folder() {
        let said = |errno: Errno| where_it_can(Err(errno.into()));
        for errno in [Errno::INVAL, Errno::OPNOTSUPP, Errno::NOSYS] {
            said(errno).unwrap_or_else(|error| panic!("{errno:?}: {error}"));
        }
        for errno in [Errno::IO, Errno::NOSPC, Errno::DQUOT] {
            said(errno).expect_err("names are not on the disk");
        }
    }
}
