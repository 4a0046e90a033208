//! [`Saver`]: saves checkpoints beside training.
//!
//! A save begins with a copy of the rank's states in memory of the host, which training waits for. A thread writes the
//! copy; training goes on meanwhile. After each step ranks tell each other how far they are ([`Saver::word`]), in the
//! exchange that ends it anyway. Once all files are there, rank 0 writes the index and gives the checkpoint its name, on
//! a thread too. One save is under way at a time: one that is due waits for the one before. One that cannot be
//! written is given up on all ranks, which leaves the one before it, and training goes on.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use moefold_planner::model::Model;

use super::write::{Snapshot, clear_way, commit, not_shared, prune, take_back};
use super::{CHECKPOINT_VERSION, FOLDER, Fingerprint, Index, Seal, ShardFile, Written};
use super::{complete, folder_of, partial, room};
use crate::control::{FAILED, IDLE, Said, WRITTEN};
use crate::error::Error;
use crate::gather::{bytes_of, read, words, words_of};
use crate::model::global_tensors;
use crate::options::TrainOptions;
use crate::train::Trainer;
use crate::transport::words::printable;
use crate::transport::{Communicator, RankContext};
use crate::weights::GlobalTensor;

/// Saves the state of one rank, together with those of the others.
pub(crate) struct Saver<'a> {
    rank: &'a RankContext,
    world: Communicator,
    every: Option<u64>,
    last: u64,
    folder: PathBuf,
    fingerprint: Fingerprint,
    model: Model,
    tensors: Vec<GlobalTensor>,
    /// What is under way; on rank 0 nothing, once it is complete.
    attempt: Option<Attempt>,
    /// Whether ranks have begun one and not met since; the same on all.
    is_open: bool,
    written: Vec<Written>,
    /// Why those are not there that were due and could not be written.
    unsaved: Vec<String>,
    /// Whether rank 0 has changed anything in the folder.
    changed: &'a AtomicBool,
}

/// A save that is under way.
struct Attempt {
    step: u64,
    began: Instant,
    held_s: f64,
    /// Whether the run goes on without it.
    is_extra: bool,
    give_up: Arc<AtomicBool>,
    at: At,
}

/// How far it is.
enum At {
    Writing(JoinHandle<Result<ShardFile, Error>>),
    Written(ShardFile),
    Failed(Error),
    /// On rank 0: the bytes of all files, and why older checkpoints are still there.
    Naming(JoinHandle<Result<(u64, Vec<String>), Error>>),
    /// On other ranks: rank 0 does the rest.
    Told(u64),
}

impl<'a> Saver<'a> {
    /// As `options` ask for it, which then have a `fingerprint`; agrees with the other ranks on where to save,
    /// and sees that there is room. Nothing is written; `changed` hears of it once rank 0 does.
    pub(crate) fn of(
        rank: &'a RankContext,
        world: &Communicator,
        options: &TrainOptions,
        model: &Model,
        fingerprint: Option<&Fingerprint>,
        changed: &'a AtomicBool,
    ) -> Result<Option<Self>, Error> {
        let (Some(saving), Some(fingerprint)) = (&options.save, fingerprint) else {
            return Ok(None);
        };
        let folder = said_by_first(world, &saving.run_dir)?.join(FOLDER);
        let tensors = global_tensors(model);
        if let (0, Some(every)) = (rank.rank(), saving.every) {
            let first = options.init.resumed().map_or(0, |resumed| resumed.step);
            let there = if folder.is_dir() {
                complete(&folder)?.len()
            } else {
                0
            };
            let to_come = room::to_come([first, options.steps], every, there);
            room::check(&folder, to_come, room::bytes_of(&tensors))?;
        }
        Ok(Some(Self {
            rank,
            world: world.clone(),
            every: saving.every,
            last: options.steps,
            folder,
            fingerprint: fingerprint.clone(),
            model: model.clone(),
            tensors,
            attempt: None,
            is_open: false,
            written: Vec::new(),
            unsaved: Vec::new(),
            changed,
        }))
    }

    /// Makes way for the checkpoints of a run that goes on after `step` steps; rank 0 does, once nothing can refuse the
    /// run any more and before any rank begins to save.
    pub(crate) fn clear_way(&self, step: u64) -> Result<(), Error> {
        if self.rank.rank() > 0 {
            return Ok(());
        }
        self.changed.store(true, Ordering::Relaxed);
        clear_way(&self.folder, step)
    }

