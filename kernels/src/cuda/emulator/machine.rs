//! [`Machine`]: one launch of a kernel; its running block, who is where in it, and what is wrong.
//!
//! Blocks run one at a time. A thread calls the methods here (through `abi`) between its own
//! instructions; a method never waits, it puts the thread to [`State::Waiting`] and whoever makes
//! the awaited thing come true wakes it. The model's other parts are further methods: `sync`
//! (barriers and collectives of warps), `copies` (asynchronous copies and mbarriers), `tensor_core`.
#![expect(
    unsafe_code,
    reason = "the block's shared memory is read and written by kernels compiled as C++, so it is owned \
              as a raw allocation; it is accessed here in ranges checked to lie inside, while no \
              other code runs: fibers of one block share one thread"
)]

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::fmt::Write as _;
use std::ops::Range;
use std::rc::Rc;

use crate::cuda::emulator::clock::{Agent, Clock, Foreign, Joiner, Moment};
use crate::cuda::emulator::compile::Library;
use crate::cuda::emulator::copies::{Copies, CpAsync, Group, Mbarrier};
use crate::cuda::emulator::fault::{Fault, Kind};
use crate::cuda::emulator::memory::Memory;
use crate::cuda::emulator::random::Random;
use crate::cuda::emulator::shadow::{Access, Conflict, Fences, Previous, Shadow, View};
use crate::cuda::emulator::sync::{Collective, Gate, Warp};
use crate::cuda::emulator::tensor_core::Wgmma;

/// What is launched.
pub(super) struct Setup<'a> {
    pub(super) entry: &'a str,
    pub(super) library: &'a Library,
    pub(super) blocks: [u32; 3],
    pub(super) threads: u32,
    pub(super) shared: usize,
    /// Arguments that are addresses, by their number.
    pub(super) addresses: Vec<(usize, u64)>,
    /// What the dice were thrown from, for reports.
    pub(super) seed: u64,
}

/// A launch.
pub(super) struct Machine<'m> {
    pub(super) setup: &'m Setup<'m>,
    pub(super) memory: &'m mut Memory,
    pub(super) random: Random,
    /// The first count of every block so far, the running one last.
    turns: Vec<u32>,
    pub(super) block: [u32; 3],
    pub(super) shared: Shared,
    pub(super) threads: Vec<Thread>,
    pub(super) warps: Vec<Warp>,
    pub(super) current: usize,
    pub(super) live: u32,
    pub(super) queue: Queue,
    /// `__syncthreads`, then the named barriers.
    pub(super) gates: [Gate; 16],
    pub(super) mbarriers: BTreeMap<u32, Mbarrier>,
    pub(super) copies: Copies,
    /// Counts at which each thread called `fence_async`, and `mbar_fence_init`.
    pub(super) fences: Vec<Vec<u32>>,
    pub(super) init_fences: Vec<Vec<u32>>,
    /// The same of `fence_async_global`, over all blocks so far.
    device_fences: Vec<Vec<u32>>,
    /// What was told to whoever reads an address by atomics.
    published: HashMap<u64, Vec<Foreign>>,
    pub(super) joiner: Joiner,
    pub(super) fault: Option<Fault>,
}

/// A thread of the block.
pub(super) struct Thread {
    pub(super) moment: Moment,
    pub(super) state: State,
    /// Addresses of its stack.
    pub(super) stack: Range<u64>,
    /// What a collective gave it.
    pub(super) result: u32,
    pub(super) cp_open: Vec<CpAsync>,
    pub(super) cp_groups: VecDeque<Vec<CpAsync>>,
    pub(super) bulk_open: Group,
    pub(super) bulk_groups: VecDeque<Group>,
    pub(super) wgmma: Wgmma,
    /// What it knew at its last `thread_fence`.
    fence: Option<Moment>,
    /// What it knew at its last `fence_async_global`, and what it had done.
    pub(super) device_fence: Option<Rc<Clock>>,
    /// Addresses it read by atomics since, and how many moments were published there.
    seen: Vec<(u64, usize)>,
}

