//! Global memory: allocations of the host with shadows, and what an address is in.
//!
//! Ranks of one process have an emulator each, as they have a stream each on a GPU, and read each
//! other's memory as they would there: a range that one lends ([`Memory::lend`]) the other adopts
//! ([`Memory::adopt`]). A block lives as long as anybody knows it. Whoever runs a kernel, or copies,
//! holds its own [`Gate`] alone, and together with other readers those of everybody it has adopted
//! memory of ([`Memory::gates`]). So a rank that keeps to no protocol gets wrong numbers and nothing
//! worse. Gates are entered in the order of their addresses, so nobody waits in a circle.
#![expect(
    unsafe_code,
    reason = "kernels compiled as C++ read and write this memory by address, so it is owned as raw \
              allocations; slices of it are made only of ranges checked to lie in one live allocation \
              and only while no kernel runs on this thread, nor on another that writes it (its gate)"
)]

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::fault::{Fault, Kind};
use crate::history::{Collision, History, Use};
use crate::shadow::Shadow;
use crate::streams::{Clock, Work};

/// Alignment of an allocation, and the bytes after it that belong to nobody.
const ALIGNMENT: usize = 256;

/// Who may touch the memory of one emulator now: its rank, or any number of others that read.
pub(crate) type Gate = RwLock<()>;

/// Memory of the host, given back when the last who knows it lets go.
struct Block {
    start: u64,
    layout: Layout,
    /// Of the streams of everybody who knows it.
    history: Mutex<History>,
}

/// A range of one emulator's memory that others may read.
#[derive(Clone)]
pub(crate) struct Lent {
    block: Arc<Block>,
    gate: Arc<Gate>,
    /// Bytes of the block that may be touched.
    bytes: usize,
    /// What of the range was written.
    written: Shadow,
}

/// Memory of the device.
#[derive(Default)]
pub(crate) struct Memory {
    /// Held by whoever touches what is not adopted.
    gate: Arc<Gate>,
    /// By address.
    allocations: Vec<Allocation>,
    /// The last one found.
    hint: usize,
}

/// One allocation.
pub(crate) struct Allocation {
    block: Arc<Block>,
    /// Bytes that may be touched: those of the tensor it was last given out for.
    bytes: usize,
    pub(crate) shadow: Shadow,
    /// Where it is another emulator's.
    adopted: Option<Adopted>,
}

/// Another emulator's memory.
struct Adopted {
    gate: Arc<Gate>,
    /// Ranges of it that are adopted.
    ranges: usize,
}

impl Allocation {
    fn start(&self) -> u64 {
        self.block.start
    }

    /// Whether it is another rank's, to be read alone.
    pub(crate) fn is_adopted(&self) -> bool {
        self.adopted.is_some()
    }

    /// Notes what an event of a stream uses of it.
    fn note(&self, event: Work, over: &Clock, uses: &[Use]) -> Result<(), Fault> {
        // A rank that panicked here has noted part of what it did.
        let history = self.block.history.lock();
        let mut history = history.unwrap_or_else(PoisonError::into_inner);
        history.note(event, over, uses).map_err(|collision| {
            let Collision { range, writes, before, wrote_before } = collision;
            let (verb, verb_before) = (
                if writes { "writes" } else { "reads" },
                if wrote_before { "written" } else { "read" },
            );
            Fault {
                kind: Kind::Unordered,
                detail: format!(
                    "{event} {verb} bytes {} to {} of an allocation of {} bytes, {verb_before} by {before}, \
                     and its stream does not wait for that: Device::join, or Device::wait_for an event \
                     after it",
                    range.start, range.end, self.bytes
                ),
            }
        })
    }
}

impl Memory {
    /// Memory never written, of at least one byte.
    pub(crate) fn allocate(&mut self, bytes: usize) -> u64 {
        let room = (bytes + ALIGNMENT).next_multiple_of(ALIGNMENT);
        let layout = Layout::from_size_align(room, ALIGNMENT).expect("a size below 2^63");
        // SAFETY: the size is not zero.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        // NaN in f32 and bf16, -1 in i32: loud where a check should miss a read.
        // SAFETY: freshly allocated with this size.
        unsafe { start.write_bytes(0xff, room) };
        let start = start as u64;
        self.insert(Allocation {
            block: Arc::new(Block {
                start,
                layout,
                history: Mutex::new(History::new(room)),
            }),
            bytes,
            shadow: Shadow::new(bytes),
            adopted: None,
        });
        start
    }

    fn insert(&mut self, allocation: Allocation) {
        let start = allocation.start();
        let at = self.allocations.partition_point(|a| a.start() < start);
        self.allocations.insert(at, allocation);
    }

    /// The number of the allocation that an address is in or behind.
    fn index(&self, address: u64) -> Option<usize> {
        let at = self.allocations.partition_point(|a| a.start() <= address);
        at.checked_sub(1)
    }

    /// Gives back what [`Memory::allocate`] gave.
    pub(crate) fn free(&mut self, start: u64) {
        let at = self.index(start);
        let at = at.filter(|&at| self.allocations[at].start() == start);
        let at = at.unwrap_or_else(|| panic!("{start:#x} is no allocation"));
        self.allocations.remove(at);
    }

    /// A range for others to read, with what of it was written so far.
    pub(crate) fn lend(&mut self, address: u64, bytes: usize) -> Option<Lent> {
        let gate = Arc::clone(&self.gate);
        let (allocation, offset) = self.find(address, bytes)?;
        Some(Lent {
            block: Arc::clone(&allocation.block),
            gate,
            bytes: allocation.bytes,
            written: allocation.shadow.part(offset, bytes),
        })
    }

