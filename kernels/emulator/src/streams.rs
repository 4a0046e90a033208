//! Which stream knows of whose work: vector clocks of streams, of hosts, and of the events between them.
//!
//! The emulator does work when it is asked for. A GPU does it when its stream comes to it. When two
//! pieces of work were asked for does not order them: that one stream waited for the other does, or that
//! the host did. So every piece of work is an [`Work`] of its stream, with a count, and a stream has a
//! [`Clock`]: of every stream of every rank the last event that is over when its own next one begins. It
//! learns by [`Streams::after`], by an event that it waits for, and from the host who asks: a host is a
//! thread, and knows what it waited for. (What hosts tell each other orders nothing here.)
//!
//! `history` remembers who used memory last, and so what of it an event should have waited for.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use moefold_kernels::cuda::Stream;
use moefold_kernels::{DeviceError, event};

use crate::random::Random;

/// A stream of a rank, by a number of its own in the process.
type Agent = u32;

/// How often an event may be said not to be reached.
const DENIALS: usize = 2;

/// The stream of dice for that, beside those of launches.
const MOMENTS: u64 = u64::MAX;

/// Names of ranks, three agents each.
static RANKS: Mutex<Vec<String>> = Mutex::new(Vec::new());

thread_local! {
    /// What the host of this thread knows to be over.
    static HOST: RefCell<Clock> = RefCell::default();
}

/// Of every agent the count of the last event that is over.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<(Agent, u32)>);

impl Clock {
    fn known(&self, agent: Agent) -> u32 {
        let found = self.0.binary_search_by_key(&agent, |&(agent, _)| agent);
        found.map_or(0, |at| self.0[at].1)
    }

    fn learn(&mut self, agent: Agent, count: u32) {
        match self.0.binary_search_by_key(&agent, |&(agent, _)| agent) {
            Ok(at) => self.0[at].1 = self.0[at].1.max(count),
            Err(at) => self.0.insert(at, (agent, count)),
        }
    }

    /// Learns all that another knows; whether any of it is new.
    fn absorb(&mut self, other: &Self) -> bool {
        let mut new = false;
        for &(agent, count) in &other.0 {
            if self.known(agent) < count {
                self.learn(agent, count);
                new = true;
            }
        }
        new
    }

    /// Whether it knows all that another knows.
    fn covers(&self, other: &Self) -> bool {
        other
            .0
            .iter()
            .all(|&(agent, count)| self.known(agent) >= count)
    }

    /// Whether an event is over.
    pub(crate) fn knows(&self, event: Work) -> bool {
        self.known(event.agent) >= event.count
    }
}

/// A piece of work of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Work {
    agent: Agent,
    count: u32,
    /// A kernel, or what else was done.
    what: &'static str,
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let streams = Stream::ALL.len() as Agent;
        let (rank, stream) = (self.agent / streams, self.agent % streams);
        let stream = match Stream::ALL[stream as usize] {
            Stream::Compute => "compute",
            Stream::Communication => "communication",
            Stream::Copies => "copies",
            Stream::Sends => "sends",
            Stream::Replicas => "replicas",
            Stream::Tokens => "tokens",
        };
        let ranks = RANKS.lock().unwrap_or_else(PoisonError::into_inner);
        let rank = &ranks[rank as usize];
        write!(f, "{} in the {stream} stream of {rank}", self.what)
    }
}

/// How far a stream had come, and when.
#[derive(Debug)]
pub(crate) struct Mark {
    over: Clock,
    at: Instant,
    /// How often it is still said not to be reached, unless the host knows better.
    denials: AtomicU32,
}

impl event::Mark for Mark {
    fn machine(&self) -> &'static str {
        "an emulator"
    }

    /// A GPU takes its time, so the answer may be no at first; by a yes the host learns it.
    fn is_reached(&self) -> Result<bool, DeviceError> {
        HOST.with_borrow_mut(|host| {
            if host.covers(&self.over) {
                return Ok(true);
            }
            let one_less = |left: u32| left.checked_sub(1);
            let denied = self
                .denials
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
            if denied.is_err() {
                host.absorb(&self.over);
            }
            Ok(denied.is_err())
        })
    }

    fn seconds_since(&self, earlier: &dyn event::Mark) -> Option<Result<f64, DeviceError>> {
        let earlier = (earlier as &dyn Any).downcast_ref::<Self>()?;
        let passed = self.at.saturating_duration_since(earlier.at);
        Some(Ok(passed.as_secs_f64()))
    }
}

