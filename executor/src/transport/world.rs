//! [`World`]: starts the ranks, and turns one rank's failure into one error for all.
//!
//! Ranks are threads of this process. A rank that returns an error, or panics, wakes all the others
//! with an error that names it; `run` then returns the failure that came first, with its rank.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::panic::{self, AssertUnwindSafe};
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use moefold_kernels::DeviceError;

use super::mailbox::{GroupKey, Mailbox};
use super::recording::{CallLog, Recording};
use super::threads::{Flights, Threads};
use super::{Communicator, Transport};
use crate::error::Error;
use crate::record::Recorder;

/// Stack of a rank thread: deep recursion is nowhere, large frames are in matrix kernels.
const STACK_BYTES: usize = 8 << 20;

/// Ranks to be run together.
#[derive(Debug, Clone)]
pub struct World {
    ranks: u32,
    deadline: Duration,
}

impl World {
    /// A world of `ranks` threads. A collective that waits for ten minutes fails.
    pub fn threads(ranks: u32) -> Self {
        assert!(ranks > 0, "a world has at least one rank");
        Self {
            ranks,
            deadline: Duration::from_mins(10),
        }
    }

    /// Changes how long a collective waits for missing ranks before it fails.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, ..self }
    }

    /// Runs `body` once a rank, together, and returns their results in rank order, or the failure
    /// that came first.
    pub fn run<T, F>(&self, body: F) -> Result<Vec<T>, Error>
    where
        T: Send,
        F: Fn(&RankContext) -> Result<T, Error> + Sync,
    {
        let mailbox = Arc::new(Mailbox::new(self.ranks, self.deadline));
        let epoch = Instant::now();
        let outcomes: Vec<Result<T, Error>> = thread::scope(|scope| {
            let spawn = |rank| {
                let (mailbox, body) = (Arc::clone(&mailbox), &body);
                thread::Builder::new()
                    .name(format!("rank {rank}"))
                    .stack_size(STACK_BYTES)
                    .spawn_scoped(scope, move || {
                        run_rank(rank, self.ranks, epoch, &mailbox, body)
                    })
                    .map_err(|cause| Error::Spawn {
                        rank,
                        ranks: self.ranks,
                        cause,
                    })
            };
            let threads: Vec<_> = (0..self.ranks)
                .map(|rank| {
                    spawn(rank).inspect_err(|error| mailbox.poison(rank, error.to_string()))
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
        first_failure(outcomes, mailbox.failure().map(|failure| failure.rank))
    }
}

/// All results, or the error of the rank that failed first.
fn first_failure<T>(
    outcomes: Vec<Result<T, Error>>,
    failed_rank: Option<u32>,
) -> Result<Vec<T>, Error> {
    let mut results = Vec::with_capacity(outcomes.len());
    let mut first: Option<(u32, Error)> = None;
    for (rank, outcome) in (0..).zip(outcomes) {
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

fn run_rank<T, F>(
    rank: u32,
    ranks: u32,
    epoch: Instant,
    mailbox: &Arc<Mailbox>,
    body: &F,
) -> Result<T, Error>
where
    F: Fn(&RankContext) -> Result<T, Error>,
{
    let context = RankContext {
        rank,
        ranks,
        epoch,
        mailbox: Arc::clone(mailbox),
        instances: Rc::default(),
        last_call: Rc::default(),
        waited_ns: Rc::default(),
        flights: Flights::default(),
        log: None,
    };
    // Tensors and spans of the rank die with its closure, so no broken state is seen afterwards.
    let outcome = panic::catch_unwind(AssertUnwindSafe(|| body(&context)));
    let result = outcome.unwrap_or_else(|payload| {
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
        Ok(_) => mailbox.leave(rank),
        Err(error) => mailbox.poison(rank, error.to_string()),
    }
    result
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
    rank: u32,
    ranks: u32,
    epoch: Instant,
    mailbox: Arc<Mailbox>,
    /// How many communicators of a name and ranks this rank has made.
    instances: Rc<RefCell<Instances>>,
    last_call: Rc<RefCell<Option<String>>>,
    waited_ns: Rc<Cell<u64>>,
    flights: Flights,
    log: Option<CallLog>,
}

impl RankContext {
    /// The rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks of the world.
    pub fn ranks(&self) -> u32 {
        self.ranks
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
        Recorder::new(self.rank, self.epoch)
    }

    /// Joins the group of `ranks`, which must hold this rank. All members call this in the same
    /// order among the groups of one name and ranks; each call makes a separate communicator.
    pub fn communicator(&self, name: &str, ranks: &[u32]) -> Communicator {
        let index = ranks.iter().position(|&r| r == self.rank);
        let index = index.unwrap_or_else(|| {
            panic!(
                "rank {} joins group {name} {ranks:?} without being in it",
                self.rank
            )
        });
        assert!(
            ranks.iter().all(|&r| r < self.ranks),
            "group {name} {ranks:?} in a world of {} ranks",
            self.ranks
        );
        if ranks.len() == 1 {
            return Communicator::solo(self.rank);
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
        let threads = Threads::join(
            Arc::clone(&self.mailbox),
            &key,
            index,
            Rc::clone(&self.last_call),
            Rc::clone(&self.waited_ns),
            self.flights.clone(),
        );
        let transport: Rc<dyn Transport> = match &self.log {
            None => Rc::new(threads),
            Some(log) => Rc::new(Recording::new(threads, name, ranks.len(), log.clone())),
        };
        Communicator::over(ranks, index, transport)
    }

    /// The same rank with communicators that write each call to `log`.
    #[must_use]
    pub fn recording(&self, log: &CallLog) -> Self {
        Self {
            log: Some(log.clone()),
            ..self.clone()
        }
    }
}
