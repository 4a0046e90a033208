//! [`Arena`]: where the buffers of a device come from and return to, and the account of what is out.
//!
//! On the CPU freed memory waits by size for a buffer of that size: fresh pages cost more than the
//! arithmetic done on them, and the system packs what it is asked for. On a GPU buffers are ranges of
//! slabs ([`Pool`]), so that what is freed serves any size. The emulator watches the bounds of every
//! tensor, which so has a block of its own there; the same pool runs beside the blocks, on addresses
//! that nobody uses, so that it takes a slab when a GPU's would.

use std::collections::BTreeMap;

use moefold_profiles::units::{Bytes, MIB};

use crate::buffer::{CpuMemory, LINE_BYTES, Storage};
use crate::cuda::error::DeviceError;
use crate::cuda::platform::Address;
use crate::cuda::{Allocation, Cuda, Pinned};
use crate::device::{Memory, Side, TensorClass};
use crate::pool::{Pool, Range};

/// What the driver maps at a time, so that slabs waste nothing (`cuMemGetAllocationGranularity` of
/// GPUs: 2 MiB).
const GRANULE: u64 = 2 * MIB;

/// A slab is at least 1/512 of the device's memory, where so much is free: 160 MiB of 80 GiB, 16 MiB of
/// 8 GiB.
const LEAST_SLAB: u64 = 512;

/// The account, and memory that is free.
#[derive(Default)]
pub(crate) struct Arena {
    pub(crate) memory: Memory,
    /// Of the CPU.
    pages: Shelves<CpuMemory>,
    /// Bytes of the CPU's memory taken from the system and not given back.
    pages_taken: u64,
    /// Of CUDA devices, as the three below.
    pool: Pool,
    /// What the slabs of the pool are, by where they start; nothing beside blocks.
    slabs: BTreeMap<u64, Option<Allocation>>,
    blocks: Shelves<Allocation>,
    /// Of the host.
    pinned: Shelves<Pinned>,
    /// The end of the last slab beside blocks.
    slabs_end: u64,
    /// Freed while a stream beside the compute stream may still be using it, with its bytes.
    held: Vec<(usize, Storage)>,
    holding: bool,
    growths: u64,
}

/// Freed memory by its size in lines.
struct Shelves<T>(BTreeMap<usize, Vec<T>>);

/// Memory of a CUDA device that a buffer has.
pub(crate) struct Piece {
    range: Range,
    /// Where the memory is, if not in the pool.
    block: Option<Allocation>,
}

impl Piece {
    pub(crate) fn address(&self) -> Address {
        match &self.block {
            Some(block) => block.address(),
            None => Address(self.range.start),
        }
    }
}

impl Arena {
    /// Memory of the CPU for `bytes`: recycled where some of the same size class is free, else new.
    pub(crate) fn take_pages(&mut self, bytes: usize) -> Storage {
        let lines = lines_for(bytes);
        let memory = self.pages.take(lines).unwrap_or_else(|| {
            self.growths += 1;
            self.pages_taken += bytes_of(lines);
            CpuMemory::new(lines)
        });
        Storage::Cpu(memory)
    }

    /// Memory of a CUDA device for `bytes`; where none that is free holds them, a slab is taken first.
    pub(crate) fn take(&mut self, gpu: &Cuda, bytes: usize) -> Result<Storage, DeviceError> {
        let range = if let Some(range) = self.pool.take(bytes as u64) {
            range
        } else {
            self.grow(gpu, bytes as u64)?;
            let range = self.pool.take(bytes as u64);
            range.expect("the pool has grown by as much")
        };
        let block = if gpu.divides() {
            None
        } else {
            Some(self.block(gpu, bytes)?)
        };
        Ok(Storage::Cuda(Piece { range, block }))
    }

    /// Pinned memory of the host of a CUDA device for `bytes`: recycled where some of the same size class is
    /// free, else new.
    pub(crate) fn take_pinned(&mut self, gpu: &Cuda, bytes: usize) -> Result<Storage, DeviceError> {
        let lines = lines_for(bytes);
        Ok(Storage::Pinned(match self.pinned.take(lines) {
            Some(pinned) => pinned,
            None => gpu.allocate_host(bytes_of(lines))?,
        }))
    }

    /// Takes what is missing of `bytes` in all, as one slab.
    pub(crate) fn reserve(&mut self, gpu: &Cuda, bytes: Bytes) -> Result<(), DeviceError> {
        match bytes.0.saturating_sub(self.pool.reserved()) {
            0 => Ok(()),
            missing => self.add_slab(gpu, missing),
        }
    }

    /// Takes a slab that holds `bytes`. Where the device has none of the usual size, slabs of which
    /// nothing is out go back to it first.
    fn grow(&mut self, gpu: &Cuda, bytes: u64) -> Result<(), DeviceError> {
        let usual = gpu.properties().memory.0 / LEAST_SLAB;
        match self.add_slab(gpu, bytes.max(usual)) {
            Err(error) if error.is_out_of_memory() => {}
            other => return other,
        }
        gpu.before_waiting("trim");
        self.trim();
        self.add_slab(gpu, bytes).map_err(|mut error| {
            if error.is_out_of_memory() {
                let said = format!(
                    "; this rank has taken {} so far, of which {} is free in pieces of at most {}; its \
                     tensors hold {}",
                    Bytes(self.pool.reserved()),
                    Bytes(self.pool.free()),
                    Bytes(self.pool.largest()),
                    self.memory.live_total(),
                );
                error.detail.push_str(&said);
            }
            error
        })
    }

