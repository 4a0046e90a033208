//! Global memory: allocations of the host with shadows, and what an address is in.
#![expect(
    unsafe_code,
    reason = "kernels compiled as C++ read and write this memory by address, so it is owned as raw \
              allocations; slices of it are made only of ranges checked to lie in one live allocation \
              and only while no kernel runs on this thread"
)]

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};

use crate::cuda::emulator::shadow::Shadow;

/// Alignment of an allocation, and the bytes after it that belong to nobody.
const ALIGNMENT: usize = 256;

/// Memory of the device.
#[derive(Default)]
pub(super) struct Memory {
    /// By address.
    allocations: Vec<Allocation>,
    /// The last one found.
    hint: usize,
}

/// One allocation.
pub(super) struct Allocation {
    start: u64,
    /// Bytes that may be touched: those of the tensor it was last given out for.
    bytes: usize,
    layout: Layout,
    pub(super) shadow: Shadow,
}

impl Memory {
    /// Memory never written, of at least one byte.
    pub(super) fn allocate(&mut self, bytes: usize) -> u64 {
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
        let at = self.allocations.partition_point(|a| a.start < start);
        let allocation = Allocation {
            start,
            bytes,
            layout,
            shadow: Shadow::new(bytes),
        };
        self.allocations.insert(at, allocation);
        start
    }

    /// Gives back what [`Memory::allocate`] gave.
    pub(super) fn free(&mut self, start: u64) {
        let at = self.allocations.partition_point(|a| a.start < start);
        assert!(
            self.allocations.get(at).is_some_and(|a| a.start == start),
            "{start:#x} is no allocation"
        );
        let allocation = self.allocations.remove(at);
        // SAFETY: allocated above with this layout, and forgotten just now.
        unsafe { dealloc(allocation.start as *mut u8, allocation.layout) };
    }

    /// The allocation that holds all of a range, and the offset in it.
    pub(super) fn find(&mut self, address: u64, bytes: usize) -> Option<(&mut Allocation, usize)> {
        let inside =
            |a: &Allocation| address >= a.start && address < a.start + a.layout.size() as u64;
        if !self.allocations.get(self.hint).is_some_and(inside) {
            self.hint = self
                .allocations
                .partition_point(|a| a.start <= address)
                .checked_sub(1)?;
        }
        let allocation = &mut self.allocations[self.hint];
        let offset = address.checked_sub(allocation.start)? as usize;
        (offset + bytes <= allocation.bytes).then_some((allocation, offset))
    }

    /// The allocation that an address is in or just behind: its start and its bytes.
    pub(super) fn nearest(&self, address: u64) -> Option<(u64, usize)> {
        let at = self
            .allocations
            .partition_point(|a| a.start <= address)
            .checked_sub(1)?;
        let allocation = &self.allocations[at];
        let near = address < allocation.start + allocation.layout.size() as u64;
        near.then_some((allocation.start, allocation.bytes))
    }

    /// What is from here on belongs to a new tensor, which nobody has written.
    pub(super) fn forget(&mut self, address: u64, bytes: usize) {
        let at = self.allocations.partition_point(|a| a.start <= address);
        let Some(allocation) = at.checked_sub(1).map(|at| &mut self.allocations[at]) else {
            return;
        };
        let offset = (address - allocation.start) as usize;
        assert!(
            offset + bytes <= allocation.layout.size() - ALIGNMENT,
            "a tensor lies in its memory"
        );
        if offset == 0 {
            allocation.bytes = bytes;
        }
        allocation.shadow.set_written(offset, bytes, false);
    }

    /// Contents of a range that lies in one allocation, which the host is about to write.
    pub(super) fn host(&mut self, address: u64, bytes: usize) -> Option<&mut [u8]> {
        let (allocation, offset) = self.find(address, bytes)?;
        allocation.shadow.set_written(offset, bytes, true);
        // SAFETY: the range is in a live allocation, initialized since it was made, borrowed with
        // `self`, and no kernel runs while the host calls.
        Some(unsafe { std::slice::from_raw_parts_mut(address as *mut u8, bytes) })
    }

    /// The same, to read.
    pub(super) fn host_read(&mut self, address: u64, bytes: usize) -> Option<&[u8]> {
        self.find(address, bytes)?;
        // SAFETY: as above.
        Some(unsafe { std::slice::from_raw_parts(address as *const u8, bytes) })
    }

    /// Counts of accesses start again.
    pub(super) fn forget_accesses(&mut self) {
        for allocation in &mut self.allocations {
            allocation.shadow.forget_accesses();
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        while let Some(last) = self.allocations.last() {
            self.free(last.start);
        }
    }
}
