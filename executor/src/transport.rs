//! Communication between ranks: one interface over transports.
//!
//! A [`World`] runs the ranks; each gets a [`RankContext`], asks it for a [`Communicator`] per process
//! group, and calls collectives on tensors, blocking or started and awaited. What carries them is a
//! [`Transport`]. In one, ranks exchange posts in a mailbox: values of the CPU's tensors, offers of a GPU's
//! memory. Between threads the mailbox is memory, between processes a connection to rank 0 (`rendezvous`,
//! `remote`). The other is NCCL, between processes with a GPU each.
//! Groups of one carry nothing: their collectives are local copies.
//!
//! Sums are taken in rank order, in f32 whatever is stored, and rounded once, whatever the timing, so
//! results are bit-equal from run to run; NCCL's are in an order and a rounding of its own ([`nccl`]). The
//! group decides nothing about layout: which ranks form it is the mesh's business.

mod communicator;
mod launched;
mod mail;
mod mailbox;
mod nccl;
mod pulse;
mod remote;
mod rendezvous;
mod secret;
mod shelf;
#[cfg(test)]
mod tests;
mod threads;
mod wire;
pub(crate) mod words;
mod world;

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use moefold_kernels::{Event, Tensor};
use moefold_profiles::{Collective, CollectiveKind};
use serde::{Deserialize, Serialize};

pub use communicator::Communicator;
pub(crate) use communicator::ranks_of_link;

pub use launched::{Launched, SECRET_VARIABLE, TIMEOUT_VARIABLE};
pub(crate) use mailbox::Payload;
pub use remote::answered;
pub use rendezvous::greeted;
#[cfg(test)]
pub(crate) use rendezvous::tests::world_of;
pub use secret::new_secret;
pub use world::{RankContext, World};

/// How elements of several ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    /// Their sum, in rank order.
    Sum,
    /// Their maximum.
    Max,
}

/// One collective with its tensors. The handles share memory with the caller's. Between start and wait
/// inputs are read and outputs written, at any time: the caller writes neither, and reads no output.
#[derive(Debug, Clone)]
pub enum Exchange {
    /// `tensor` becomes the reduction of all members' tensors.
    AllReduce {
        /// In and out, of floats.
        tensor: Tensor,
        /// How.
        reduce: Reduce,
    },
    /// `dst` becomes all members' `src`, in member order.
    AllGather {
        /// This member's shard.
        src: Tensor,
        /// `size` times as long.
        dst: Tensor,
    },
    /// `dst` becomes this member's shard of the sum of all `src`.
    ReduceScatter {
        /// `size` times as long as `dst`, of floats.
        src: Tensor,
        /// This member's shard.
        dst: Tensor,
    },
    /// Rows of `src`, ordered by receiver, become rows of `dst`, ordered by sender.
    AllToAll {
        /// `[sum of send_rows, width]`.
        src: Tensor,
        /// Rows for each member.
        send_rows: Vec<usize>,
        /// `[sum of recv_rows, width]`.
        dst: Tensor,
        /// Rows from each member.
        recv_rows: Vec<usize>,
        /// Whether every member sends every member as many rows, which all of them know: a transport
        /// may have a faster way for that.
        even: bool,
    },
    /// `tensor` becomes that of member `root`.
    Broadcast {
        /// In at the root, out elsewhere.
        tensor: Tensor,
        /// Member index of the sender.
        root: usize,
    },
    /// `src` goes to the next member, the last one's to the first; `dst` becomes that of the member before.
    Shift {
        /// In.
        src: Tensor,
        /// Out, as long.
        dst: Tensor,
    },
    /// `tensor` goes to member `to`, which receives it. Messages between two members come in the order
    /// they were sent in; nobody waits for their receiver.
    Send {
        /// In.
        tensor: Tensor,
        /// Member index of the receiver.
        to: usize,
    },
    /// `tensor` becomes the next one that member `from` sends this member.
    Receive {
        /// Out.
        tensor: Tensor,
        /// Member index of the sender.
        from: usize,
    },
}

impl Exchange {
    /// The tensor that this member sends from, or would.
    fn tensor(&self) -> &Tensor {
        match self {
            Self::AllReduce { tensor, .. }
            | Self::Broadcast { tensor, .. }
            | Self::Send { tensor, .. }
            | Self::Receive { tensor, .. } => tensor,
            Self::AllGather { src, .. }
            | Self::ReduceScatter { src, .. }
            | Self::AllToAll { src, .. }
            | Self::Shift { src, .. } => src,
        }
    }

