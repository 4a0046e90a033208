//! Shadow memory: for every two bytes, who last wrote them and who read them since.
//!
//! A conflict is two accesses to a byte, one of them a write and not both atomic, with nothing that
//! orders them. Of the readers since the last write two are kept (a third takes the place of one at
//! random), so a race with one reader among many can go unseen in a run; none is ever invented.

use std::ops::Range;

use crate::clock::{Agent, Clock};
use crate::history::Use;

/// The state of two bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
struct Cell {
    write: Touch,
    reads: [Touch; 2],
    /// Where in the kernel the write was.
    site: u32,
}

/// One access: the agent's count, and the agent with what the access was. A count of 0 is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C, packed(2))]
struct Touch {
    when: u32,
    tag: u16,
}

impl Touch {
    const AGENT: u16 = 0x0fff;
    const ATOMIC: u16 = 0x1000;
    /// Bits 14 and 15: which of the two bytes.
    const BYTES: u16 = 14;

    fn who(self) -> Agent {
        self.tag & Self::AGENT
    }

    /// Whether it counts against an access to `bytes`, atomic or not, by its own nature.
    fn meets(self, bytes: u16, atomic: bool) -> bool {
        self.when != 0
            && self.tag >> Self::BYTES & bytes != 0
            && !(atomic && self.tag & Self::ATOMIC != 0)
    }
}

/// Most agents a block may have.
pub(crate) const AGENTS_MAX: usize = Touch::AGENT as usize;

/// What an access does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    /// Both, indivisibly.
    Atomic,
    /// A load that is ordered with atomics.
    AtomicRead,
    /// A store that is.
    AtomicWrite,
}

/// Who accesses, and what it knows.
pub(crate) struct View<'a> {
    pub(crate) who: Agent,
    pub(crate) now: u32,
    pub(crate) clock: &'a Clock,
    /// The first count of every block of this launch so far, the running one last. Shared memory
    /// knows the running block only.
    pub(crate) turns: &'a [u32],
    /// For an access by the asynchronous proxy.
    pub(crate) fences: Option<Fences<'a>>,
    /// Where in the kernel.
    pub(crate) site: u32,
    /// A random bit.
    pub(crate) coin: bool,
}

/// What lets the asynchronous proxy see plain writes.
#[derive(Clone, Copy)]
pub(crate) enum Fences<'a> {
    /// Shared memory: the counts at which each thread fenced.
    Shared(&'a [Vec<u32>]),
    /// Device memory: the same, over all blocks of this launch, and what the thread that started the
    /// operation had learned when it last fenced before.
    Device(&'a [Vec<u32>], Option<&'a Clock>),
}

impl<'a> Fences<'a> {
    fn of_threads(self) -> &'a [Vec<u32>] {
        let (Self::Shared(fences) | Self::Device(fences, _)) = self;
        fences
    }
}

impl Access {
    pub(crate) fn writes(self) -> bool {
        !matches!(self, Self::Read | Self::AtomicRead)
    }
}

impl View<'_> {
    fn block(&self) -> u32 {
        *self.turns.last().expect("a block runs")
    }

    fn ordered(&self, touch: Touch) -> bool {
        let (who, when) = (touch.who(), touch.when);
        if when >= self.block() {
            // Copies of one slot follow each other only as far as they know of each other.
            let own = who == self.who && (usize::from(who) < self.threads() || when == self.now);
            if own {
                return true;
            }
        }
        self.known(self.clock, who, when)
    }

    /// Whether a clock of the running block knows of an agent's count, in this block or another.
    fn known(&self, clock: &Clock, who: Agent, when: u32) -> bool {
        if when >= self.block() {
            clock.known(who) >= when
        } else {
            when < self.turns[0] || clock.knows_foreign(self.turn(when), who, when)
        }
    }

    /// The block of a count, of this launch.
    fn turn(&self, when: u32) -> usize {
        self.turns.partition_point(|&start| start <= when) - 1
    }

    fn threads(&self) -> usize {
        self.fences
            .map_or(AGENTS_MAX, |fences| fences.of_threads().len())
    }

    /// Whether the asynchronous proxy sees this write: one of its own, one fenced by its thread with
    /// the fence known, or, in device memory, one known when the operation's own thread fenced.
    fn fenced(&self, write: Touch) -> bool {
        let (who, when) = (write.who(), write.when);
        let Some(fences) = self.fences else {
            return true;
        };
        let Some(of_writer) = fences.of_threads().get(usize::from(who)) else {
            return true;
        };
        if when < self.turns[0] {
            return true;
        }
        if let Fences::Device(_, Some(then)) = fences
            && self.known(then, who, when)
        {
            return true;
        }
        let next = of_writer.partition_point(|&fence| fence < when);
        of_writer.get(next).is_some_and(|&fence| {
            self.turn(fence) == self.turn(when) && self.known(self.clock, who, fence)
        })
    }
}

