//! [`Shared`]: shared memory of the running block.
#![expect(
    unsafe_code,
    reason = "the block's shared memory is read and written by kernels compiled as C++, so it is owned \
              as a raw allocation; it is accessed here in ranges checked to lie inside, while no \
              other code runs: fibers of one block share one thread"
)]

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};

use crate::shadow::Shadow;

/// Shared memory of the running block.
pub(crate) struct Shared {
    base: *mut u8,
    layout: Layout,
    pub(crate) bytes: usize,
    pub(crate) shadow: Shadow,
}

impl Shared {
    /// Alignment, and bytes behind that belong to nobody.
    const ALIGNMENT: usize = 1024;

    pub(crate) fn new(bytes: usize) -> Self {
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
    pub(crate) fn clear(&mut self) {
        // SAFETY: all of the allocation.
        unsafe { self.base.write_bytes(0xff, self.layout.size()) };
        self.shadow.set_written(0, self.bytes, false);
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    /// The offset of an address in it, or in the gap behind it.
    pub(crate) fn offset(&self, address: u64) -> Option<usize> {
        let offset = address.wrapping_sub(self.base as u64) as usize;
        (offset < self.layout.size()).then_some(offset)
    }

    /// Sixteen bytes.
    pub(crate) fn chunk(&self, offset: u32) -> [u8; 16] {
        let offset = offset as usize;
        assert!(offset + 16 <= self.bytes, "checked when it was accessed");
        // SAFETY: inside the allocation, initialized when the block started.
        unsafe { self.base.add(offset).cast::<[u8; 16]>().read_unaligned() }
    }

    pub(crate) fn set_chunk(&mut self, offset: u32, chunk: [u8; 16]) {
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
