//! Writes checkpoints: each rank its own file, rank 0 the index once all are there.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

use moefold_planner::model::Model;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Serialize;
use serde_json::Value;

use super::{CHECKPOINT_VERSION, Course, FOLDER, INDEX, Index, KEPT, ShardFile};
use super::{complete, describe, folder_of, name_of, partial, room};
use crate::error::Error;
use crate::gather::{bytes_of, read, words, words_of};
use crate::model::{Parameter, Slice, global_tensors};
use crate::optimizer::{State, ZeroAdam};
use crate::store::Store;
use crate::train::{TrainOptions, Trainer};
use crate::transport::{Communicator, RankContext};
use crate::weights::{GlobalTensor, Rectangle};

/// When a run saves, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saving {
    /// Steps between checkpoints; there is one at the end of the run too.
    pub every: u64,
    /// The run directory. Ranks that are processes take rank 0's.
    pub run_dir: PathBuf,
}

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
}

/// Saves the state of one rank, together with those of the others.
pub(crate) struct Saver<'a> {
    rank: &'a RankContext,
    every: u64,
    last: u64,
    folder: PathBuf,
    course: Course,
    model: Value,
    tensors: Vec<GlobalTensor>,
}

impl<'a> Saver<'a> {
    /// As `options` ask for it, which then have a `course`; agrees with the other ranks on where to save,
    /// and sees that there is room.
    pub(crate) fn of(
        rank: &'a RankContext,
        world: &Communicator,
        options: &TrainOptions,
        model: &Model,
        course: Option<&Course>,
    ) -> Result<Option<Self>, Error> {
        let (Some(saving), Some(course)) = (&options.save, course) else {
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
            course: course.clone(),
            model: describe(model),
            tensors,
        }))
    }

    /// Whether a checkpoint is due after `step` steps.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.every) || step == self.last
    }

    /// Saves the state after `step` steps. On ranks other than 0 it may return before the checkpoint is
    /// complete.
    pub(crate) fn save(&self, trainer: &Trainer, step: u64) -> Result<Written, Error> {
        let began = Instant::now();
        let stepper = trainer.stepper();
        let dir = partial(&self.folder, step);
        fs::create_dir_all(&dir).map_err(Error::io(&dir, "create"))?;
        let own = write_file(&dir, self.rank.rank(), &stepper.store, &stepper.optimizer)?;
        let dir = folder_of(&self.folder, step);
        let mut bytes = own.bytes;
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
                samples: step * self.course.global_batch,
                course: self.course.clone(),
                model: self.model.clone(),
                files,
            };
            let covered = index.check_cover(&self.tensors);
            covered.unwrap_or_else(|why| panic!("the ranks saved other than the model: {why}"));
            commit(&self.folder, &index)?;
            bytes = index.bytes();
        }
        Ok(Written {
            dir,
            step,
            bytes,
            seconds: began.elapsed().as_secs_f64(),
        })
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

/// Some elements of a slice, whose states rest here one after the other.
struct Owned<'a> {
    parameter: &'a Parameter,
    slice: &'a Slice,
    elements: Range<usize>,
}

impl Owned<'_> {
    /// The rectangles that they form.
    fn rectangles(&self) -> Vec<Rectangle> {
        let parts = self.slice.region().parts(self.elements.clone());
        parts.iter().map(Rectangle::from).collect()
    }
}

/// What this rank alone saves: what it updates, and of what TP ranks hold in common the part that it
/// counts.
fn owned<'a>(store: &'a Store, optimizer: &ZeroAdam) -> Vec<Owned<'a>> {
    let counted = store.shard.parameters.iter().filter(|p| p.counted);
    let slices = counted.flat_map(|parameter| parameter.slices.iter().map(move |s| (parameter, s)));
    slices
        .filter_map(|(parameter, slice)| {
            let (elements, _) = optimizer.masters(parameter, slice)?;
            Some(Owned {
                parameter,
                slice,
                elements,
            })
        })
        .collect()
}

