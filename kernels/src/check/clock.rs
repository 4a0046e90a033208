//! Times of cases and the ceilings they are held against.

use moefold_profiles::Dtype;

use crate::check::{Case, cases};
use crate::device::{Device, TensorClass};
use crate::elementwise;

/// Times of one case.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Median, in seconds.
    pub median_s: f64,
    /// First and third quartile, in seconds.
    pub quartiles_s: [f64; 2],
    /// Runs timed.
    pub runs: usize,
}

/// What the device reaches on work that does nothing but move, or nothing but multiply: measured, so
/// that a floor is one that this device has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ceilings {
    /// Bytes a second of a copy far larger than any cache, read and written counted.
    pub copy_bytes_per_s: f64,
    /// FLOP/s of a dense product of 8192 cubed in the device's dtype, on random values.
    pub dense_flops_per_s: f64,
}

/// Runs the case `runs` times after `warmup` untimed ones. Before each the device's caches are
/// filled with something else.
pub fn time(case: &Case, device: &Device, warmup: usize, runs: usize) -> Timing {
    let work = case.work(device, device.dtype(), 1);
    for _ in 0..warmup {
        work();
    }
    let flush = flush_buffer(device);
    let mut times: Vec<f64> = (0..runs.max(1))
        .map(|_| {
            elementwise::fill(&flush, 0.5);
            device.timed(|| {
                work();
            })
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    Timing {
        median_s: at(0.5),
        quartiles_s: [at(0.25), at(0.75)],
        runs: times.len(),
    }
}

/// A tensor of twice the level-two cache.
fn flush_buffer(device: &Device) -> crate::Tensor {
    const HOST_CACHES: u64 = 64 << 20;
    let cache = device.properties().map_or(HOST_CACHES, |p| p.l2.0);
    let words = (2 * cache / 4) as usize;
    device.empty(TensorClass::Transient, Dtype::F32, &[words])
}

/// Measures the ceilings: a copy of `copy_bytes`, a product of `side` cubed.
pub fn ceilings(device: &Device, copy_bytes: usize, side: usize, runs: usize) -> Ceilings {
    let copy = time(&cases::copy(copy_bytes / 4), device, 2, runs);
    let dense = cases::dense("ceiling", side, side, side, device.dtype());
    let product = time(&dense, device, 2, runs);
    Ceilings {
        copy_bytes_per_s: 2.0 * copy_bytes as f64 / copy.median_s,
        dense_flops_per_s: dense.op.flops().0 / product.median_s,
    }
}