/// What is wrong with an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Conflict {
    /// Nothing orders it with an access before.
    Race(Previous),
    /// A plain write before it is not yet visible to the asynchronous proxy.
    Unfenced(Previous),
    /// Never written since it was given out.
    Uninitialized,
    /// Another rank's memory, which is to be read alone.
    Adopted,
}

/// The access before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Previous {
    pub(crate) who: Agent,
    pub(crate) wrote: bool,
    /// Where in the kernel, known of writes.
    pub(crate) site: Option<u32>,
    /// Whether that was in another block.
    pub(crate) elsewhere: bool,
}

/// The shadow of a range of memory.
#[derive(Clone)]
pub(crate) struct Shadow {
    /// One every two bytes; none as long as no kernel has touched any.
    cells: Vec<Cell>,
    bytes: usize,
    /// One bit a byte: whether it was written.
    written: Vec<u64>,
    /// The same of the launch that runs: whether it has read, and whether it has written.
    used: [Vec<u64>; 2],
    /// Words of those with a bit.
    used_words: Range<usize>,
}

/// Calls `body` with the words that a range of bits is in, and its bits in each.
fn words(start: usize, count: usize, mut body: impl FnMut(usize, u64)) {
    let mut at = start;
    let end = start + count;
    while at < end {
        let (word, bit) = (at / 64, at % 64);
        let count = (64 - bit).min(end - at);
        body(word, (u64::MAX >> (64 - count)) << bit);
        at += count;
    }
}

impl Shadow {
    /// Of memory never written.
    pub(crate) fn new(bytes: usize) -> Self {
        Self {
            cells: Vec::new(),
            bytes,
            written: vec![0; bytes.div_ceil(64)],
            used: Default::default(),
            used_words: 0..0,
        }
    }

    /// Forgets who accessed, as between runs so long apart that counts start again.
    pub(crate) fn forget_accesses(&mut self) {
        self.cells.clear();
    }

    /// Says of a range that its bytes mean something, or that they do not.
    pub(crate) fn set_written(&mut self, start: usize, bytes: usize, written: bool) {
        words(start, bytes, |word, bits| {
            if written {
                self.written[word] |= bits;
            } else {
                self.written[word] &= !bits;
            }
        });
    }

    /// Notes a use by the launch that runs.
    pub(crate) fn set_used(&mut self, start: usize, bytes: usize, writes: bool) {
        let used = &mut self.used[usize::from(writes)];
        if used.is_empty() {
            used.resize(self.bytes.div_ceil(64), 0);
        }
        words(start, bytes, |word, bits| used[word] |= bits);
        let touched = start / 64..(start + bytes).div_ceil(64);
        let Range { start, end } = self.used_words;
        self.used_words = if start == end {
            touched
        } else {
            start.min(touched.start)..end.max(touched.end)
        };
    }

    /// What the launch that ran has used: what it wrote, and what it only read.
    pub(crate) fn take_used(&mut self) -> Vec<Use> {
        let mut uses: [Vec<Use>; 2] = Default::default();
        for word in std::mem::take(&mut self.used_words) {
            let mut take = |of: usize| self.used[of].get_mut(word).map_or(0, std::mem::take);
            let (reads, writes) = (take(0), take(1));
            for (mut bits, writes) in [(reads & !writes, false), (writes, true)] {
                let uses = &mut uses[usize::from(writes)];
                while bits != 0 {
                    let from = bits.trailing_zeros();
                    let count = (!(bits >> from)).trailing_zeros().min(64 - from);
                    let start = 64 * word + from as usize;
                    let range = start..start + count as usize;
                    bits &= !((u64::MAX >> (64 - count)) << from);
                    match uses.last_mut() {
                        Some(last) if last.range.end == start => last.range.end = range.end,
                        _ => uses.push(Use { range, writes }),
                    }
                }
            }
        }
        uses.concat()
    }

