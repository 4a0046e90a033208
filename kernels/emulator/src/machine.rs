//! [`Machine`]: one launch of a kernel; its running block, and who is where in it.
//!
//! Blocks run one at a time. A thread calls the methods here (through `abi`) between its own
//! instructions; a method never waits, it puts the thread to [`State::Waiting`] and whoever makes
//! the awaited thing come true wakes it. The model's other parts are further methods: `access`
//! (memory, atomics, fences), `sync` (barriers and collectives of warps), `copies`, `mbarrier`,
//! `tensor_core`, and `report` (what is wrong).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use crate::clock::{Agent, Clock, Foreign, Joiner, Timestamp};
use crate::compile::Library;
use crate::copies::{Copies, CpAsync, Group};
use crate::fault::{Fault, Kind};
use crate::mbarrier::Mbarrier;
use crate::memory::Memory;
use crate::random::Random;
use crate::shared::Shared;
use crate::sync::{Collective, Gate, Warp};
use crate::tensor_core::Wgmma;

/// What is launched.
pub(crate) struct Setup<'a> {
    pub(crate) entry: &'a str,
    pub(crate) library: &'a Library,
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: u32,
    pub(crate) shared: usize,
    /// Arguments that are addresses, by their number.
    pub(crate) addresses: Vec<(usize, u64)>,
    /// What the dice were thrown from, for reports.
    pub(crate) seed: u64,
}

/// A launch.
pub(crate) struct Machine<'m> {
    pub(crate) setup: &'m Setup<'m>,
    pub(crate) memory: &'m mut Memory,
    pub(crate) random: Random,
    /// The first count of every block so far, the running one last.
    pub(crate) turns: Vec<u32>,
    pub(crate) block: [u32; 3],
    pub(crate) shared: Shared,
    pub(crate) threads: Vec<Thread>,
    pub(crate) warps: Vec<Warp>,
    pub(crate) current: usize,
    pub(crate) live: u32,
    pub(crate) stream: Stream,
    /// `__syncthreads`, then the named barriers.
    pub(crate) gates: [Gate; 16],
    pub(crate) mbarriers: BTreeMap<u32, Mbarrier>,
    pub(crate) copies: Copies,
    /// Counts at which each thread called `fence_async`, and `mbar_fence_init`.
    pub(crate) fences: Vec<Vec<u32>>,
    pub(crate) init_fences: Vec<Vec<u32>>,
    /// The same of `fence_async_global`, over all blocks so far.
    pub(crate) device_fences: Vec<Vec<u32>>,
    /// What was told to whoever reads an address by atomics.
    pub(crate) published: HashMap<u64, Vec<Foreign>>,
    pub(crate) joiner: Joiner,
    pub(crate) fault: Option<Fault>,
}

/// A thread of the block.
pub(crate) struct Thread {
    pub(crate) timestamp: Timestamp,
    pub(crate) state: State,
    /// Addresses of its stack.
    pub(crate) stack: Range<u64>,
    /// What a collective gave it.
    pub(crate) result: u32,
    pub(crate) cp_open: Vec<CpAsync>,
    pub(crate) cp_groups: VecDeque<Vec<CpAsync>>,
    pub(crate) bulk_open: Group,
    pub(crate) bulk_groups: VecDeque<Group>,
    pub(crate) wgmma: Wgmma,
    /// What it knew at its last `thread_fence`.
    pub(crate) fence: Option<Timestamp>,
    /// What it knew at its last `fence_async_global`, and what it had done.
    pub(crate) device_fence: Option<Rc<Clock>>,
    /// Addresses it read by atomics since, and how many timestamps were published there.
    pub(crate) seen: Vec<(u64, usize)>,
}

/// An asynchronous operation, as it touches memory.
pub(crate) struct Operation<'a> {
    /// The thread that started it.
    pub(crate) issuer: usize,
    pub(crate) timestamp: &'a Timestamp,
    /// [`Thread::device_fence`] of that thread when it did.
    pub(crate) device_fence: Option<&'a Clock>,
    pub(crate) site: u32,
}