    /// Whether a checkpoint is due after `step` steps.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        self.every
            .is_some_and(|every| step.is_multiple_of(every) || step == self.last)
    }

    /// The checkpoints that were saved, on ranks other than 0 their own part of each, and why others were not that were
    /// due, a sentence each.
    pub(crate) fn into_saved(mut self) -> (Vec<Written>, Vec<String>) {
        let written = std::mem::take(&mut self.written);
        (written, std::mem::take(&mut self.unsaved))
    }

    /// Begins to save the state after `step` steps; all ranks do. When it returns, training may change it. The run goes
    /// on without it where it cannot be written; `note` then hears of it. One that `is_extra` was not due.
    pub(crate) fn begin(
        &mut self,
        trainer: &Trainer,
        step: u64,
        is_extra: bool,
        note: &dyn Fn(&str),
    ) -> Result<(), Error> {
        self.settle(note)?;
        let began = Instant::now();
        let give_up = Arc::new(AtomicBool::new(false));
        let at = match Snapshot::take(trainer.stepper()) {
            Err(error) if is_extra => At::Failed(error),
            Err(error) => return Err(error),
            Ok(snapshot) => {
                let (dir, rank) = (partial(&self.folder, step), self.rank.rank());
                let give_up = Arc::clone(&give_up);
                let (folder, apart) = (self.folder.clone(), self.rank.is_apart());
                At::Writing(in_background(rank, move || {
                    // The run directory itself is not made again where somebody has removed it.
                    match fs::create_dir(&folder) {
                        Err(error) if apart && error.kind() == io::ErrorKind::NotFound => {
                            return Err(not_shared(&folder, "its directory is not here"));
                        }
                        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                            return Err(Error::io(&folder, "create")(error));
                        }
                        _ => {}
                    }
                    fs::create_dir_all(&dir).map_err(Error::io(&dir, "create"))?;
                    snapshot.write(&dir, rank, &give_up)
                }))
            }
        };
        self.is_open = true;
        self.attempt = Some(Attempt {
            step,
            began,
            held_s: began.elapsed().as_secs_f64(),
            is_extra,
            give_up,
            at,
        });
        Ok(())
    }

    /// How far this rank is, for the others to hear; what all said goes to [`Saver::heard`].
    pub(crate) fn word(&mut self) -> u64 {
        let Some(attempt) = &mut self.attempt else {
            return IDLE;
        };
        if let At::Writing(thread) = &attempt.at
            && thread.is_finished()
        {
            attempt.wait();
        }
        match attempt.at {
            At::Written(_) => WRITTEN,
            At::Failed(_) => FAILED,
            At::Writing(_) | At::Naming(_) | At::Told(_) => IDLE,
        }
    }

    /// Goes on as far as all ranks are, without waiting for a file.
    pub(crate) fn heard(&mut self, said: Said, note: &dyn Fn(&str)) -> Result<(), Error> {
        if said.most == FAILED {
            return self.fail(note);
        }
        if said.least == WRITTEN {
            self.name()?;
        }
        if let Some(Attempt {
            at: At::Naming(thread),
            ..
        }) = &self.attempt
            && thread.is_finished()
        {
            self.end(note);
        }
        Ok(())
    }

    /// Waits until nothing is under way, on any rank; all ranks call it together. Then what was begun is complete, or
    /// given up.
    pub(crate) fn settle(&mut self, note: &dyn Fn(&str)) -> Result<(), Error> {
        if !self.is_open {
            return Ok(());
        }
        let (began, before) = (Instant::now(), self.written.len());
        if let Some(attempt) = &mut self.attempt {
            attempt.wait();
        }
        // Files of all ranks become one checkpoint together, so all or none are here with a file.
        let word = self.word();
        if word != IDLE {
            let all = self.world.exchange_counts(&[word])?;
            self.heard(Said::of(all.iter().map(|rank| rank[0])), note)?;
        }
        let is_first = self.rank.rank() == 0;
        if is_first {
            self.end(note);
        }
        // Together into the next step, whose time would else hold the rest of this.
        self.world.barrier()?;
        if !is_first {
            self.end(note);
        }
        self.is_open = false;
        for written in &mut self.written[before..] {
            written.held_s += began.elapsed().as_secs_f64();
            // Until all ranks know.
            written.seconds = written.seconds.max(written.held_s);
        }
        Ok(())
    }

    /// Saves the state after `step` steps. When it returns, on any rank, the checkpoint is complete; a
    /// rank on which it fails leaves nothing that it wrote.
    #[cfg(test)]
    pub(crate) fn save(&mut self, trainer: &Trainer, step: u64) -> Result<Written, Error> {
        self.begin(trainer, step, false, &|_| ())?;
        self.settle(&|_| ())?;
        let saved = self.written.last().cloned();
        saved.ok_or_else(|| Error::Unsaved(self.unsaved.join("; ")))
    }

    /// A rank could not write its file: all give up theirs, and hear why.
    fn fail(&mut self, note: &dyn Fn(&str)) -> Result<(), Error> {
        let Some(attempt) = self.attempt.take() else {
            return Ok(());
        };
        let (step, is_extra) = (attempt.step, attempt.is_extra);
        let own = attempt.given_up().map(|error| error.to_string());
        take_back(&self.folder, step, self.rank.rank());
        let said = words_of(own.unwrap_or_default().as_bytes());
        let all = self.world.exchange_counts(&said)?;
        let why = (0..).zip(&all).find_map(|(rank, said)| {
            let said = String::from_utf8(bytes_of(said)?).ok()?;
            (!said.is_empty()).then(|| format!("rank {rank}: {}", printable(&said)))
        });
        self.go_on(step, is_extra, &why.unwrap_or_default(), note);
        Ok(())
    }

    /// Says that the run goes on without a checkpoint.
    fn go_on(&mut self, step: u64, is_extra: bool, why: &str, note: &dyn Fn(&str)) {
        let what = format!("no checkpoint after {step} steps: {why}");
        if is_extra {
            return note(&what);
        }
        note(&format!(
            "{what}; training goes on, and the next is tried when it is due"
        ));
        self.unsaved.push(what);
    }

    /// All files are there: tells rank 0 what is in them, which gives the checkpoint its name.
    fn name(&mut self) -> Result<(), Error> {
        let Some(attempt) = &mut self.attempt else {
            return Ok(());
        };
        let At::Written(own) = &attempt.at else {
            return Ok(());
        };
        if self.rank.rank() > 0 {
            self.rank.send_first(words(own))?;
            attempt.at = At::Told(own.bytes);
            return Ok(());
        }
        let mut files = vec![own.clone()];
        for other in 1..self.rank.ranks() {
            files.push(read(other, &self.rank.receive(other)?)?);
        }
        let index = Index {
            version: CHECKPOINT_VERSION,
            step: attempt.step,
            fingerprint: Some(self.fingerprint.clone()),
            model: self.model.clone(),
            files,
            seal: Seal::None,
        };
        let covered = index.check_cover(&self.tensors);
        covered.unwrap_or_else(|why| panic!("the ranks saved other than the model: {why}"));
        let (folder, apart) = (self.folder.clone(), self.rank.is_apart());
        attempt.at = At::Naming(in_background(0, move || {
            commit(&folder, &index, apart)?;
            Ok((index.bytes(), prune(&folder)))
        }));
        Ok(())
    }

    /// Waits for rank 0's part of the end, and notes what was written.
    fn end(&mut self, note: &dyn Fn(&str)) {
        let Some(attempt) = self.attempt.take() else {
            return;
        };
        let (bytes, not_removed) = match attempt.at {
            At::Naming(thread) => match joined(thread) {
                Ok(named) => named,
                Err(error) => {
                    // The others have written all of theirs, and believe it complete.
                    drop(fs::remove_dir_all(partial(&self.folder, attempt.step)));
                    self.go_on(attempt.step, attempt.is_extra, &error.to_string(), note);
                    return;
                }
            },
            At::Told(bytes) => (bytes, Vec::new()),
            At::Writing(_) | At::Written(_) | At::Failed(_) => return,
        };
        self.written.push(Written {
            dir: folder_of(&self.folder, attempt.step),
            step: attempt.step,
            bytes,
            seconds: attempt.began.elapsed().as_secs_f64(),
            held_s: attempt.held_s,
            not_removed,
        });
    }
}

