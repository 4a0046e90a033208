//! Writes checkpoints: the file of a rank from a snapshot, the index once all files are there.

use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Read as _, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use moefold_planner::model::Model;
use serde::Serialize;

use super::{CHECKPOINT_VERSION, FOLDER, Flaw, INDEX, Index, KEPT, Seal, ShardFile};
use super::{complete, folder_of, name_of, partial};
use crate::error::Error;
use crate::optimizer::Owned;
use crate::step::Stepper;
use crate::sums::Hashed;
use crate::weights::stored::header;
use crate::weights::{Blocks, GlobalTensor, Rectangle, Region, State, check_finite};

/// A checkpoint that was written.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Written {
    /// Its folder.
    #[serde(serialize_with = "crate::files::shown")]
    pub dir: PathBuf,
    /// Steps taken.
    pub step: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// What it took, from the end of a step until it was complete.
    pub seconds: f64,
    /// How long training waited of that.
    pub held_s: f64,
    /// Why older ones that are not kept are still there, a sentence each; the next save tries again.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_removed: Vec<String>,
}

fn name_of_file(rank: u32) -> String {
    format!("rank-{rank}.safetensors")
}

/// What one rank saves, apart from its device: training may go on.
pub(super) struct Snapshot {
    header: Vec<u8>,
    /// In the order of the header.
    values: Vec<Vec<f32>>,
    regions: Vec<Rectangle>,
}

impl Snapshot {
    /// Copies the states of what a rank owns. Refuses those that no run could go on from.
    pub(super) fn take(stepper: &Stepper) -> Result<Self, Error> {
        let owned: Vec<_> = stepper.optimizer.owned(&stepper.store.shard).collect();
        let named = owned.iter().flat_map(|owned| {
            let states = owned.states().iter();
            states.flat_map(|&state| owned.regions().into_iter().map(move |r| entry(&r, state)))
        });
        let header = header(None, named);
        let mut values = Vec::new();
        for owned in &owned {
            for &state in owned.states() {
                // Rectangles of a range follow each other as its elements do.
                let state_values = owned.state(state);
                let whole = &owned.regions()[0];
                check_finite(whole.tensor, state.name(), &state_values)?;
                values.push(state_values);
            }
        }
        let regions = owned.iter().flat_map(Owned::regions);
        Ok(Self {
            header,
            values,
            regions: regions.map(|region| Rectangle::from(&region)).collect(),
        })
    }

    /// Writes it into the file of a rank in `dir`; ends early where `give_up` says so.
    pub(super) fn write(
        self,
        dir: &Path,
        rank: u32,
        give_up: &AtomicBool,
    ) -> Result<ShardFile, Error> {
        let name = name_of_file(rank);
        let path = dir.join(&name);
        let elements: usize = self.values.iter().map(Vec::len).sum();
        let write = || -> io::Result<ShardFile> {
            let mut out = create(&path)?;
            out.write_all(&self.header)?;
            for values in self.values {
                pause();
                if give_up.load(Ordering::Relaxed) {
                    return Err(io::Error::other("the run ended first"));
                }
                out.write_all(bytemuck::cast_slice(&values))?;
            }
            finish(out, name, self.regions)
        };
        write().map_err(|cause| Error::Save {
            path: path.clone(),
            mib: (elements * size_of::<f32>()) as f64 / f64::from(1 << 20),
            cause,
        })
    }
}

/// Removes what a rank has written of a checkpoint that is not complete, and its folder after the last rank.
pub(super) fn take_back(folder: &Path, step: u64, rank: u32) {
    let dir = partial(folder, step);
    // What cannot be removed is in nobody's way.
    let _ = fs::remove_file(dir.join(name_of_file(rank)));
    if rank == 0 {
        let _ = fs::remove_file(dir.join(INDEX));
    }
    let _ = fs::remove_dir(dir);
}

/// How long tests let a file take beside what it takes.
#[cfg(test)]
pub(super) static PAUSE_MS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

#[cfg(test)]
fn pause() {
    std::thread::sleep(std::time::Duration::from_millis(
        PAUSE_MS.load(Ordering::Relaxed),
    ));
}

#[cfg(not(test))]
fn pause() {}

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
        let mut out = create(&path).map_err(io)?;
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
        let regions = tensors
            .iter()
            .map(|tensor| Rectangle::from(&tensor.whole()));
        let file = finish(out, name, regions.collect()).map_err(io)?;
        let index = Index {
            version: CHECKPOINT_VERSION,
            step: 0,
            fingerprint: None,
            model: model.clone(),
            files: vec![file],
            seal: Seal::None,
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
        held_s: 0.0,
        not_removed: Vec::new(),
    })
}

/// A state of a region as a tensor of a file.
fn entry(region: &Region<'_>, state: State) -> (String, Vec<usize>) {
    let shape = vec![region.rows.len(), region.cols.len()];
    (name_of(&Rectangle::from(region), state), shape)
}

/// The file of a rank that is written.
fn create(path: &Path) -> io::Result<Hashed<BufWriter<File>>> {
    Ok(Hashed::new(BufWriter::with_capacity(
        1 << 20,
        File::create(path)?,
    )))
}

/// What was written, under a name, of some regions. A name is only given to what is on the disk.
fn finish(
    mut out: Hashed<BufWriter<File>>,
    name: String,
    regions: Vec<Rectangle>,
) -> io::Result<ShardFile> {
    out.flush()?;
    out.out.get_ref().sync_all()?;
    Ok(ShardFile {
        name,
        bytes: out.bytes(),
        blake3: out.hex(),
        regions,
    })
}

/// What a rank finds that does not see rank 0's files, or the other way round.
pub(super) fn not_shared(path: &Path, why: &str) -> Error {
    Error::Request(format!(
        "{}: {why}: ranks on several machines save to a run directory that all of them share",
        path.display()
    ))
}

/// Writes the index and gives the checkpoint its name; `apart` where the files come from other processes.
pub(super) fn commit(folder: &Path, index: &Index, apart: bool) -> Result<(), Error> {
    let (dir, path) = (partial(folder, index.step), folder_of(folder, index.step));
    index.check_files(&dir).map_err(|flaw| match flaw {
        Flaw::Incomplete { path, why } if apart => not_shared(&path, &why),
        Flaw::Incomplete { path, why } => Error::io(path, "write")(io::Error::other(why)),
        Flaw::Other(error) => error,
    })?;
    let at = dir.join(INDEX);
    let write = || -> io::Result<()> {
        let mut out = BufWriter::new(File::create(&at)?);
        out.write_all(index.sealed().as_bytes())?;
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
pub(super) fn prune(folder: &Path) -> Vec<String> {
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
    discard(&run_dir.join(FOLDER));
}

fn discard(folder: &Path) {
    for path in partials(folder) {
        // Whoever wrote it has failed; what cannot be removed is in nobody's way.
        let _ = remove(&path);
    }
}

/// Prepares a folder of checkpoints for a run that goes on after `step` steps: what was being written goes, and what
/// has the name of a later one, of which files are missing, gets another.
pub(super) fn clear_way(folder: &Path, step: u64) -> Result<(), Error> {
    if !folder.is_dir() {
        return Ok(());
    }
    discard(folder);
    for (_, path) in complete(folder)?.into_iter().filter(|(of, _)| *of > step) {
        let name = |number: u32| path.with_extension(format!("incomplete-{number}"));
        let aside = (1..=u32::MAX).map(name).find(|path| !path.exists());
        let aside = aside.expect("numbers do not run out");
        fs::rename(&path, aside).map_err(Error::io(&path, "rename"))?;
    }
    Ok(())
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