    fn add_slab(&mut self, gpu: &Cuda, bytes: u64) -> Result<(), DeviceError> {
        let bytes = bytes.max(1).next_multiple_of(GRANULE);
        let (start, memory) = if gpu.divides() {
            let memory = gpu.allocate(bytes)?;
            (memory.address().0, Some(memory))
        } else {
            let (taken, all) = (self.pool.reserved(), gpu.properties().memory);
            if taken + bytes > all.0 {
                let free = Bytes(all.0 - taken);
                let said = format!("asked for {}, {free} of {all} is free", Bytes(bytes));
                return Err(DeviceError::out_of_memory("emulator", said));
            }
            self.slabs_end += bytes;
            (self.slabs_end - bytes, None)
        };
        self.pool.add(start, bytes);
        self.slabs.insert(start, memory);
        self.growths += 1;
        Ok(())
    }

    fn block(&mut self, gpu: &Cuda, bytes: usize) -> Result<Allocation, DeviceError> {
        let lines = lines_for(bytes);
        match self.blocks.take(lines) {
            Some(block) => Ok(block),
            None => gpu.allocate(bytes_of(lines).max(1)),
        }
    }

    /// Takes a buffer's memory back.
    pub(crate) fn give(
        &mut self,
        (class, side): (TensorClass, Side),
        bytes: usize,
        storage: Storage,
    ) {
        match side {
            Side::Device => self.memory.remove(class, bytes as u64),
            Side::Host => self.memory.remove_from_host(bytes as u64),
        }
        // Copies to and from the host are in one stream, each after those before.
        if self.holding && side == Side::Device {
            self.held.push((bytes, storage));
        } else {
            self.put(bytes, storage);
        }
    }

    fn put(&mut self, bytes: usize, storage: Storage) {
        let lines = lines_for(bytes);
        match storage {
            Storage::Cpu(memory) => self.pages.put(lines, memory),
            Storage::Cuda(piece) => {
                self.pool.give(piece.range);
                if let Some(block) = piece.block {
                    // A GPU's pool may give the range to a tensor of any size; here it waits by size.
                    block.give(bytes as u64);
                    self.blocks.put(lines, block);
                }
            }
            Storage::Pinned(pinned) => self.pinned.put(lines, pinned),
            Storage::Adopted(_) | Storage::Meta => {}
        }
    }

    /// Whether what is freed from now on is not given out again before [`Arena::release`]; whether it
    /// was so before.
    pub(crate) fn hold(&mut self, holding: bool) -> bool {
        std::mem::replace(&mut self.holding, holding)
    }

    /// Pieces of memory that were freed and are not given out yet.
    pub(crate) fn held(&self) -> usize {
        self.held.len()
    }

    /// Nothing that was freed is in use any more.
    pub(crate) fn release(&mut self) {
        self.holding = false;
        for (bytes, storage) in std::mem::take(&mut self.held) {
            self.put(bytes, storage);
        }
    }

    /// Bytes that are free here.
    pub(crate) fn cached(&self) -> Bytes {
        Bytes(self.pages.bytes() + self.pool.free())
    }

    /// Bytes taken from the device or the system and not given back.
    pub(crate) fn reserved(&self) -> Bytes {
        Bytes(self.pages_taken + self.pool.reserved())
    }

    /// Bytes of them that would have been enough.
    pub(crate) fn extent(&self) -> Bytes {
        Bytes(self.pages_taken + self.pool.extent())
    }

    /// How often memory was taken from them.
    pub(crate) fn growths(&self) -> u64 {
        self.growths
    }

    /// Gives back what no buffer has a part of, for which a GPU finishes all its work: the host comes
    /// here once [`Cuda::before_waiting`] let it.
    pub(crate) fn trim(&mut self) {
        self.pages_taken -= self.pages.bytes();
        self.pages = Shelves::default();
        self.blocks = Shelves::default();
        self.pinned = Shelves::default();
        for start in self.pool.remove_idle() {
            self.slabs.remove(&start);
        }
    }
}

impl<T> Default for Shelves<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> Shelves<T> {
    fn take(&mut self, lines: usize) -> Option<T> {
        self.0.get_mut(&lines).and_then(Vec::pop)
    }

    fn put(&mut self, lines: usize, memory: T) {
        self.0.entry(lines).or_default().push(memory);
    }

    fn bytes(&self) -> u64 {
        let lines = self.0.iter().map(|(lines, free)| lines * free.len());
        bytes_of(lines.sum())
    }
}

fn bytes_of(lines: usize) -> u64 {
    (lines * LINE_BYTES) as u64
}

/// Lines that a buffer of `bytes` takes where memory is kept by size.
fn lines_for(bytes: usize) -> usize {
    size_class(bytes.div_ceil(LINE_BYTES))
}

/// Rounds a count of lines up to one of eight sizes an octave. So buffers whose size varies from step to
/// step (rows routed to an expert) still find recycled memory, at most 1/8 too large.
fn size_class(lines: usize) -> usize {
    if lines <= 16 {
        return lines;
    }
    let step = 1 << (lines.ilog2() - 3);
    lines.next_multiple_of(step)
}

#[cfg(test)]
mod tests;