/// What a thread is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Running,
    Queued,
    Waiting(Wait, u32),
    Done,
}

/// What a thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    Gate(u32),
    Collective(Collective),
    Mbarrier { at: u32, parity: u32 },
    Bulk,
}

/// Who runs next.
#[derive(Default)]
pub(crate) struct Stream {
    ready: Vec<u16>,
    /// Threads held back, and until which step.
    asleep: BinaryHeap<Reverse<(u64, u16)>>,
    step: u64,
    /// Polls without success since something last happened.
    idle: u64,
}

impl Stream {
    /// Something happened that a thread may have waited for.
    pub(crate) fn progress(&mut self) {
        self.idle = 0;
    }
}

impl<'m> Machine<'m> {
    /// A launch whose counts start at `base`.
    pub(crate) fn new(
        setup: &'m Setup<'m>,
        memory: &'m mut Memory,
        random: Random,
        base: u32,
    ) -> Self {
        let threads = setup.threads as usize;
        let warps = threads.div_ceil(32);
        let clock = Clock::new(1, base);
        Self {
            setup,
            memory,
            random,
            turns: vec![base],
            block: [0; 3],
            shared: Shared::new(setup.shared),
            threads: (0..threads)
                .map(|_| Thread::new(Rc::clone(&clock)))
                .collect(),
            warps: (0..warps).map(|_| Warp::default()).collect(),
            current: 0,
            live: 0,
            stream: Stream::default(),
            gates: Default::default(),
            mbarriers: BTreeMap::new(),
            copies: Copies::default(),
            fences: vec![Vec::new(); threads],
            init_fences: vec![Vec::new(); threads],
            device_fences: vec![Vec::new(); threads],
            published: HashMap::new(),
            joiner: Joiner::default(),
            fault: None,
        }
    }

    /// The first count that nobody has used.
    pub(crate) fn next_count(&self) -> u32 {
        let threads = self.threads.iter().map(|thread| thread.timestamp.now);
        let wgmmas = self.threads.iter().map(|thread| thread.wgmma.count());
        let last = threads.chain(wgmmas).chain(self.copies.counts()).max();
        last.map_or(1, |last| last + 1)
    }

    /// Makes everything ready for a block; its threads are queued by [`Machine::wake`] after.
    pub(crate) fn start(&mut self, block: [u32; 3], first: bool) {
        if !first {
            let base = self.next_count();
            self.turns.push(base);
        }
        let base = self.base();
        let agents = self.threads.len() + self.warps.len() + Copies::SLOTS;
        let clock = Clock::new(agents, base);
        self.joiner.clear();
        for (who, thread) in self.threads.iter_mut().enumerate() {
            *thread = Thread::new(Rc::clone(&clock));
            thread.timestamp.who = who as Agent;
            thread.timestamp.now = base;
            thread.wgmma.start(base);
        }
        self.warps.fill_with(Warp::default);
        self.gates = Default::default();
        self.mbarriers.clear();
        self.copies
            .start((self.threads.len() + self.warps.len()) as Agent, base);
        self.fences.iter_mut().for_each(Vec::clear);
        self.init_fences.iter_mut().for_each(Vec::clear);
        self.stream = Stream::default();
        self.live = self.setup.threads;
        self.block = block;
        self.shared.clear();
        let shared = &self.shared;
        self.published
            .retain(|&address, _| shared.offset(address).is_none());
        for (lane, warp) in self.warps.iter_mut().enumerate() {
            warp.live = (self.setup.threads - 32 * lane as u32).min(32);
        }
    }

    /// The first count of the running block.
    fn base(&self) -> u32 {
        *self.turns.last().expect("one from the start")
    }

    // ---- Who runs ----

    /// Lets a thread run, at once or a little later, so that code that relies on an order which
    /// nothing enforces meets the other order.
    pub(crate) fn wake(&mut self, thread: usize) {
        self.threads[thread].state = State::Queued;
        self.stream.progress();
        if self.random.one_in(8) {
            self.sleep(thread);
        } else {
            self.stream.ready.push(thread as u16);
        }
    }

