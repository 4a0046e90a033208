//! Ops timed on a device with a stream, by its own clock.
//!
//! A sample is a few runs back to back, each on operands of its own, after the level-two cache was
//! filled with something else: in training an op rarely finds its weights there. The filling is also
//! what the device does while the host asks for the runs, so that no launch is waited for.

use std::time::{Duration, Instant};

use moefold_kernels::{Device, Dtype, Op, TensorClass};

use super::{ProfileOptions, SAMPLES_MIN, ops};

/// A sample lasts at least this long where it can: a hundred ticks of the device's clock.
const SAMPLE_S: f64 = 50e-6;
/// Runs of a sample at most, and with them places of operands.
const RUNS_MAX: usize = 8;
/// Fillings of the cache before a sample at most.
const FILLINGS_MAX: usize = 32;

/// What the cache is filled with.
pub(super) struct Flush<'a> {
    device: &'a Device,
    words: usize,
}

impl<'a> Flush<'a> {
    /// Fills twice the level-two cache of `device`.
    pub(super) fn new(device: &'a Device) -> Self {
        let l2 = device.properties().map_or(0, |properties| properties.l2.0);
        let words = (2 * l2 / 4) as usize;
        Self { device, words }
    }

    fn run(&self, times: usize) {
        for _ in 0..times {
            // The memory of the time before, recycled and written.
            drop(
                self.device
                    .zeros(TensorClass::Transient, Dtype::F32, &[self.words]),
            );
        }
    }
}

/// The samples of an op, seconds a run.
pub(super) fn measure(
    flush: &Flush<'_>,
    op: &Op,
    skewed: bool,
    options: &ProfileOptions,
    share: Duration,
) -> Vec<f64> {
    let device = flush.device;
    let began = Instant::now();
    let mut runs = ops::places(device, op, skewed, 0..1);
    // The first run compiles and loads; the second says how long one takes, device and host.
    device.timed(&mut runs[0]);
    flush.run(1);
    let once = device.timed(&mut runs[0]);
    let asked = Instant::now();
    runs[0]();
    let host = asked.elapsed().as_secs_f64();
    device.synchronize();
    let filling = device.timed(|| flush.run(1));

    let wanted = (SAMPLE_S / once.max(1e-9)).ceil() as usize;
    let count = wanted.clamp(1, RUNS_MAX);
    runs.extend(ops::places(device, op, skewed, 1..count as u64));
    let head_start = host * count as f64 / filling.max(1e-9);
    let fillings = (head_start.ceil() as usize).clamp(1, FILLINGS_MAX);
    let mut seconds = Vec::with_capacity(options.repeats);
    for sample in 0..options.warmup + options.repeats {
        flush.run(fillings);
        let time = device.timed(|| runs.iter_mut().for_each(|run| run()));
        if sample >= options.warmup {
            seconds.push(time / count as f64);
        }
        if began.elapsed() >= share && seconds.len() >= SAMPLES_MIN.min(options.repeats) {
            break;
        }
    }
    seconds
}