/// Writes the states of what a rank owns into a file of `dir`, a slice at a time.
fn write_file(
    dir: &Path,
    rank: u32,
    store: &Store,
    optimizer: &ZeroAdam,
) -> Result<ShardFile, Error> {
    let owned = owned(store, optimizer);
    let name = format!("rank-{rank}.safetensors");
    let path = dir.join(&name);
    let file = File::create(&path).map_err(Error::io(&path, "create"))?;
    let mut out = Hashing {
        out: BufWriter::with_capacity(1 << 20, file),
        hash: blake3::Hasher::new(),
        bytes: 0,
    };
    let written = write_states(&mut out, &owned, optimizer).and_then(|()| {
        out.out.flush()?;
        // A name is only given to what is on the disk.
        out.out.get_ref().sync_all()
    });
    let elements: usize = owned.iter().map(|owned| owned.elements.len()).sum();
    written.map_err(|cause| Error::Save {
        path,
        mib: (State::ALL.len() * elements * size_of::<f32>()) as f64 / f64::from(1 << 20),
        cause,
    })?;
    Ok(ShardFile {
        name,
        bytes: out.bytes,
        blake3: out.hash.finalize().to_hex().to_string(),
        regions: owned.iter().flat_map(Owned::rectangles).collect(),
    })
}

fn write_states(out: &mut dyn Write, owned: &[Owned<'_>], optimizer: &ZeroAdam) -> io::Result<()> {
    out.write_all(&header(owned))?;
    for owned in owned {
        for state in State::ALL {
            let found = optimizer.state(state, owned.parameter, owned.slice);
            let (_, values) = found.expect("masters are where moments are");
            // Rectangles of a range follow each other as its elements do.
            out.write_all(bytemuck::cast_slice(&values.to_f32()))?;
        }
    }
    Ok(())
}

/// The header of a safetensors file, its length before it, padded to a multiple of eight bytes.
fn header(owned: &[Owned<'_>]) -> Vec<u8> {
    let mut tensors = Vec::new();
    let mut at = 0;
    for owned in owned {
        for state in State::ALL {
            for rectangle in owned.rectangles() {
                let [rows, cols] = [rectangle.rows, rectangle.cols].map(|[start, end]| end - start);
                let start = at;
                at += rows * cols * size_of::<f32>();
                let info = TensorInfo {
                    dtype: Dtype::F32,
                    shape: vec![rows, cols],
                    data_offsets: (start, at),
                };
                tensors.push((name_of(&rectangle, state), info));
            }
        }
    }
    let metadata = Metadata::new(None, tensors).expect("tensors follow each other");
    let mut header = serde_json::to_vec(&metadata).expect("names are text");
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header].concat()
}

/// Hashes and counts what is written.
struct Hashing<W> {
    out: W,
    hash: blake3::Hasher,
    bytes: u64,
}

impl<W: Write> Write for Hashing<W> {
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

/// Writes the index, gives the checkpoint its name, and removes those that are not kept any more.
fn commit(folder: &Path, index: &Index) -> Result<(), Error> {
    let (dir, path) = (partial(folder, index.step), folder_of(folder, index.step));
    index.check_files(&dir).map_err(|error| {
        Error::Request(format!(
            "{error}: ranks on several machines save to a run directory that all of them share"
        ))
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
    sync(folder).map_err(Error::io(folder, "write"))?;
    let all = complete(folder)?;
    for (step, old) in &all[..all.len().saturating_sub(KEPT)] {
        // Under another name first: what is half removed must not look whole.
        let going = partial(folder, *step);
        fs::rename(old, &going).map_err(Error::io(old, "remove"))?;
        fs::remove_dir_all(&going).map_err(Error::io(&going, "remove"))?;
    }
    Ok(())
}

/// Makes the names in a folder last.
fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Removes what a run that failed was writing.
pub(crate) fn discard_partial(run_dir: &Path) {
    let Ok(entries) = fs::read_dir(run_dir.join(FOLDER)) else {
        return;
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.extension().is_some_and(|ending| ending == "partial") {
            // The run has failed; what cannot be removed is in nobody's way.
            let _ = fs::remove_dir_all(path);
        }
    }
}
