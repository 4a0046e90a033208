//! [`Device`]: what ops take to work in and give back before they return.
//!
//! On the CPU nothing that its arena counts. On GPUs sums are made over fixed blocks and then over the
//! blocks, and what the blocks leave lies in device memory. How many there are is in `kernels`, op by op,
//! and once more here, since a plan is made without a device; tests of the executor compare the two on
//! emulated GPUs. The number of multiprocessors decides nothing of it.

use moefold_profiles::{Dtype, Gpu};

/// What runs the ops, as far as their workspaces depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The CPU.
    Cpu,
    /// A GPU.
    Cuda {
        /// Whether it has warpgroup products (Hopper), and with them attention of its own in bf16.
        wgmma: bool,
        /// Shared memory that a block may have, in bytes.
        shared_per_block: u64,
    },
}

/// What attention's backward pass works in, in elements.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AttentionWork {
    /// f32: dq summed up, and statistics of rows.
    pub sums: u64,
    /// i32: whose turn it is.
    pub turns: u64,
}

/// Blocks of a sum over all elements, or over the rows of a norm, at most.
const MOST_BLOCKS: u64 = 528;

impl Device {
    /// The devices of a cluster.
    pub fn of(gpu: &Gpu) -> Self {
        if gpu.is_cpu() {
            return Self::Cpu;
        }
        let digits = gpu.arch.trim_start_matches("sm_");
        let digits = digits.trim_end_matches(|c: char| !c.is_ascii_digit());
        let capability = digits.parse().unwrap_or(80);
        Self::cuda(capability)
    }

    /// A GPU of a compute capability, 90 for 9.0. Shared memory by "Technical Specifications per Compute
    /// Capability" of the CUDA C++ Programming Guide.
    pub fn cuda(capability: u32) -> Self {
        let shared = match capability {
            86 | 89 | 120.. => 99,
            ..90 => 163,
            _ => 227,
        };
        Self::Cuda {
            wgmma: capability / 10 == 9,
            shared_per_block: shared << 10,
        }
    }

    fn is_cpu(self) -> bool {
        self == Self::Cpu
    }

    /// f32 partial sums of a norm's weight gradient.
    pub fn norm_sums(self, dtype: Dtype, rows: u64, width: u64) -> u64 {
        if self.is_cpu() || rows == 0 {
            return 0;
        }
        let vector = wide(dtype, width);
        let lanes = (width / vector).div_ceil(4).next_power_of_two();
        let lanes = lanes.clamp(8, 512);
        let at_once = if lanes < 64 { 256 / lanes } else { 1 };
        let of_block = rows.div_ceil(MOST_BLOCKS).max(8 * at_once);
        rows.div_ceil(of_block.next_multiple_of(at_once)) * width
    }

    /// i32 words of the partial sums, in f64, over all elements of a tensor that begins a buffer.
    pub fn total(self, dtype: Dtype, elements: u64) -> u64 {
        if self.is_cpu() || elements == 0 {
            return 0;
        }
        let pieces = elements / (16 / dtype.bytes(1).0);
        2 * pieces.div_ceil(256 * 4).clamp(1, MOST_BLOCKS)
    }

    /// i32: the order that ids are sorted into.
    pub fn embedding_order(self, tokens: u64) -> u64 {
        if self.is_cpu() { 0 } else { 2 * tokens }
    }

    /// f32 partial sums of scores and counts, where `experts` have statistics.
    pub fn router_sums(self, tokens: u64, experts: u64) -> u64 {
        if self.is_cpu() {
            return 0;
        }
        tokens.div_ceil(8 * 4) * 2 * experts
    }

    /// i32 counts of every block that sorts choices by expert.
    pub fn sorting(self, chosen: u64, experts: u64) -> u64 {
        if self.is_cpu() {
            return 0;
        }
        let chunk = chosen.div_ceil(128).next_multiple_of(512).max(512);
        chosen.div_ceil(chunk).max(1) * experts
    }

    /// i32: where blocks of rows go.
    pub fn chunks(self, blocks: u64) -> u64 {
        if self.is_cpu() { 0 } else { 4 * blocks }
    }

    /// Whether attention is Hopper's own.
    fn has_own_attention(self, dtype: Dtype, width: u64) -> bool {
        let Self::Cuda { wgmma, .. } = self else {
            return false;
        };
        wgmma && dtype == Dtype::Bf16 && wide(dtype, width) > 1
    }

    /// i32: the counter that blocks of attention's forward pass take tickets from.
    pub fn attention_tickets(self, dtype: Dtype, width: u64) -> u64 {
        u64::from(self.has_own_attention(dtype, width))
    }

    /// For `pairs` of query heads and sequences.
    pub fn attention_backward(
        self,
        dtype: Dtype,
        pairs: u64,
        seq_len: u64,
        width: u64,
    ) -> AttentionWork {
        let Self::Cuda {
            shared_per_block, ..
        } = self
        else {
            return AttentionWork::default();
        };
        if self.has_own_attention(dtype, width) && width <= 128 {
            let (rows, width) = (
                seq_len.next_multiple_of(64) * pairs,
                width.next_multiple_of(64),
            );
            return AttentionWork {
                sums: 2 * rows + rows * width,
                turns: 1 + rows / 64,
            };
        }
        let width = width.next_multiple_of(16);
        let tile = backward_tile(dtype, width, shared_per_block);
        let tiles = seq_len.div_ceil(tile) * pairs;
        // Where a sequence is one block, dq is nobody else's.
        let summed = if seq_len > tile { tiles * tile } else { 0 };
        AttentionWork {
            sums: pairs * seq_len + summed * width,
            turns: 1 + tiles,
        }
    }
}

/// Elements of an access to rows of this width, where every row starts at a multiple of 16 bytes; else 1.
fn wide(dtype: Dtype, width: u64) -> u64 {
    if dtype.bytes(width).0.is_multiple_of(16) {
        16 / dtype.bytes(1).0
    } else {
        1
    }
}

/// Keys of a block of attention's portable backward pass: the widest tile that shared memory holds.
fn backward_tile(dtype: Dtype, width: u64, shared: u64) -> u64 {
    if dtype != Dtype::Bf16 {
        return 32;
    }
    let rows = |rows: u64, width: u64| rows * (dtype.bytes(width).0 + 16);
    let tile = 64;
    let takes = 2 * rows(2 * tile, width) + rows(2 * tile, tile) + 2 * tile * 4 + 16;
    if takes > shared { 32 } else { tile }
}