/// One of an emulated device's waits of a stream for another, to be left out: tests plant that error.
/// Waits that tell the stream nothing new are not counted. Clones are the same one.
#[derive(Debug, Clone)]
pub struct LostWait(Arc<AtomicI64>);

impl LostWait {
    /// The wait of this number, from 0.
    pub fn number(number: u32) -> Self {
        Self(Arc::new(AtomicI64::new(number.into())))
    }

    /// Whether there was a wait of this number.
    pub fn happened(&self) -> bool {
        self.0.load(Ordering::Relaxed) < 0
    }

    /// Counts a wait; whether it is the one.
    fn is_now(&self) -> bool {
        self.0.fetch_sub(1, Ordering::Relaxed) == 0
    }
}

/// The streams of one emulator.
pub(crate) struct Streams {
    rank: Agent,
    current: Stream,
    /// By stream.
    clocks: [Clock; Stream::ALL.len()],
    lost: Option<LostWait>,
    dice: Random,
}

impl Streams {
    /// Streams without work, of the rank that this thread is.
    pub(crate) fn new(seed: u64, lost: Option<LostWait>) -> Self {
        let mut ranks = RANKS.lock().unwrap_or_else(PoisonError::into_inner);
        let number = ranks.len();
        let thread = thread::current();
        let named = thread.name().filter(|name| name.starts_with("rank "));
        ranks.push(named.map_or_else(|| format!("emulator {number}"), str::to_owned));
        Self {
            rank: number as Agent,
            current: Stream::Compute,
            clocks: Default::default(),
            lost,
            dice: Random::new(seed, MOMENTS),
        }
    }

    /// Whether a wait is left out, here or at another rank, which may be the one that was told.
    pub(crate) fn is_planted(&self) -> bool {
        self.lost.is_some()
    }

    fn clock(&mut self) -> &mut Clock {
        &mut self.clocks[self.current as usize]
    }

    /// Sends what comes to another stream; the one before.
    pub(crate) fn switch(&mut self, stream: Stream) -> Stream {
        std::mem::replace(&mut self.current, stream)
    }

    /// The next piece of work, and what is over when it begins.
    pub(crate) fn begin(&mut self, what: &'static str) -> (Work, &Clock) {
        let agent = Stream::ALL.len() as Agent * self.rank + self.current as Agent;
        let clock = self.clock();
        HOST.with_borrow(|host| clock.absorb(host));
        let count = clock.known(agent) + 1;
        clock.learn(agent, count);
        (Work { agent, count, what }, clock)
    }

    /// The same, of work that waits for all streams of the rank.
    pub(crate) fn begin_after_all(&mut self, what: &'static str) -> (Work, Clock) {
        let (event, clock) = self.begin(what);
        let mut clock = clock.clone();
        for other in &self.clocks {
            clock.absorb(other);
        }
        (event, clock)
    }

    /// The current stream waits for what another was asked for.
    pub(crate) fn after(&mut self, stream: Stream) {
        let over = self.clocks[stream as usize].clone();
        self.wait(&over);
    }

    /// The current stream waits for an event.
    pub(crate) fn wait_for(&mut self, mark: &Mark) {
        self.wait(&mark.over);
    }

    fn wait(&mut self, over: &Clock) {
        let mut after = self.clock().clone();
        let new = after.absorb(over);
        if new && !self.lost.as_ref().is_some_and(LostWait::is_now) {
            *self.clock() = after;
        }
    }

    /// How far the current stream has come.
    pub(crate) fn mark(&mut self) -> Mark {
        Mark {
            over: self.clock().clone(),
            at: Instant::now(),
            denials: AtomicU32::new(self.dice.below(DENIALS + 1) as u32),
        }
    }

    /// The host waits for the current stream.
    pub(crate) fn drain(&mut self) {
        let clock = self.clock();
        HOST.with_borrow_mut(|host| host.absorb(clock));
    }

    /// The host waits for all of them.
    pub(crate) fn drain_all(&self) {
        HOST.with_borrow_mut(|host| {
            for clock in &self.clocks {
                host.absorb(clock);
            }
        });
    }
}

#[cfg(test)]
mod tests;
