//! [`World`]: starts the ranks, and turns one rank's failure into one error for all.
//!
//! Ranks are threads of this process, or this process is one of them and a launcher starts the others.
//! A rank that returns an error, or panics, wakes all the others with an error that names it; `run` then
//! returns the failure that came first of the ranks that are here, with its rank.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::panic::{self, AssertUnwindSafe};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use moefold_kernels::cuda::nccl::Nccl;
use moefold_kernels::{Device, DeviceError};

use super::launched::Launched;
use super::mail::{Mail, TO_FIRST};
use super::mailbox::{Call, GroupKey, Mailbox, Payload, lock};
use super::nccl::{Broken, Gpus, Ring};
use super::pulse::HEARTBEAT;
use super::remote::Remote;
use super::rendezvous::{self, Meeting, Server};
use super::shelf::Shelf;
use super::threads::{Flights, Started, Threads};
use super::{CollectiveLog, Communicator, Transport, TransportError};
use crate::error::Error;
use crate::record::Recorder;

/// Stack of a rank thread: deep recursion is nowhere, large frames are in matrix kernels.
const STACK_BYTES: usize = 8 << 20;

/// Ranks to be run together.
#[derive(Debug, Clone)]
pub struct World {
    kind: Kind,
    /// How ranks that are processes meet; its deadline is that of all ranks.
    meeting: Meeting,
    /// Bytes that a rank which is a process may have on their way to others.
    on_the_way: u64,
    /// The NCCL of ranks with a GPU each; absent, that of the machine.
    nccl: Option<Nccl>,
}

#[derive(Debug, Clone)]
enum Kind {
    Threads {
        ranks: u32,
    },
    Process {
        launched: Launched,
        /// Of rank 0, where it listens already.
        server: Arc<Mutex<Option<Server>>>,
    },
}

/// What a rank has on its way where nobody says otherwise.
const ON_THE_WAY: u64 = 1 << 30;

/// How ranks meet where nobody says otherwise: each waits for others for ten minutes.
const MEETING: Meeting = Meeting {
    terms: BTreeMap::new(),
    deadline: Duration::from_mins(10),
    heartbeat: HEARTBEAT,
};

impl World {
    /// A world of `ranks` threads. A collective that waits for ten minutes fails.
    pub fn threads(ranks: u32) -> Self {
        assert!(ranks > 0, "a world has at least one rank");
        Self {
            kind: Kind::Threads { ranks },
            meeting: MEETING,
            on_the_way: ON_THE_WAY,
            nccl: None,
        }
    }

    /// A world of which this process is one rank; the others find it as the launcher says.
    pub fn process(launched: Launched) -> Self {
        Self {
            kind: Kind::Process {
                launched,
                server: Arc::default(),
            },
            meeting: MEETING,
            on_the_way: ON_THE_WAY,
            nccl: None,
        }
    }

    /// Rank 0 of processes listens from here on, not only from [`World::run`]: ranks that come first wait
    /// for it, and one that fails before it could come is heard. Where the world is dropped instead of run,
    /// those that wait are told.
    pub fn listen(self) -> Result<Self, Error> {
        if let Kind::Process { launched, server } = &self.kind
            && launched.rank == 0
            && launched.ranks > 1
        {
            *lock(server) = Some(Server::start(launched)?);
        }
        Ok(self)
    }

    /// Ranks, here and elsewhere.
    pub fn ranks(&self) -> u32 {
        match &self.kind {
            Kind::Threads { ranks } => *ranks,
            Kind::Process { launched, .. } => launched.ranks,
        }
    }

    /// Whether every rank is a process of its own.
    pub fn is_apart(&self) -> bool {
        matches!(self.kind, Kind::Process { .. })
    }

    /// Whether rank 0 is here, to whom results come.
    pub fn has_first(&self) -> bool {
        match &self.kind {
            Kind::Threads { .. } => true,
            Kind::Process { launched, .. } => launched.rank == 0,
        }
    }

    /// Whether another rank has come and waits.
    #[cfg(test)]
    pub(super) fn is_awaited(&self) -> bool {
        let Kind::Process { server, .. } = &self.kind else {
            return false;
        };
        lock(server).as_ref().is_some_and(Server::is_awaited)
    }