impl Attempt {
    /// Waits for this rank's file, where it is still written.
    fn wait(&mut self) {
        let at = std::mem::replace(&mut self.at, At::Told(0));
        self.at = match at {
            At::Writing(thread) => match joined(thread) {
                Ok(file) => At::Written(file),
                Err(error) => At::Failed(error),
            },
            other => other,
        };
    }

    /// Stops what is still written; why this rank's file could not be, where that was so before.
    fn given_up(self) -> Option<Error> {
        self.give_up.store(true, Ordering::Relaxed);
        match self.at {
            At::Failed(error) => Some(error),
            // A panic of it was said; the run ends, or goes on without.
            At::Writing(thread) => {
                drop(thread.join());
                None
            }
            // What is almost complete becomes so.
            At::Naming(thread) => {
                drop(thread.join());
                None
            }
            At::Written(_) | At::Told(_) => None,
        }
    }
}

impl Drop for Saver<'_> {
    /// The run has failed: what this rank has written of a checkpoint that will not be complete goes.
    fn drop(&mut self) {
        let Some(attempt) = self.attempt.take() else {
            return;
        };
        let step = attempt.step;
        let is_named = matches!(attempt.at, At::Naming(_) | At::Told(_));
        attempt.given_up();
        if !is_named {
            take_back(&self.folder, step, self.rank.rank());
        }
    }
}

fn in_background<T: Send + 'static>(
    rank: u32,
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> JoinHandle<Result<T, Error>> {
    thread::Builder::new()
        .name(format!("checkpoint of rank {rank}"))
        .spawn(work)
        .expect("a machine that runs ranks has a thread left")
}

/// What a thread ended with; a panic goes on.
fn joined<T>(thread: JoinHandle<Result<T, Error>>) -> Result<T, Error> {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Rank 0's path, made absolute, on every rank.
fn said_by_first(world: &Communicator, path: &Path) -> Result<PathBuf, Error> {
    use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
    let path = std::path::absolute(path).map_err(Error::io(path, "find"))?;
    let said = world.exchange_counts(&words_of(path.as_os_str().as_bytes()))?;
    let first = bytes_of(&said[0]).expect("rank 0 says a path");
    Ok(PathBuf::from(std::ffi::OsString::from_vec(first)))
}