    /// What it is in the cost tables.
    fn kind(&self) -> CollectiveKind {
        match self {
            Self::AllReduce { .. } => CollectiveKind::AllReduce,
            Self::AllGather { .. } => CollectiveKind::AllGather,
            Self::ReduceScatter { .. } => CollectiveKind::ReduceScatter,
            Self::AllToAll { .. } => CollectiveKind::AllToAll,
            Self::Broadcast { .. } => CollectiveKind::Broadcast,
            Self::Send { .. } | Self::Receive { .. } | Self::Shift { .. } => {
                CollectiveKind::SendRecv
            }
        }
    }

    /// The name in traces and tables.
    pub fn stem(&self) -> &'static str {
        self.kind().stem()
    }

    /// The rank's full buffer, as [`Collective`] counts it.
    fn full(&self) -> &Tensor {
        match self {
            Self::AllReduce { tensor, .. }
            | Self::Broadcast { tensor, .. }
            | Self::Send { tensor, .. }
            | Self::Receive { tensor, .. } => tensor,
            Self::AllGather { dst, .. } => dst,
            Self::ReduceScatter { src, .. }
            | Self::AllToAll { src, .. }
            | Self::Shift { src, .. } => src,
        }
    }
}

/// A started collective. Its outputs are undefined until [`Pending::wait`] returns.
#[must_use = "a started collective has no result until it is awaited"]
pub struct Pending {
    finish: Finish,
    noted: Option<(CollectiveLog, Started)>,
}

enum Finish {
    Host(Box<dyn FnOnce() -> Result<(), TransportError>>),
    Device(Box<dyn FnOnce() -> Result<Carried, TransportError>>),
}

impl Pending {
    /// A collective that the host completes, in `finish`.
    pub fn new(finish: impl FnOnce() -> Result<(), TransportError> + 'static) -> Self {
        Self {
            finish: Finish::Host(Box::new(finish)),
            noted: None,
        }
    }

    /// A collective that a device does in its communication stream. `finish` lets the stream that ops go
    /// to wait for the end of this collective, and for none that was started after it.
    pub fn on_device(finish: impl FnOnce() -> Result<Carried, TransportError> + 'static) -> Self {
        Self {
            finish: Finish::Device(Box::new(finish)),
            noted: None,
        }
    }

    /// The same, whose start and end go into `log`.
    fn noted_in(self, log: &CollectiveLog, started: Started) -> Self {
        let mut noted = log.0.borrow_mut();
        noted.started.push(started.clone());
        if matches!(self.finish, Finish::Device(_)) {
            noted.carried.get_or_insert_default();
        }
        drop(noted);
        Self {
            noted: Some((log.clone(), started)),
            ..self
        }
    }

    /// Waits for the other members and writes the outputs.
    pub fn wait(self) -> Result<(), TransportError> {
        let carried = match self.finish {
            Finish::Host(finish) => {
                finish()?;
                None
            }
            Finish::Device(finish) => Some(finish()?),
        };
        if let Some((log, started)) = self.noted {
            let mut noted = log.0.borrow_mut();
            if let Some(carried) = carried {
                let all = noted.carried.get_or_insert_default();
                all.push((carried, started.collective));
            }
            noted.awaited.push(started);
        }
        Ok(())
    }
}

/// When a device did a collective: events of its communication stream. Those of rank threads and of NCCL
/// are not to be compared: waiting for a late peer is outside of the former, and within the latter.
#[derive(Debug, Clone)]
pub struct Carried {
    /// Its work was let begin: of rank threads when what all members offered was there, of NCCL, whose
    /// kernel waits for the others, when what it reads on this rank's side was.
    pub begun: Event,
    /// Its outputs are there, and its inputs may be written again.
    pub done: Event,
}

/// A collective that a rank started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// Its number among the rank's, from 0.
    pub number: u64,
    /// Name of the group.
    pub group: Rc<str>,
    /// Its key in the cost tables.
    pub collective: Collective,
}

/// What a rank's collectives did since they were last asked about.
#[derive(Debug, Default)]
pub(crate) struct Noted {
    /// Those started, in order.
    pub(crate) started: Vec<Started>,
    /// Those awaited, in order.
    pub(crate) awaited: Vec<Started>,
    /// When the device did those awaited; absent where none was started or awaited on a device.
    pub(crate) carried: Option<Vec<(Carried, Collective)>>,
    /// How long the host waited for other ranks to come, nanoseconds.
    pub(crate) waited_ns: u64,
    count: u64,
}

/// [`Noted`] by all communicators of a rank. Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct CollectiveLog(Rc<RefCell<Noted>>);

impl CollectiveLog {
    pub(crate) fn start(&self, group: &Rc<str>, collective: Collective) -> Started {
        let mut noted = self.0.borrow_mut();
        noted.count += 1;
        Started {
            number: noted.count - 1,
            group: Rc::clone(group),
            collective,
        }
    }

    /// One that the host has waited for from its start to its end.
    fn ended(&self, started: Started) {
        let mut noted = self.0.borrow_mut();
        noted.started.push(started.clone());
        noted.awaited.push(started);
    }