    /// As of memory of which only this range was ever written, as far as it was, and nobody touched any.
    pub(crate) fn part(&self, start: usize, bytes: usize) -> Self {
        let mut part = Self {
            written: self.written.clone(),
            ..Self::new(self.bytes)
        };
        let end = start + bytes;
        let whole = 64 * part.written.len();
        part.set_written(0, start, false);
        part.set_written(end, whole - end, false);
        part
    }

    /// What another shadow of the same memory has as written is.
    pub(crate) fn learn(&mut self, other: &Self) {
        for (word, other) in self.written.iter_mut().zip(&other.written) {
            *word |= other;
        }
    }

    /// The first byte of a range that was never written.
    fn first_unwritten(&self, start: usize, bytes: usize) -> Option<usize> {
        let mut at = start;
        let end = start + bytes;
        while at < end {
            let (word, bit) = (at / 64, at % 64);
            let count = (64 - bit).min(end - at);
            let mask = (u64::MAX >> (64 - count)) << bit;
            let missing = !self.written[word] & mask;
            if missing != 0 {
                return Some(word * 64 + missing.trailing_zeros() as usize);
            }
            at += count;
        }
        None
    }

    /// Records an access, or says what is wrong with it and at which byte.
    pub(crate) fn access(
        &mut self,
        start: usize,
        bytes: usize,
        access: Access,
        view: &View<'_>,
    ) -> Result<(), (usize, Conflict)> {
        if matches!(access, Access::Write | Access::AtomicWrite) {
            self.set_written(start, bytes, true);
        } else if let Some(at) = self.first_unwritten(start, bytes) {
            return Err((at, Conflict::Uninitialized));
        }
        if self.cells.is_empty() {
            self.cells.resize(self.bytes.div_ceil(2), Cell::default());
        }
        // Neighbours mostly have the same history, so what became of the last cell is kept.
        let mut last: Option<(Cell, u16, Cell)> = None;
        let (first, end) = (start / 2, (start + bytes).div_ceil(2));
        for (index, cell) in self.cells[first..end].iter_mut().enumerate() {
            let at = 2 * (first + index);
            let mut touched = 0b11;
            if at < start {
                touched &= 0b10;
            }
            if at + 2 > start + bytes {
                touched &= 0b01;
            }
            if let Some((before, same, after)) = last
                && before == *cell
                && same == touched
            {
                *cell = after;
                continue;
            }
            let after =
                step(*cell, touched, access, view).map_err(|conflict| (at.max(start), conflict))?;
            last = Some((*cell, touched, after));
            *cell = after;
        }
        Ok(())
    }
}

/// A cell after an access.
fn step(mut cell: Cell, bytes: u16, access: Access, view: &View<'_>) -> Result<Cell, Conflict> {
    let atomic = !matches!(access, Access::Read | Access::Write);
    let previous = |touch: Touch, site: Option<u32>| Previous {
        who: touch.who(),
        wrote: site.is_some(),
        site,
        elsewhere: touch.when < view.block(),
    };
    let write = cell.write;
    if write.meets(bytes, atomic) {
        if !view.ordered(write) {
            return Err(Conflict::Race(previous(write, Some(cell.site))));
        }
        let crosses = access == Access::Read || matches!(view.fences, Some(Fences::Device(..)));
        if crosses && !view.fenced(write) {
            return Err(Conflict::Unfenced(previous(write, Some(cell.site))));
        }
    }
    let mut tag = view.who | bytes << Touch::BYTES;
    if atomic {
        tag |= Touch::ATOMIC;
    }
    let now = Touch {
        when: view.now,
        tag,
    };
    if access.writes() {
        for read in cell.reads {
            if read.meets(bytes, atomic) && !view.ordered(read) {
                return Err(Conflict::Race(previous(read, None)));
            }
        }
        return Ok(Cell {
            write: now,
            reads: Default::default(),
            site: view.site,
        });
    }
    let reads = &mut cell.reads;
    let own = reads
        .iter()
        .position(|r| r.when >= view.block() && r.who() == view.who);
    let gone = || reads.iter().position(|r| r.when == 0 || view.ordered(*r));
    let place = own.or_else(gone).unwrap_or(usize::from(view.coin));
    reads[place] = now;
    Ok(cell)
}