/// An asynchronous operation, as it touches memory.
pub(super) struct Operation<'a> {
    /// The thread that started it.
    pub(super) issuer: usize,
    pub(super) moment: &'a Moment,
    /// [`Thread::device_fence`] of that thread when it did.
    pub(super) device_fence: Option<&'a Clock>,
    pub(super) site: u32,
}

/// What a thread is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Running,
    Queued,
    Waiting(Wait, u32),
    Done,
}

/// What a thread waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    Gate(u32),
    Collective(Collective),
    Mbarrier { at: u32, parity: u32 },
    Bulk,
}

/// Who runs next.
#[derive(Default)]
pub(super) struct Queue {
    ready: Vec<u16>,
    /// Threads held back, and until which step.
    asleep: BinaryHeap<Reverse<(u64, u16)>>,
    step: u64,
    /// Polls without success since something last happened.
    idle: u64,
}

/// Shared memory of the running block.
pub(super) struct Shared {
    base: *mut u8,
    layout: Layout,
    pub(super) bytes: usize,
    shadow: Shadow,
}

impl Queue {
    /// Something happened that a thread may have waited for.
    pub(super) fn progress(&mut self) {
        self.idle = 0;
    }
}

impl Shared {
    /// Alignment, and bytes behind that belong to nobody.
    const ALIGNMENT: usize = 1024;

    fn new(bytes: usize) -> Self {
        let room = (bytes + Self::ALIGNMENT).next_multiple_of(Self::ALIGNMENT);
        let layout = Layout::from_size_align(room, Self::ALIGNMENT).expect("a small size");
        // SAFETY: the size is not zero.
        let base = unsafe { alloc(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        Self {
            base,
            layout,
            bytes,
            shadow: Shadow::new(bytes),
        }
    }

    /// Undefined contents: NaN where a check should miss a read.
    fn clear(&mut self) {
        // SAFETY: all of the allocation.
        unsafe { self.base.write_bytes(0xff, self.layout.size()) };
        self.shadow.set_written(0, self.bytes, false);
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.base
    }

    /// The offset of an address in it, or in the gap behind it.
    pub(super) fn offset(&self, address: u64) -> Option<usize> {
        let offset = address.wrapping_sub(self.base as u64) as usize;
        (offset < self.layout.size()).then_some(offset)
    }

    /// Sixteen bytes.
    pub(super) fn chunk(&self, offset: u32) -> [u8; 16] {
        let offset = offset as usize;
        assert!(offset + 16 <= self.bytes, "checked when it was accessed");
        // SAFETY: inside the allocation, initialized when the block started.
        unsafe { self.base.add(offset).cast::<[u8; 16]>().read_unaligned() }
    }

    pub(super) fn set_chunk(&mut self, offset: u32, chunk: [u8; 16]) {
        let offset = offset as usize;
        assert!(offset + 16 <= self.bytes, "checked when it was accessed");
        // SAFETY: inside the allocation.
        unsafe {
            self.base
                .add(offset)
                .cast::<[u8; 16]>()
                .write_unaligned(chunk);
        };
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.base, self.layout) };
    }
}