    /// Changes how long a collective waits for missing ranks before it fails.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        let meeting = Meeting {
            deadline,
            ..self.meeting
        };
        Self { meeting, ..self }
    }

    /// Changes how long a rank that is a process may be silent before it has failed.
    #[must_use]
    pub fn heartbeat(self, heartbeat: Duration) -> Self {
        let meeting = Meeting {
            heartbeat,
            ..self.meeting
        };
        Self { meeting, ..self }
    }

    /// Changes how many bytes a rank that is a process may have on their way, which others have not collected; one
    /// with more has failed.
    #[must_use]
    pub fn on_the_way(self, bytes: u64) -> Self {
        Self {
            on_the_way: bytes,
            ..self
        }
    }

    /// The same world under terms, by name, that ranks which are processes compare when they meet: where one
    /// has others than rank 0 there is no run.
    #[must_use]
    pub fn agreeing(&self, terms: BTreeMap<String, String>) -> Self {
        let mut world = self.clone();
        world.meeting.terms = terms;
        world
    }

    /// Lets ranks that are processes with a GPU each talk by this NCCL, whatever the machine has.
    #[must_use]
    pub fn nccl(self, nccl: Nccl) -> Self {
        let nccl = Some(nccl);
        Self { nccl, ..self }
    }

    /// Runs `body` once for every rank that is here, together with those that are elsewhere, and
    /// returns their results in rank order, or the failure that came first.
    pub fn run<T, F>(&self, body: F) -> Result<Vec<T>, Error>
    where
        T: Send,
        F: Fn(&RankContext) -> Result<T, Error> + Sync,
    {
        match &self.kind {
            Kind::Threads { ranks } => self.run_threads(*ranks, &body),
            Kind::Process { launched, server } => self.run_process(launched, server, &body),
        }
    }

    fn run_threads<T, F>(&self, ranks: u32, body: &F) -> Result<Vec<T>, Error>
    where
        T: Send,
        F: Fn(&RankContext) -> Result<T, Error> + Sync,
    {
        let mailbox = Arc::new(Mailbox::new(ranks, self.meeting.deadline));
        let epoch = Instant::now();
        let outcomes: Vec<Result<T, Error>> = thread::scope(|scope| {
            let spawn = |rank| {
                let mailbox = Arc::clone(&mailbox);
                let seat = Seat {
                    rank,
                    ranks,
                    gpu: 0,
                    local_rank: rank,
                    local_ranks: ranks,
                    apart: false,
                };
                thread::Builder::new()
                    .name(format!("rank {rank}"))
                    .stack_size(STACK_BYTES)
                    .spawn_scoped(scope, move || {
                        let mail: Rc<dyn Mail> = Rc::new(mailbox);
                        self.run_rank(seat, epoch, &mail, body)
                    })
                    .map_err(|cause| Error::Spawn { rank, ranks, cause })
            };
            let threads: Vec<_> = (0..ranks)
                .map(|rank| {
                    spawn(rank).inspect_err(|error| {
                        mailbox.poison(rank, error.to_string());
                        mailbox.part();
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| {
                    thread?
                        .join()
                        .expect("a rank's panic is caught on its thread")
                })
                .collect()
        });
        first_failure(0, outcomes, mailbox.failure().map(|failure| failure.rank))
    }

    /// Runs the rank that is this process, on this thread. Rank 0 stays until the others are done:
    /// their words to each other pass through its process.
    fn run_process<T, F>(
        &self,
        launched: &Launched,
        server: &Mutex<Option<Server>>,
        body: &F,
    ) -> Result<Vec<T>, Error>
    where
        F: Fn(&RankContext) -> Result<T, Error>,
    {
        let seat = Seat {
            rank: launched.rank,
            ranks: launched.ranks,
            gpu: launched.gpu,
            local_rank: launched.local_rank,
            local_ranks: launched.local_ranks,
            apart: true,
        };
        Launched::begin();
        let outcome = if launched.rank == 0 {
            let mailbox = Mailbox::new(launched.ranks, self.meeting.deadline);
            let mailbox = Arc::new(mailbox.with_limit(self.on_the_way));
            let server = match lock(server).take() {
                // Nobody else is to come.
                None if launched.ranks == 1 => None,
                None => Some(Server::start(launched)?),
                listening => listening,
            };
            if let Some(server) = &server {
                server.wait(&mailbox, &self.meeting)?;
            }
            let mail: Rc<dyn Mail> = Rc::new(mailbox);
            let outcome = self.run_rank(seat, Instant::now(), &mail, body);
            if let Some(server) = server {
                server.stay(self.meeting.deadline);
            }
            outcome
        } else {
            let (connection, pulse) = rendezvous::connect(launched, &self.meeting)?;
            let mail: Rc<dyn Mail> = Rc::new(Remote::new(launched.rank, connection, pulse));
            self.run_rank(seat, Instant::now(), &mail, body)
        };
        first_failure(launched.rank, vec![outcome], None)
    }

    fn run_rank<T, F>(
        &self,
        seat: Seat,
        epoch: Instant,
        mail: &Rc<dyn Mail>,
        body: &F,
    ) -> Result<T, Error>
    where
        F: Fn(&RankContext) -> Result<T, Error>,
    {
        let rank = seat.rank;
        let context = RankContext {
            seat,
            epoch,
            deadline: self.meeting.deadline,
            nccl: self.nccl,
            mail: Rc::clone(mail),
            instances: Rc::default(),
            last_call: Rc::default(),
            waited_ns: Rc::default(),
            flights: Flights::default(),
            shelf: Shelf::default(),
            to_first: Rc::default(),
            gpus: Gpu::None,
            log: None,
        };
        // Tensors and spans of the rank die with its closure, so no broken state is seen afterwards.
        let outcome = panic::catch_unwind(AssertUnwindSafe(|| body(&context)));
        let result = outcome.unwrap_or_else(|payload| {
            let payload = match payload.downcast::<TransportError>() {
                Ok(failure) => return Err(Error::Transport(*failure)),
                Err(payload) => payload,
            };
            Err(match payload.downcast::<DeviceError>() {
                Ok(failure) => Error::Device(*failure),
                Err(payload) => Error::Panicked {
                    rank,
                    during: match &*context.last_call.borrow() {
                        None => "before its first collective".to_owned(),
                        Some(call) => format!("after starting {call}"),
                    },
                    message: panic_message(payload.as_ref()),
                },
            })
        });
        match &result {
            Ok(_) => mail.leave(rank),
            Err(error) => mail.poison(rank, error.to_string()),
        }
        if !seat.apart {
            // Others may be about to read what this rank offered, whose memory is in flight till then.
            let _ = panic::catch_unwind(AssertUnwindSafe(|| context.flights.synchronize()));
            mail.shared().part();
            mail.shared().wait_for_all_to_part();
            context.flights.abandon();
        }
        result
    }
}

/// A rank's place in its world and on its machine.
#[derive(Debug, Clone, Copy)]
struct Seat {
    rank: u32,
    ranks: u32,
    gpu: u32,
    local_rank: u32,
    local_ranks: u32,
    /// Whether every other rank is another process.
    apart: bool,
}

/// All results, or the error of the rank that failed first.
fn first_failure<T>(
    first_rank: u32,
    outcomes: Vec<Result<T, Error>>,
    failed_rank: Option<u32>,
) -> Result<Vec<T>, Error> {
    let mut results = Vec::with_capacity(outcomes.len());
    let mut first: Option<(u32, Error)> = None;
    for (rank, outcome) in (first_rank..).zip(outcomes) {
        match outcome {
            Ok(result) => results.push(result),
            Err(error) if first.is_none() || failed_rank == Some(rank) => {
                first = Some((rank, error));
            }
            Err(_) => {}
        }
    }
    match first {
        None => Ok(results),
        // These name the rank themselves.
        Some((_, error @ (Error::Panicked { .. } | Error::Spawn { .. } | Error::Transport(_)))) => {
            Err(error)
        }
        Some((rank, error)) => Err(Error::Rank {
            rank,
            cause: Box::new(error),
        }),
    }
}

fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

/// Communicators made so far, by name and ranks.
type Instances = HashMap<(String, Vec<u32>), u32>;

/// What one rank is given. Lives on the rank's thread.
#[derive(Debug, Clone)]
pub struct RankContext {
    seat: Seat,
    epoch: Instant,
    deadline: Duration,
    nccl: Option<Nccl>,
    mail: Rc<dyn Mail>,
    /// How many communicators of a name and ranks this rank has made.
    instances: Rc<RefCell<Instances>>,
    last_call: Rc<RefCell<Option<String>>>,
    waited_ns: Rc<Cell<u64>>,
    flights: Flights,
    /// Memory of posts, for posts to come.
    shelf: Shelf,
    /// The ends of messages to rank 0 that this rank has, by the sender.
    to_first: Rc<RefCell<HashMap<u32, Threads>>>,
    pub(super) gpus: Gpu,
    log: Option<CollectiveLog>,
}

/// Whether collectives go by NCCL.
#[derive(Debug, Clone)]
pub(super) enum Gpu {
    None,
    Ring(Rc<Ring>),
    /// They should, and could not.
    Broken(TransportError),
}

impl RankContext {
    /// The rank.
    pub fn rank(&self) -> u32 {
        self.seat.rank
    }

    /// Ranks of the world.
    pub fn ranks(&self) -> u32 {
        self.seat.ranks
    }

    /// The number of the GPU it takes; 0 where ranks are threads, which share one.
    pub fn gpu(&self) -> u32 {
        self.seat.gpu
    }

    /// Its number among the ranks of its machine.
    pub fn local_rank(&self) -> u32 {
        self.seat.local_rank
    }

    /// Ranks of its machine.
    pub fn local_ranks(&self) -> u32 {
        self.seat.local_ranks
    }

    /// Whether every other rank is another process, with memory of its own.
    pub fn is_apart(&self) -> bool {
        self.seat.apart
    }

    /// When the world began; all ranks measure from it.
    pub fn epoch(&self) -> Instant {
        self.epoch
    }

    /// Nanoseconds that this rank has waited for others to post, over all its communicators; it
    /// grows while the rank runs.
    pub fn waited_ns(&self) -> Rc<Cell<u64>> {
        Rc::clone(&self.waited_ns)
    }

    /// A recorder for this rank.
    pub fn recorder(&self) -> Recorder {
        Recorder::new(self.rank(), self.epoch)
    }

    /// Joins the group of `ranks`, which must hold this rank. All members call this in the same
    /// order among the groups of one name and ranks; each call makes a separate communicator.
    pub fn communicator(&self, name: &str, ranks: &[u32]) -> Communicator {
        self.joined(name, ranks, None)
    }

    /// The same for messages alone, between the members of `pairs`, the sender first. Groups of all ranks have
    /// the same pairs.
    pub fn lines(&self, name: &str, ranks: &[u32], pairs: &[[usize; 2]]) -> Communicator {
        self.joined(name, ranks, Some(pairs))
    }

    fn joined(&self, name: &str, ranks: &[u32], lines: Option<&[[usize; 2]]>) -> Communicator {
        let index = ranks.iter().position(|&r| r == self.rank());
        let index = index.unwrap_or_else(|| {
            panic!(
                "rank {} joins group {name} {ranks:?} without being in it",
                self.rank()
            )
        });
        assert!(
            ranks.iter().all(|&r| r < self.ranks()),
            "group {name} {ranks:?} in a world of {} ranks",
            self.ranks()
        );
        if ranks.len() == 1 && (lines.is_some() || !matches!(self.gpus, Gpu::Ring(_))) {
            return Communicator::solo(self.rank());
        }
        let mut instances = self.instances.borrow_mut();
        let instance = instances
            .entry((name.to_owned(), ranks.to_vec()))
            .or_default();
        let key = GroupKey {
            name: name.to_owned(),
            ranks: ranks.to_vec(),
            instance: *instance,
        };
        *instance += 1;
        let threads = self.threads(&key, index);
        let transport: Rc<dyn Transport> = match &self.gpus {
            Gpu::None => Rc::new(threads),
            Gpu::Broken(error) => Rc::new(Broken(error.clone())),
            Gpu::Ring(ring) if let Some(pairs) = lines => match ring.lines(&key, pairs, threads) {
                Ok(lines) => Rc::new(lines),
                Err(error) => Rc::new(Broken(error)),
            },
            Gpu::Ring(ring) => match ring.group(&key) {
                Ok(None) => return Communicator::solo(self.rank()),
                Ok(Some(group)) => Rc::new(Gpus {
                    group,
                    words: threads,
                }),
                Err(error) => Rc::new(Broken(error)),
            },
        };
        let machine = |rank: u32| rank / self.local_ranks().max(1);
        let of_machine = |a: u32| ranks.iter().filter(|&&b| machine(a) == machine(b)).count();
        let nearest = ranks.iter().map(|&rank| of_machine(rank)).max();
        Communicator::over(name, ranks, index, transport)
            .spread(nearest.unwrap_or(1) as u32)
            .noting(self.log.clone())
    }

    fn threads(&self, key: &GroupKey, index: usize) -> Threads {
        Threads::join(
            Rc::clone(&self.mail),
            key,
            index,
            Rc::clone(&self.last_call),
            Rc::clone(&self.waited_ns),
            self.flights.clone(),
            self.shelf.clone(),
        )
    }

    /// The same rank with communicators for tensors of `device`: between processes with a GPU each they
    /// go by NCCL, which all ranks join here. Where that fails, every use of a communicator says why.
    #[must_use]
    pub fn on(&self, device: &Device) -> Self {
        if self.is_apart() && self.ranks() > 1 && device.name() == "cuda" {
            return self.over_nccl(self.nccl.map_or_else(Nccl::open, Ok), device);
        }
        self.clone()
    }

    pub(super) fn over_nccl(&self, nccl: Result<Nccl, DeviceError>, device: &Device) -> Self {
        let key = GroupKey {
            name: "NCCL".to_owned(),
            ranks: (0..self.ranks()).collect(),
            instance: 0,
        };
        let agreement = self.threads(&key, self.rank() as usize);
        let (seat, mail) = ([self.rank(), self.ranks()], Rc::clone(&self.mail));
        let gpus = match Ring::join(nccl, device, seat, agreement, mail, self.deadline) {
            Ok(ring) => Gpu::Ring(ring),
            Err(error) => Gpu::Broken(error),
        };
        Self {
            gpus,
            ..self.clone()
        }
    }

    /// Sends rank 0 a message, which it takes by [`RankContext::receive`]; does not wait for it.
    pub(crate) fn send_first(&self, message: Payload) -> Result<(), TransportError> {
        assert!(self.rank() > 0, "rank 0 sends itself nothing");
        self.post_to_first(self.rank(), message).map(drop)
    }

    /// The next message of `rank` to rank 0, which the caller is.
    pub(crate) fn receive(&self, rank: u32) -> Result<Payload, TransportError> {
        let begun = self.post_to_first(rank, Payload::U64(Vec::new()))?;
        let collected = begun.collect()?;
        Ok(collected.posts[1].data.clone())
    }

    /// Posts the caller's part of the next message of `rank` to rank 0.
    fn post_to_first(&self, rank: u32, data: Payload) -> Result<Started, TransportError> {
        let mut lines = self.to_first.borrow_mut();
        let line = lines.entry(rank).or_insert_with(|| {
            let key = GroupKey {
                name: TO_FIRST.to_owned(),
                ranks: vec![0, rank],
                instance: 0,
            };
            self.threads(&key, usize::from(self.rank() > 0))
        });
        let call = Call {
            what: TO_FIRST,
            element: "u64",
            size: 0,
            root: 0,
        };
        if self.rank() > 0 {
            line.tell(call, data)
        } else {
            line.post(call, data, Vec::new())
        }
    }

    /// The same rank with communicators that note in `log` when its device did each collective; whoever
    /// holds the log may take the notes out of it at any time.
    #[must_use]
    pub(crate) fn noting(&self, log: &CollectiveLog) -> Self {
        Self {
            log: Some(log.clone()),
            ..self.clone()
        }
    }
}
