//! The transport over NCCL: ranks that are processes with a GPU each.
//!
//! The ranks of a world make one parent communicator; every group is split from it and shares its
//! buffers, and groups of one have none. A split is a call of all ranks, so they first agree over rank
//! 0's mailbox on which groups are made. A rank that asks for others is an error, where it would be a
//! hang.
//!
//! Collectives are queued on the device. Starting one waits for no other rank, except at a group's first
//! use, when NCCL connects its members: ranks start collectives of groups that they share in the same
//! order, as the step does. Awaiting one lets later work wait for it, not the host. So only
//! three kinds of waits can hang: those in NCCL, those for the device ([`Device::wait_by`]), and those in
//! the mailbox, which has a deadline of its own. The first two ask again and again, every communicator
//! for errors in the background, rank 0 for a rank that failed, and the clock. When it is enough, every
//! communicator of the rank is aborted, which ends its kernels on the device, and the error names the
//! first collective that is not done.
//!
//! Host words (a dropless layer's counts) go through the mailbox, not through NCCL. They come from the
//! host and are needed there: NCCL would take an upload, a collective and one more read that waits for
//! the device, after the read that brought the counts to the host; the mailbox takes two round trips to
//! rank 0's process, once a layer and microbatch. It also fails with words of its own where the device
//! would hang, and needs no buffer. Its price is that rank 0's process answers for all groups: past
//! some hundred ranks this is the place to look.
//!
//! Sums are NCCL's: the same for the same ranks and sizes, not in rank order; those of bf16 are rounded
//! at every step of its ring, where rank threads add in f32 and round once. A step sums in bf16 over TP
//! alone, activations and their gradients: main gradients, norms and losses are f32, and what ETP peers
//! add comes by an all-to-all and is added here.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::panic::resume_unwind;
use std::rc::{Rc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use moefold_kernels::cuda::Stream;
use moefold_kernels::cuda::nccl::{self, Comm, Nccl, Progress, UNIQUE_ID_BYTES, UniqueId};
use moefold_kernels::{Device, DeviceError, Event, Tensor, catch};

use super::mail::Mail;
use super::mailbox::{Failure, GroupKey};
use super::threads::Threads;
use super::{Carried, Exchange, Pending, Place, Reduce, Transport, TransportError};

/// Asked for without pause this long, then with one.
const SPIN: Duration = Duration::from_micros(200);

/// Between two questions.
const PAUSE: Duration = Duration::from_micros(50);

/// Between two questions to rank 0 whether a rank has failed.
const NEWS: Duration = Duration::from_millis(200);

/// How long the orderly end of communicators may take.
const GOODBYE: Duration = Duration::from_secs(2);

/// Collectives remembered until it is known that they are done.
const REMEMBERED: usize = 64;

/// All communicators of one rank.
pub(super) struct Ring {
    nccl: Nccl,
    rank: u32,
    device: Device,
    mail: Rc<dyn Mail>,
    /// Where ranks agree on groups.
    agreement: Threads,
    deadline: Duration,
    /// Ended before the parent that they are of.
    groups: RefCell<Vec<Rc<Comm>>>,
    parent: Comm,
    /// Started and not known to be done, the oldest first.
    started: RefCell<VecDeque<Started>>,
    failure: RefCell<Option<TransportError>>,
}

struct Started {
    place: Place,
    bytes: u64,
    /// When the device is done with it.
    done: Event,
}

/// Why waiting ends without what was waited for.
enum Cause {
    Nccl(DeviceError),
    Deadline(Duration),
    Peer(Failure),
}

impl From<DeviceError> for Cause {
    fn from(error: DeviceError) -> Self {
        Self::Nccl(error)
    }
}

impl Ring {
    /// Joins the parent of all `ranks`. `agreement` is over all ranks, in their order.
    pub(super) fn join(
        nccl: Result<Nccl, DeviceError>,
        device: &Device,
        [rank, ranks]: [u32; 2],
        agreement: Threads,
        mail: Rc<dyn Mail>,
        deadline: Duration,
    ) -> Result<Rc<Self>, TransportError> {
        let place = || Place {
            op: format!("joining NCCL as one of {ranks}"),
            group: "of all ranks".to_owned(),
            sequence: 0,
        };
        let refuse = |cause| error(rank, place(), 0, cause);
        let nccl = nccl.map_err(|absent| refuse(absent.into()))?;
        let id = if rank == 0 {
            let id = nccl.unique_id().map_err(|cause| refuse(cause.into()))?;
            words_of(id.to_bytes())
        } else {
            Vec::new()
        };
        let id = agreement.gather_words(&id)?.swap_remove(0);
        let id = UniqueId::from_bytes(bytes_of(&id));
        let (number, size) = (rank as usize, ranks as usize);
        let joined = Comm::join(
            nccl,
            device,
            id,
            number,
            size,
            &mut patience(&*mail, deadline),
        );
        let parent = joined.map_err(refuse)?;
        let ring = Rc::new(Self {
            nccl,
            rank,
            device: device.clone(),
            mail,
            agreement,
            deadline,
            parent,
            groups: RefCell::default(),
            started: RefCell::default(),
            failure: RefCell::default(),
        });
        let waiting: Weak<Self> = Rc::downgrade(&ring);
        device.wait_by(move |is_done| {
            // Without communicators there is nobody to wait for.
            if let Some(ring) = waiting.upgrade()
                && let Err(error) = ring.wait(is_done)
            {
                resume_unwind(Box::new(error));
            }
        });
        Ok(ring)
    }

    /// Makes one group for every rank; nothing for a group of one. All ranks call it together.
    pub(super) fn group(self: &Rc<Self>, key: &GroupKey) -> Result<Option<Group>, TransportError> {
        let own: Vec<u64> = key.ranks.iter().map(|&rank| rank.into()).collect();
        let asked: Vec<u64> = name_words(&key.name).chain(own.iter().copied()).collect();
        let all = self.agreement.gather_words(&asked)?;
        for &member in &key.ranks {
            if *all[member as usize] != *asked {
                let error = TransportError::Mismatch {
                    rank: self.rank,
                    place: making(key),
                    other_rank: member,
                    other_call: "making another group".to_owned(),
                };
                return Err(self.fail_with(error));
            }
        }
        let name = name_words(&key.name).count();
        if all.iter().all(|asked| asked.len() == name + 1) {
            return Ok(None);
        }
        let index = key.ranks.iter().position(|&rank| rank == self.rank);
        let index = index.expect("a rank asks for groups that it is in");
        let size = key.ranks.len();
        let colour = (size > 1).then(|| key.ranks.iter().copied().min().unwrap_or(0));
        let mut pause = patience(&*self.mail, self.deadline);
        let comm = self
            .parent
            .split(colour, index, size, key.stream(), &mut pause)
            .map_err(|cause| self.fail(making(key), 0, cause))?;
        Ok(comm.map(|comm| self.member(comm, key.to_string())))
    }

    fn member(self: &Rc<Self>, comm: Comm, name: String) -> Group {
        let comm = Rc::new(comm);
        self.groups.borrow_mut().push(Rc::clone(&comm));
        Group {
            comm,
            ring: Rc::clone(self),
            name,
            next: Cell::new(0),
        }
    }

    /// Joins the communicators for messages between the members of `pairs`, the sender first: one for each
    /// pair, which shares nothing with any other, as the calls of communicators that share are done one after
    /// the other, and a send lasts until it is received. All ranks call it together, for groups with the same
    /// pairs.
    pub(super) fn lines(
        self: &Rc<Self>,
        key: &GroupKey,
        pairs: &[[usize; 2]],
        words: Threads,
    ) -> Result<Lines, TransportError> {
        let own = key.ranks.iter().position(|&rank| rank == self.rank);
        let own = own.expect("a rank asks for groups that it is in");
        let mut lines = Lines {
            sends: BTreeMap::new(),
            receives: BTreeMap::new(),
            words,
        };
        for &[from, to] in pairs {
            let refuse = |cause| self.fail(making(key), 0, cause);
            let id = if own == from {
                let id = self.nccl.unique_id();
                words_of(id.map_err(|cause| refuse(cause.into()))?.to_bytes())
            } else {
                Vec::new()
            };
            let ids = self.agreement.gather_words(&id)?;
            let (stream, members, other) = match own {
                own if own == from => (Stream::Sends, &mut lines.sends, to),
                own if own == to => (Stream::Communication, &mut lines.receives, from),
                _ => continue,
            };
            let id = UniqueId::from_bytes(bytes_of(&ids[key.ranks[from] as usize]));
            let comm = Comm::join(
                self.nccl,
                &self.device,
                id,
                usize::from(own == to),
                2,
                &mut patience(&*self.mail, self.deadline),
            );
            let name = format!("{key} from {from} to {to}");
            let comm = comm.map_err(refuse)?.on(stream);
            members.insert(other, self.member(comm, name));
        }
        Ok(lines)
    }

    /// Waits until what the device was asked for is done, or everything is over.
    fn wait(&self, is_done: &dyn Fn() -> bool) -> Result<(), TransportError> {
        let mut pause = patience(&*self.mail, self.deadline);
        while !is_done() {
            let over = self.look().and_then(|()| pause());
            if let Err(cause) = over {
                let started = self.started.borrow();
                let stuck = started.iter().find(|started| !started.done.is_reached());
                let (place, bytes) = match stuck {
                    Some(started) => (started.place.clone(), started.bytes),
                    None => (elsewhere(), 0),
                };
                drop(started);
                return Err(self.fail(place, bytes, cause));
            }
        }
        Ok(())
    }

    /// Whether a communicator has failed in the background.
    fn look(&self) -> Result<(), Cause> {
        for comm in self.groups.borrow().iter() {
            let _ = comm.progress()?;
        }
        let _ = self.parent.progress()?;
        Ok(())
    }

    /// Aborts every communicator and says what happened; the first failure stays the one.
    fn fail(&self, place: Place, bytes: u64, cause: Cause) -> TransportError {
        self.fail_with(error(self.rank, place, bytes, cause))
    }

    fn fail_with(&self, error: TransportError) -> TransportError {
        for comm in self.groups.borrow().iter() {
            comm.abort();
        }
        self.parent.abort();
        self.failure.borrow_mut().get_or_insert(error).clone()
    }

    /// Ends all communicators in order; those that would have to be waited for are aborted.
    fn close(&self) -> Result<(), Cause> {
        let lost = self.failure.borrow().is_some() || thread::panicking();
        // A device that cannot even say so is not waited for.
        if lost || !catch(|| self.device.is_idle()).unwrap_or(false) {
            return Ok(());
        }
        let mut pause = patience(&*self.mail, GOODBYE.min(self.deadline));
        for comm in self.groups.borrow().iter() {
            comm.finalize(&mut pause)?;
        }
        self.parent.finalize(&mut pause)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // What was not finalized is aborted as it drops.
        let _ = self.close();
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ring({})", self.rank)
    }
}

/// One member's end of a group of GPUs.
#[derive(Debug)]
pub(super) struct Group {
    comm: Rc<Comm>,
    ring: Rc<Ring>,
    name: String,
    next: Cell<u64>,
}

impl Group {
    fn start(&self, exchange: &Exchange) -> Result<Carried, TransportError> {
        if let Some(failure) = &*self.ring.failure.borrow() {
            return Err(failure.clone());
        }
        let ring = &self.ring;
        let sequence = self.next.replace(self.next.get() + 1);
        let (size, bytes) = described(exchange);
        let place = Place {
            op: size,
            group: self.name.clone(),
            sequence,
        };
        let device = &ring.device;
        let ready = device.record_event();
        let queued = || device.beside_since(self.comm.stream(), &ready, || device.record_event());
        let begun = queued();
        let asked = begin(&self.comm, exchange).map_err(Cause::Nccl);
        let settled = asked.and_then(|progress| match progress {
            Progress::Done => Ok(()),
            Progress::Busy => self.comm.settle(&mut patience(&*ring.mail, ring.deadline)),
        });
        if let Err(cause) = settled {
            return Err(ring.fail(place, bytes, cause));
        }
        let done = queued();
        let mut started = ring.started.borrow_mut();
        if started.len() >= REMEMBERED {
            started.retain(|started| !started.done.is_reached());
        }
        started.push_back(Started {
            place,
            bytes,
            done: done.clone(),
        });
        Ok(Carried { begun, done })
    }

    fn pending(&self, exchange: Exchange) -> Result<Pending, TransportError> {
        let carried = self.start(&exchange)?;
        let device = self.ring.device.clone();
        Ok(Pending::on_device(move || {
            device.wait_for(&carried.done);
            // The tensors live until here.
            drop(exchange);
            Ok(carried)
        }))
    }
}

/// The transport of a group: tensors through NCCL, words through the mailbox.
#[derive(Debug)]
pub(super) struct Gpus {
    pub(super) group: Group,
    pub(super) words: Threads,
}

impl Transport for Gpus {
    fn start(&self, exchange: Exchange) -> Result<Pending, TransportError> {
        self.group.pending(exchange)
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<Rc<[u64]>>, TransportError> {
        self.words.gather_words(words)
    }
}

/// The transport of messages between members: see [`Ring::lines`].
#[derive(Debug)]
pub(super) struct Lines {
    /// By receiver.
    sends: BTreeMap<usize, Group>,
    /// By sender.
    receives: BTreeMap<usize, Group>,
    words: Threads,
}

impl Transport for Lines {
    fn start(&self, exchange: Exchange) -> Result<Pending, TransportError> {
        let line = match &exchange {
            Exchange::Send { to, .. } => self.sends.get(to),
            Exchange::Receive { from, .. } => self.receives.get(from),
            other => unreachable!("{other:?} among ranks that exchange messages"),
        };
        line.expect("a line for every message").pending(exchange)
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<Rc<[u64]>>, TransportError> {
        self.words.gather_words(words)
    }
}

/// The transport of a rank that could not join: every use of it says why.
#[derive(Debug)]
pub(super) struct Broken(pub(super) TransportError);

impl Transport for Broken {
    fn start(&self, _exchange: Exchange) -> Result<Pending, TransportError> {
        Err(self.0.clone())
    }

    fn gather_words(&self, _words: &[u64]) -> Result<Vec<Rc<[u64]>>, TransportError> {
        Err(self.0.clone())
    }
}

/// Where groups come to be.
fn making(key: &GroupKey) -> Place {
    Place {
        op: format!("making a group of {}", key.ranks.len()),
        group: key.to_string(),
        sequence: 0,
    }
}

/// Where a device hangs that no collective of this rank keeps.
fn elsewhere() -> Place {
    Place {
        op: "work without a collective".to_owned(),
        group: "of this rank alone".to_owned(),
        sequence: 0,
    }
}

/// Streams a collective.
fn begin(comm: &Comm, exchange: &Exchange) -> Result<Progress, DeviceError> {
    match exchange {
        Exchange::AllReduce { tensor, reduce } => {
            let reduce = match reduce {
                Reduce::Sum => nccl::Reduce::Sum,
                Reduce::Max => nccl::Reduce::Max,
            };
            comm.all_reduce(tensor, reduce)
        }
        Exchange::AllGather { src, dst } => comm.all_gather(src, dst),
        Exchange::ReduceScatter { src, dst } => comm.reduce_scatter(src, dst),
        Exchange::AllToAll {
            src,
            dst,
            even: true,
            ..
        } => comm.all_to_all_even(src, dst),
        Exchange::AllToAll {
            src,
            send_rows,
            dst,
            recv_rows,
            ..
        } => comm.all_to_all(src, send_rows, dst, recv_rows),
        Exchange::Shift { src, dst } => comm.shift(src, dst),
        Exchange::Broadcast { tensor, root } => comm.broadcast(tensor, *root),
        // The sender is the first of the two members of a line.
        Exchange::Send { tensor, .. } => comm.send(tensor, 1),
        Exchange::Receive { tensor, .. } => comm.receive(tensor, 0),
    }
}

/// A collective with its size, and the bytes of the rank's full buffer.
fn described(exchange: &Exchange) -> (String, u64) {
    let full: &Tensor = exchange.full();
    let (stem, dtype) = (exchange.stem(), full.dtype());
    (format!("{stem} of {} {dtype}", full.len()), full.bytes().0)
}

/// Waits a little at each call, until the deadline or a rank's failure.
fn patience(mail: &dyn Mail, deadline: Duration) -> impl FnMut() -> Result<(), Cause> + use<'_> {
    let begun = Instant::now();
    let mut asked = begun;
    move || {
        let waited = begun.elapsed();
        if waited > deadline {
            return Err(Cause::Deadline(waited));
        }
        if waited < SPIN {
            thread::yield_now();
            return Ok(());
        }
        if asked.elapsed() > NEWS {
            asked = Instant::now();
            if let Some(failure) = mail.failure() {
                return Err(Cause::Peer(failure));
            }
        }
        thread::sleep(PAUSE);
        Ok(())
    }
}

fn error(rank: u32, place: Place, bytes: u64, cause: Cause) -> TransportError {
    match cause {
        Cause::Nccl(failure) => TransportError::Nccl {
            rank,
            place,
            bytes,
            failure: failure.to_string(),
        },
        Cause::Deadline(waited) => TransportError::Stuck {
            rank,
            place,
            bytes,
            waited_s: waited.as_secs_f64(),
        },
        Cause::Peer(failure) => TransportError::Stopped {
            rank,
            place,
            failed_rank: failure.rank,
            failure: failure.message,
            is_silent: failure.is_silent,
        },
    }
}

/// A name as words, its length first.
fn name_words(name: &str) -> impl Iterator<Item = u64> + '_ {
    std::iter::once(name.len() as u64).chain(name.bytes().map(u64::from))
}

/// An id as words.
fn words_of(bytes: [u8; UNIQUE_ID_BYTES]) -> Vec<u64> {
    bytes.iter().map(|&byte| byte.into()).collect()
}

/// The id that words are of.
fn bytes_of(words: &[u64]) -> [u8; UNIQUE_ID_BYTES] {
    let mut bytes = [0; UNIQUE_ID_BYTES];
    for (byte, &word) in bytes.iter_mut().zip(words) {
        *byte = word as u8;
    }
    bytes
}

#[cfg(test)]
mod tests;