    fn sleep(&mut self, thread: usize) {
        let steps = 1 + self.random.below(2 * self.threads.len());
        let until = self.stream.step + steps as u64;
        self.stream.asleep.push(Reverse((until, thread as u16)));
    }

    /// The running thread lets others go first, perhaps; one that waits already does so.
    pub(crate) fn pause(&mut self, one_in: usize) {
        if self.threads[self.current].state == State::Running && self.random.one_in(one_in) {
            self.threads[self.current].state = State::Queued;
            self.sleep(self.current);
        }
    }

    /// The running thread asked in vain and will ask again.
    pub(crate) fn poll_again(&mut self) {
        self.stream.idle += 1;
        self.threads[self.current].state = State::Queued;
        self.sleep(self.current);
    }

    pub(crate) fn wait(&mut self, wait: Wait, site: u32) {
        self.threads[self.current].state = State::Waiting(wait, site);
    }

    /// Whether the running thread has to give way.
    pub(crate) fn stopped(&self) -> bool {
        self.fault.is_some() || self.threads[self.current].state != State::Running
    }

    /// Chooses the next thread and completes copies on the way; `None` when all are done, or all
    /// wait for each other, which is a fault.
    pub(crate) fn choose(&mut self) -> Option<usize> {
        if self.fault.is_some() || self.live == 0 {
            return None;
        }
        loop {
            self.stream.step += 1;
            let step = self.stream.step;
            let stream = &mut self.stream;
            while let Some(&Reverse((until, thread))) = stream.asleep.peek()
                && until <= step
            {
                stream.asleep.pop();
                stream.ready.push(thread);
            }
            let nobody = stream.ready.is_empty();
            if self.copies.any() && (nobody || self.random.one_in(16)) {
                if let Err(fault) = self.complete_one() {
                    self.fault = Some(fault);
                    return None;
                }
                continue;
            }
            if self.stream.idle > 1000 * self.threads.len() as u64 + 10_000 {
                self.fault =
                    Some(self.deadlock("threads ask again and again for what does not come"));
                return None;
            }
            if nobody {
                let Some(&Reverse((next, _))) = self.stream.asleep.peek() else {
                    self.fault = Some(self.deadlock("every thread waits"));
                    return None;
                };
                self.stream.step = next - 1;
                continue;
            }
            let index = self.random.below(self.stream.ready.len());
            let thread = usize::from(self.stream.ready.swap_remove(index));
            self.threads[thread].state = State::Running;
            self.current = thread;
            return Some(thread);
        }
    }

    /// The running thread returned from the kernel.
    pub(crate) fn exit(&mut self) -> Result<(), Fault> {
        self.check_nothing_in_flight()?;
        self.threads[self.current].state = State::Done;
        self.stream.progress();
        self.live -= 1;
        self.warps[self.current / 32].live -= 1;
        self.exit_gates()
    }

    /// All threads have returned.
    pub(crate) fn finish(&mut self) -> Result<(), Fault> {
        if let Some(copy) = self.copies.first() {
            let what = "the block ended while a bulk copy into its shared memory was in flight; nobody \
                        waited on its mbarrier";
            return Err(self.fault_of(copy.issuer, Kind::InFlight, copy.site, what));
        }
        Ok(())
    }
}

impl Thread {
    fn new(clock: Rc<Clock>) -> Self {
        Self {
            timestamp: Timestamp {
                who: 0,
                now: 0,
                clock,
            },
            state: State::Queued,
            stack: 0..0,
            result: 0,
            cp_open: Vec::new(),
            cp_groups: VecDeque::new(),
            bulk_open: Group::default(),
            bulk_groups: VecDeque::new(),
            wgmma: Wgmma::default(),
            fence: None,
            device_fence: None,
            seen: Vec::new(),
        }
    }
}