    /// Makes a range that another emulator lent readable here, until [`Memory::disown`]; false where
    /// it is this one's own.
    pub(crate) fn adopt(&mut self, lent: &Lent) -> bool {
        let known = self.index(lent.block.start);
        let known = known.filter(|&at| self.allocations[at].start() == lent.block.start);
        let Some(at) = known else {
            self.insert(Allocation {
                block: Arc::clone(&lent.block),
                bytes: lent.bytes,
                shadow: lent.written.clone(),
                adopted: Some(Adopted {
                    gate: Arc::clone(&lent.gate),
                    ranges: 1,
                }),
            });
            return true;
        };
        let allocation = &mut self.allocations[at];
        let Some(adopted) = &mut allocation.adopted else {
            return false;
        };
        adopted.ranges += 1;
        allocation.shadow.learn(&lent.written);
        true
    }

    /// Lets go of one range of the adopted memory that an address is in.
    pub(crate) fn disown(&mut self, address: u64) {
        let at = self.index(address).expect("adopted memory");
        let adopted = self.allocations[at].adopted.as_mut();
        let adopted = adopted.expect("adopted memory");
        adopted.ranges -= 1;
        if adopted.ranges == 0 {
            self.allocations.remove(at);
        }
    }

    /// The gates to enter before memory is touched, in order, and which of them alone.
    pub(crate) fn gates(&self) -> Vec<(Arc<Gate>, bool)> {
        let adopted = self.allocations.iter().filter_map(|a| a.adopted.as_ref());
        let adopted = adopted.map(|adopted| (Arc::clone(&adopted.gate), false));
        let mut gates: Vec<_> = adopted.chain([(Arc::clone(&self.gate), true)]).collect();
        gates.sort_by_key(|(gate, _)| Arc::as_ptr(gate));
        gates.dedup_by(|(a, _), (b, _)| Arc::ptr_eq(a, b));
        gates
    }

    /// The allocation that holds all of a range, and the offset in it.
    pub(crate) fn find(&mut self, address: u64, bytes: usize) -> Option<(&mut Allocation, usize)> {
        let inside = |a: &Allocation| {
            (a.start()..a.start() + a.block.layout.size() as u64).contains(&address)
        };
        if !self.allocations.get(self.hint).is_some_and(inside) {
            self.hint = self.index(address)?;
        }
        let allocation = &mut self.allocations[self.hint];
        let offset = address.checked_sub(allocation.start())? as usize;
        (offset + bytes <= allocation.bytes).then_some((allocation, offset))
    }

    /// The allocation that an address is in or just behind: its start and its bytes.
    pub(crate) fn nearest(&self, address: u64) -> Option<(u64, usize)> {
        let allocation = &self.allocations[self.index(address)?];
        let near = address < allocation.start() + allocation.block.layout.size() as u64;
        near.then_some((allocation.start(), allocation.bytes))
    }

    /// What is from here on belongs to a new tensor, which nobody has written.
    pub(crate) fn forget(&mut self, address: u64, bytes: usize) {
        let Some(at) = self.index(address) else {
            return;
        };
        let allocation = &mut self.allocations[at];
        let offset = (address - allocation.start()) as usize;
        assert!(
            offset + bytes <= allocation.block.layout.size() - ALIGNMENT,
            "a tensor lies in its memory"
        );
        if offset == 0 {
            allocation.bytes = bytes;
        }
        allocation.shadow.set_written(offset, bytes, false);
    }

    /// Contents of a range that lies in one allocation of its own, which the host is about to write.
    pub(crate) fn host(&mut self, address: u64, bytes: usize) -> Option<&mut [u8]> {
        let (allocation, offset) = self.find(address, bytes)?;
        if allocation.is_adopted() {
            return None;
        }
        allocation.shadow.set_written(offset, bytes, true);
        // SAFETY: the range is in a live allocation, initialized since it was made, borrowed with
        // `self`, and no kernel runs while the host calls.
        Some(unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) })
    }

    /// The same, to read.
    pub(crate) fn host_read(&mut self, address: u64, bytes: usize) -> Option<&[u8]> {
        self.find(address, bytes)?;
        // SAFETY: as above.
        Some(unsafe { std::slice::from_raw_parts(address as *const u8, bytes) })
    }

    /// Notes that an event of a stream uses a range of one allocation, whatever tensor that is out for.
    pub(crate) fn note(
        &self,
        event: Work,
        over: &Clock,
        (address, bytes): (u64, usize),
        writes: bool,
    ) -> Result<(), Fault> {
        let Some(at) = self.index(address) else {
            return Ok(());
        };
        let allocation = &self.allocations[at];
        let offset = (address - allocation.start()) as usize;
        let range = offset..offset + bytes;
        allocation.note(event, over, &[Use { range, writes }])
    }

    /// Notes what the launch that ran has used.
    pub(crate) fn note_launch(&mut self, event: Work, over: &Clock) -> Result<(), Fault> {
        let mut outcome = Ok(());
        for allocation in &mut self.allocations {
            let uses = allocation.shadow.take_used();
            if outcome.is_ok() && !uses.is_empty() {
                outcome = allocation.note(event, over, &uses);
            }
        }
        outcome
    }

    /// Counts of accesses start again.
    pub(crate) fn forget_accesses(&mut self) {
        for allocation in &mut self.allocations {
            allocation.shadow.forget_accesses();
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and nobody knows it any more.
        unsafe { dealloc(self.start as *mut u8, self.layout) };
    }
}