impl<'m> Machine<'m> {
    /// A launch whose counts start at `base`.
    pub(super) fn new(
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
            queue: Queue::default(),
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
    pub(super) fn next_count(&self) -> u32 {
        let threads = self.threads.iter().map(|thread| thread.moment.now);
        let wgmmas = self.threads.iter().map(|thread| thread.wgmma.count());
        let last = threads.chain(wgmmas).chain(self.copies.counts()).max();
        last.map_or(1, |last| last + 1)
    }

    /// Makes everything ready for a block; its threads are queued by [`Machine::wake`] after.
    pub(super) fn start(&mut self, block: [u32; 3], first: bool) {
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
            thread.moment.who = who as Agent;
            thread.moment.now = base;
            thread.wgmma.start(base);
        }
        self.warps.fill_with(Warp::default);
        self.gates = Default::default();
        self.mbarriers.clear();
        self.copies
            .start((self.threads.len() + self.warps.len()) as Agent, base);
        self.fences.iter_mut().for_each(Vec::clear);
        self.init_fences.iter_mut().for_each(Vec::clear);
        self.queue = Queue::default();
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
    pub(super) fn wake(&mut self, thread: usize) {
        self.threads[thread].state = State::Queued;
        self.queue.idle = 0;
        if self.random.one_in(8) {
            self.sleep(thread);
        } else {
            self.queue.ready.push(thread as u16);
        }
    }

    fn sleep(&mut self, thread: usize) {
        let steps = 1 + self.random.below(2 * self.threads.len());
        let until = self.queue.step + steps as u64;
        self.queue.asleep.push(Reverse((until, thread as u16)));
    }

    /// The running thread lets others go first, perhaps; one that waits already does so.
    pub(super) fn pause(&mut self, one_in: usize) {
        if self.threads[self.current].state == State::Running && self.random.one_in(one_in) {
            self.threads[self.current].state = State::Queued;
            self.sleep(self.current);
        }
    }

    /// The running thread asked in vain and will ask again.
    pub(super) fn poll_again(&mut self) {
        self.queue.idle += 1;
        self.threads[self.current].state = State::Queued;
        self.sleep(self.current);
    }

    pub(super) fn wait(&mut self, wait: Wait, site: u32) {
        self.threads[self.current].state = State::Waiting(wait, site);
    }

    /// Whether the running thread has to give way.
    pub(super) fn stopped(&self) -> bool {
        self.fault.is_some() || self.threads[self.current].state != State::Running
    }

    /// Chooses the next thread and completes copies on the way; `None` when all are done, or all
    /// wait for each other, which is a fault.
    pub(super) fn choose(&mut self) -> Option<usize> {
        if self.fault.is_some() || self.live == 0 {
            return None;
        }
        loop {
            self.queue.step += 1;
            let step = self.queue.step;
            let queue = &mut self.queue;
            while let Some(&Reverse((until, thread))) = queue.asleep.peek()
                && until <= step
            {
                queue.asleep.pop();
                queue.ready.push(thread);
            }
            let nobody = queue.ready.is_empty();
            if self.copies.any() && (nobody || self.random.one_in(16)) {
                if let Err(fault) = self.complete_one() {
                    self.fault = Some(fault);
                    return None;
                }
                continue;
            }
            if self.queue.idle > 1000 * self.threads.len() as u64 + 10_000 {
                self.fault =
                    Some(self.deadlock("threads ask again and again for what does not come"));
                return None;
            }
            if nobody {
                let Some(&Reverse((next, _))) = self.queue.asleep.peek() else {
                    self.fault = Some(self.deadlock("every thread waits"));
                    return None;
                };
                self.queue.step = next - 1;
                continue;
            }
            let index = self.random.below(self.queue.ready.len());
            let thread = usize::from(self.queue.ready.swap_remove(index));
            self.threads[thread].state = State::Running;
            self.current = thread;
            return Some(thread);
        }
    }

    /// The running thread returned from the kernel.
    pub(super) fn exit(&mut self) -> Result<(), Fault> {
        self.check_nothing_in_flight()?;
        self.threads[self.current].state = State::Done;
        self.queue.idle = 0;
        self.live -= 1;
        self.warps[self.current / 32].live -= 1;
        self.exit_gates()
    }

    /// All threads have returned.
    pub(super) fn finish(&mut self) -> Result<(), Fault> {
        if let Some(copy) = self.copies.first() {
            let what = "the block ended while a bulk copy into its shared memory was in flight; nobody \
                        waited on its mbarrier";
            return Err(self.fault_of(copy.issuer, Kind::InFlight, copy.site, what));
        }
        Ok(())
    }

    fn deadlock(&self, why: &str) -> Fault {
        let mut waits: Vec<(State, Vec<usize>)> = Vec::new();
        for (number, thread) in self.threads.iter().enumerate() {
            if thread.state == State::Done {
                continue;
            }
            match waits.iter_mut().find(|(state, _)| *state == thread.state) {
                Some((_, threads)) => threads.push(number),
                None => waits.push((thread.state, vec![number])),
            }
        }
        let mut text = format!("{}: {why}", self.place(None));
        for (state, threads) in waits.iter().take(8) {
            let (what, site) = match state {
                State::Waiting(wait, site) => (self.describe_wait(wait), Some(*site)),
                _ => ("a loop that asks an mbarrier or an atomic".to_owned(), None),
            };
            let line = site.map_or(String::new(), |site| self.line(site));
            let _ = write!(text, "\n  {} in {what}{line}", ranges(threads));
        }
        Fault {
            kind: Kind::Deadlock,
            detail: text,
        }
    }

    fn describe_wait(&self, wait: &Wait) -> String {
        match wait {
            Wait::Gate(0) => "__syncthreads".to_owned(),
            Wait::Gate(id) => {
                let gate = &self.gates[*id as usize];
                format!(
                    "named_sync({id}, {}), {} arrived",
                    gate.expected, gate.arrived
                )
            }
            Wait::Collective(what) => what.to_string(),
            Wait::Mbarrier { at, parity } => {
                let state = self
                    .mbarriers
                    .get(at)
                    .map_or(String::new(), ToString::to_string);
                format!("mbar_wait of shared memory + {at}, parity {parity}: {state}")
            }
            Wait::Bulk => "bulk_wait".to_owned(),
        }
    }

    // ---- What is wrong ----

    /// Kernel, block, thread and line.
    fn place(&self, thread: Option<usize>) -> String {
        let [x, y, z] = self.block;
        let thread = thread.map_or(String::new(), |thread| format!(", thread {thread}"));
        format!(
            "{}, block ({x}, {y}, {z}){thread}, MOEFOLD_SEED={}",
            self.setup.entry, self.setup.seed
        )
    }

    fn line(&self, site: u32) -> String {
        let line = self.setup.library.line(site);
        line.map_or(String::new(), |line| format!(" ({line})"))
    }

    /// A fault of the running thread.
    pub(super) fn fault(&self, kind: Kind, site: u32, what: impl AsRef<str>) -> Fault {
        self.fault_of(self.current, kind, site, what)
    }

    pub(super) fn fault_of(
        &self,
        thread: usize,
        kind: Kind,
        site: u32,
        what: impl AsRef<str>,
    ) -> Fault {
        let (place, line) = (self.place(Some(thread)), self.line(site));
        Fault {
            kind,
            detail: format!("{place}{line}: {}", what.as_ref()),
        }
    }

    fn describe_agent(&self, agent: Agent) -> String {
        let agent = usize::from(agent);
        let threads = self.threads.len();
        if agent < threads {
            format!("thread {agent}")
        } else if agent < threads + self.warps.len() {
            format!("the wgmma of warp {}", agent - threads)
        } else {
            "a bulk copy".to_owned()
        }
    }

    /// An address as whoever reads the report knows it.
    pub(super) fn describe_address(&self, address: u64) -> String {
        if let Some(offset) = self.shared.offset(address) {
            return format!("shared memory + {offset} (of {} bytes)", self.shared.bytes);
        }
        if let Some(owner) = self.threads.iter().position(|t| t.stack.contains(&address)) {
            return format!("a local variable of thread {owner}");
        }
        if let Some((start, bytes)) = self.memory.nearest(address) {
            let arguments = self.setup.addresses.iter();
            let inside = |(_, a): &&(usize, u64)| (start..=start + bytes as u64).contains(a);
            let arguments: Vec<_> = arguments
                .filter(inside)
                .map(|(i, _)| i.to_string())
                .collect();
            let offset = address - start;
            if arguments.is_empty() {
                return format!(
                    "byte {offset} of an allocation of {bytes} bytes that is no argument"
                );
            }
            let arguments = arguments.join(" and ");
            return format!("byte {offset} of the {bytes} that argument {arguments} points to");
        }
        format!("{address:#x}, in no allocation")
    }

    // ---- Memory ----

    /// A plain access of the running thread.
    pub(super) fn touch(
        &mut self,
        address: u64,
        bytes: usize,
        alignment: u64,
        access: Access,
        site: u32,
    ) -> Result<(), Fault> {
        let thread = &self.threads[self.current];
        if thread.stack.contains(&address) {
            return if thread.wgmma.watches() {
                self.touch_registers(address, bytes, site)
            } else {
                Ok(())
            };
        }
        if alignment > 1 && !address.is_multiple_of(alignment) {
            return self.misaligned(address, alignment, site);
        }
        if access == Access::Read && self.setup.library.contains(address) {
            return Ok(());
        }
        self.access_as(self.current, address, bytes, access, site)
    }

    /// The running thread follows a pointer whose type asks for more.
    pub(super) fn misaligned<R>(
        &self,
        address: u64,
        alignment: u64,
        site: u32,
    ) -> Result<R, Fault> {
        let place = self.describe_address(address);
        let what = format!("an access at {place}, which is no multiple of {alignment}");
        Err(self.fault(Kind::Misaligned, site, what))
    }

    /// An access of a thread.
    pub(super) fn access_as(
        &mut self,
        thread: usize,
        address: u64,
        bytes: usize,
        access: Access,
        site: u32,
    ) -> Result<(), Fault> {
        self.check_shared(thread, address, bytes, access, site)?;
        let by = &self.threads[thread];
        let view = View {
            who: by.moment.who,
            now: by.moment.now,
            clock: &by.moment.clock,
            turns: &self.turns,
            fences: None,
            site,
            coin: self.random.next() & 1 == 1,
        };
        let outcome = checked(&mut self.shared, self.memory, address, bytes, access, &view);
        outcome.map_err(|wrong| {
            self.explain(wrong, thread, thread as Agent, address, bytes, access, site)
        })?;
        Ok(())
    }

    /// An access of an asynchronous operation.
    pub(super) fn access_async(
        &mut self,
        operation: &Operation<'_>,
        address: u64,
        bytes: usize,
        access: Access,
    ) -> Result<(), Fault> {
        let Operation {
            issuer,
            moment,
            device_fence,
            site,
        } = *operation;
        let fences = if self.shared.offset(address).is_some() {
            Fences::Shared(&self.fences)
        } else {
            Fences::Device(&self.device_fences, device_fence)
        };
        let view = View {
            who: moment.who,
            now: moment.now,
            clock: &moment.clock,
            turns: &self.turns,
            fences: Some(fences),
            site,
            coin: self.random.next() & 1 == 1,
        };
        let outcome = checked(&mut self.shared, self.memory, address, bytes, access, &view);
        outcome
            .map_err(|wrong| self.explain(wrong, issuer, moment.who, address, bytes, access, site))
    }

    #[expect(clippy::too_many_arguments, reason = "a report has this many sides")]
    fn explain(
        &self,
        wrong: Option<(usize, Conflict)>,
        thread: usize,
        agent: Agent,
        address: u64,
        bytes: usize,
        access: Access,
        site: u32,
    ) -> Fault {
        let verb = match access {
            Access::Read => "reads",
            Access::Write => "writes",
            Access::Atomic => "atomically changes",
            Access::AtomicRead => "atomically reads",
            Access::AtomicWrite => "atomically writes",
        };
        let who = if agent as usize == thread {
            String::new()
        } else {
            format!("{} ", self.describe_agent(agent))
        };
        let Some((at, conflict)) = wrong else {
            let place = self.describe_address(address);
            let what = format!("{who}{verb} {bytes} bytes at {place}, out of bounds");
            return self.fault_of(thread, Kind::OutOfBounds, site, what);
        };
        let place = self.describe_address(at as u64);
        let head = format!("{who}{verb} {bytes} bytes, and at {place}");
        let previous = |p: Previous| {
            let who = self.describe_agent(p.who);
            let verb = if p.wrote { "written" } else { "read" };
            let line = p.site.map_or(String::new(), |site| self.line(site));
            let block = if p.elsewhere { " of another block" } else { "" };
            format!("{verb} by {who}{block}{line}")
        };
        let (kind, rest) = match conflict {
            Conflict::Uninitialized => (Kind::Uninitialized, "nothing was ever written".to_owned()),
            Conflict::Race(p) => {
                let remedy = if p.elsewhere {
                    "nothing orders the two: blocks of a launch are ordered by thread_fence and an \
                     atomic on one side, an atomic and thread_fence on the other"
                } else {
                    "nothing orders the two"
                };
                (Kind::Race, format!("it was {}; {remedy}", previous(p)))
            }
            Conflict::Unfenced(p) => {
                let remedy = if self.shared.offset(at as u64).is_some() {
                    "fence_async between that write and the barrier that let this copy or wgmma start"
                } else {
                    "fence_async_global between that write and the start of this copy, by one of the \
                     two threads"
                };
                let what = format!("it was {} without {remedy}", previous(p));
                (Kind::Unfenced, what)
            }
        };
        self.fault_of(thread, kind, site, format!("{head} {rest}"))
    }

    // ---- Atomics and fences of global memory ----

    /// `kind` as numbered in the prelude; gives the value before.
    pub(super) fn atomic(
        &mut self,
        kind: u32,
        address: u64,
        value: u32,
        expected: u32,
        site: u32,
    ) -> Result<u32, Fault> {
        if !address.is_multiple_of(4) {
            let place = self.describe_address(address);
            return Err(self.fault(Kind::Misaligned, site, format!("an atomic at {place}")));
        }
        self.access_as(self.current, address, 4, Access::Atomic, site)?;
        let word = address as *mut u32;
        // SAFETY: aligned, and inside a live allocation, as the access found.
        let before = unsafe { word.read() };
        let after = match kind {
            0 => before.wrapping_add(value),
            1 => (f32::from_bits(before) + f32::from_bits(value)).to_bits(),
            2 => (before as i32).max(value as i32) as u32,
            3 => before.max(value),
            4 => value,
            _ if before == expected => value,
            _ => before,
        };
        // SAFETY: as above.
        unsafe { word.write(after) };
        if let Some(moment) = self.threads[self.current].fence.clone() {
            self.publish(address, moment);
        }
        let published = self.published.get(&address).map_or(0, Vec::len);
        self.threads[self.current].seen.push((address, published));
        self.queue.idle = 0;
        self.pause(4);
        Ok(before)
    }

    pub(super) fn load_acquire(&mut self, address: u64, site: u32) -> Result<u32, Fault> {
        self.access_as(self.current, address, 4, Access::AtomicRead, site)?;
        // SAFETY: inside a live allocation, as the access found.
        let value = unsafe { (address as *const u32).read_unaligned() };
        let published = self.published.get(&address).map_or(0, Vec::len);
        self.acquire(address, published);
        self.poll_again();
        Ok(value)
    }

    pub(super) fn store_release(
        &mut self,
        address: u64,
        value: u32,
        site: u32,
    ) -> Result<(), Fault> {
        self.access_as(self.current, address, 4, Access::AtomicWrite, site)?;
        // SAFETY: inside a live allocation, as the access found.
        unsafe { (address as *mut u32).write_unaligned(value) };
        let moment = self.threads[self.current].moment.clone();
        self.publish(address, moment);
        self.threads[self.current].moment.tick();
        self.queue.idle = 0;
        self.pause(4);
        Ok(())
    }

    /// A fence before an atomic publishes what came before it; one after an atomic takes in what was
    /// published there.
    pub(super) fn thread_fence(&mut self) {
        for (address, published) in std::mem::take(&mut self.threads[self.current].seen) {
            self.acquire(address, published);
        }
        let thread = &mut self.threads[self.current];
        thread.fence = Some(thread.moment.clone());
        thread.moment.tick();
    }

    fn publish(&mut self, address: u64, moment: Moment) {
        let turn = self.turns.len() - 1;
        let all = self.published.entry(address).or_default();
        let foreign = Foreign { turn, moment };
        if all.last() != Some(&foreign) {
            all.push(foreign);
        }
    }

    fn acquire(&mut self, address: u64, published: usize) {
        let Some(all) = self.published.get(&address) else {
            return;
        };
        let turn = self.turns.len() - 1;
        let (here, elsewhere): (Vec<_>, Vec<_>) = all[..published]
            .iter()
            .cloned()
            .partition(|foreign| foreign.turn == turn);
        let mut clock = Rc::clone(&self.threads[self.current].moment.clock);
        for Foreign { moment, .. } in here {
            clock = self.joiner.join(&clock, &moment.clock);
            clock = clock.with(&[(moment.who, moment.now)]);
        }
        if !elsewhere.is_empty() {
            clock = clock.with_foreign(&elsewhere.into());
        }
        self.threads[self.current].moment.clock = clock;
    }

    pub(super) fn fence_async(&mut self) {
        let moment = &mut self.threads[self.current].moment;
        self.fences[self.current].push(moment.now);
        moment.tick();
    }

    pub(super) fn fence_async_global(&mut self) {
        let thread = &mut self.threads[self.current];
        let moment = &mut thread.moment;
        thread.device_fence = Some(moment.clock.with(&[(moment.who, moment.now)]));
        self.device_fences[self.current].push(moment.now);
        moment.tick();
    }

    pub(super) fn mbar_fence_init(&mut self) {
        let now = self.threads[self.current].moment.now;
        self.init_fences[self.current].push(now);
    }
}

/// Checks an access in the shadow of whatever the address is in; `Err(None)` when it is in nothing.
/// Conflicts are given with their address.
fn checked(
    shared: &mut Shared,
    memory: &mut Memory,
    address: u64,
    bytes: usize,
    access: Access,
    view: &View<'_>,
) -> Result<(), Option<(usize, Conflict)>> {
    let (shadow, offset, view) = if let Some(offset) = shared.offset(address) {
        if offset + bytes > shared.bytes {
            return Err(None);
        }
        // What earlier blocks did with it is of no concern.
        let turns = &view.turns[view.turns.len() - 1..];
        (&mut shared.shadow, offset, View { turns, ..*view })
    } else {
        let (allocation, offset) = memory.find(address, bytes).ok_or(None)?;
        (&mut allocation.shadow, offset, View { ..*view })
    };
    shadow
        .access(offset, bytes, access, &view)
        .map_err(|(at, conflict)| Some((at - offset + address as usize, conflict)))
}

impl Thread {
    fn new(clock: Rc<Clock>) -> Self {
        Self {
            moment: Moment {
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

/// Numbers as ranges: `threads 0-127, 130`.
fn ranges(numbers: &[usize]) -> String {
    let mut all: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match all.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => all.push((number, number)),
        }
    }
    let shown = all.iter().take(6).map(|&(first, last)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    });
    let more = if all.len() > 6 { ", and others" } else { "" };
    format!("threads {}{more}", shown.collect::<Vec<_>>().join(", "))
}