    /// Takes all of it.
    pub(crate) fn take(&self) -> Noted {
        let mut noted = self.0.borrow_mut();
        let count = noted.count;
        let fresh = Noted {
            count,
            ..Noted::default()
        };
        std::mem::replace(&mut *noted, fresh)
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pending")
    }
}

/// What carries the collectives of one group of two or more ranks, seen from one member.
///
/// Members call collectives in the same order; that is how a call finds its counterparts. A message finds
/// its own by the order among those between the two. Shapes were checked by the [`Communicator`]. Starting never waits for another rank, and started collectives may be
/// awaited in any order.
pub trait Transport: fmt::Debug {
    /// Starts a collective on tensors.
    fn start(&self, exchange: Exchange) -> Result<Pending, TransportError>;
    /// Every member's words, in member order; lengths may differ. Members that have the same may share.
    fn gather_words(&self, words: &[u64]) -> Result<Vec<Rc<[u64]>>, TransportError>;
    /// Sums host numbers over the members, in member order, in place.
    fn sum_numbers(&self, values: &mut [f64]) -> Result<(), TransportError> {
        let words: Vec<u64> = values.iter().map(|value| value.to_bits()).collect();
        let all = self.gather_words(&words)?;
        for (i, value) in values.iter_mut().enumerate() {
            *value = all.iter().map(|member| f64::from_bits(member[i])).sum();
        }
        Ok(())
    }
}

/// Which collective of which group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The collective with its size.
    #[serde(deserialize_with = "words::heard")]
    pub op: String,
    /// Name and ranks of the group.
    #[serde(deserialize_with = "words::heard")]
    pub group: String,
    /// Its number among the group's collectives, from 0.
    pub sequence: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} (number {} of group {})",
            self.op, self.sequence, self.group
        )
    }
}

/// A collective that did not complete.
#[derive(Debug, Clone, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum TransportError {
    /// Another rank failed.
    #[error("rank {rank} stopped in {place} because rank {failed_rank} failed: {failure}")]
    Stopped {
        /// The rank that waited.
        rank: u32,
        /// In what.
        place: Place,
        /// The rank that failed.
        failed_rank: u32,
        /// How.
        #[serde(deserialize_with = "words::heard")]
        failure: String,
        /// Whether it was given up because it said nothing, so that it may never end by itself.
        is_silent: bool,
    },
    /// Other ranks did not come in time.
    #[error(
        "rank {rank} waited {waited_s:.1} s in {place} for ranks {missing:?}, which did not come"
    )]
    Deadline {
        /// The rank that waited.
        rank: u32,
        /// In what.
        place: Place,
        /// How long.
        waited_s: f64,
        /// Who was missing.
        missing: Vec<u32>,
    },
    /// Other ranks returned without taking part.
    #[error("rank {rank} waits in {place} for ranks {missing:?}, which have finished without it")]
    Absent {
        /// The rank that waited.
        rank: u32,
        /// In what.
        place: Place,
        /// Who was missing.
        missing: Vec<u32>,
    },
    /// Members of a group called different collectives.
    #[error("rank {rank} calls {place}, where rank {other_rank} calls {other_call}")]
    Mismatch {
        /// One rank.
        rank: u32,
        /// What it called.
        place: Place,
        /// Another rank.
        other_rank: u32,
        /// What that one called.
        #[serde(deserialize_with = "words::heard")]
        other_call: String,
    },
    /// NCCL failed, in the call or in the background.
    #[error(
        "rank {rank}: NCCL failed in {place}, {bytes} bytes: {failure}; the rank's communicators were \
         aborted"
    )]
    Nccl {
        /// The rank that it failed for.
        rank: u32,
        /// In what.
        place: Place,
        /// Bytes of the rank's full buffer.
        bytes: u64,
        /// What NCCL says.
        #[serde(deserialize_with = "words::heard")]
        failure: String,
    },
    /// A collective of GPUs did not end in time.
    #[error(
        "rank {rank} waited {waited_s:.1} s for the GPU in {place}, {bytes} bytes: a rank of the group \
         is missing or another's GPU hangs; the rank's communicators were aborted"
    )]
    Stuck {
        /// The rank that waited.
        rank: u32,
        /// The first collective that is not done.
        place: Place,
        /// Bytes of the rank's full buffer.
        bytes: u64,
        /// How long.
        waited_s: f64,
    },
    /// One member sends another number of rows than the other expects.
    #[error(
        "rank {rank} expects {expected_rows} rows from rank {other_rank} in {place}, \
         which sends {sent_rows}"
    )]
    Rows {
        /// The receiver.
        rank: u32,
        /// In what.
        place: Place,
        /// The sender.
        other_rank: u32,
        /// What the receiver expects.
        expected_rows: usize,
        /// What the sender sends.
        sent_rows: usize,
    },
}
