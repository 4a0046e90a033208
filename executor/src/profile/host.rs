//! What a device and its host cost each other: copies over the link, launches, reads.
//!
//! Copies go the way that tensors go in training: uploads through pinned staging, reads straight into
//! the caller's memory. Times are the host's, from the first call until all is done.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use moefold_kernels::{Device, Dtype, Tensor, TensorClass, catch, elementwise};
use moefold_profiles::host::{Direction, HostCost};

use super::{ProfileOptions, SAMPLES_MIN, ops};
use crate::device::DeviceSpec;
use crate::error::Error;

/// Ops asked for in a row: fewer than a stream holds, so that the host never waits for room.
const ROW: usize = 200;
/// Elements of the tensor that they add to: as good as no work.
const ELEMENTS: usize = 256;

/// Why this cannot be measured on `device`.
pub(super) fn refusal(device: &Device) -> Option<&'static str> {
    device
        .properties()
        .is_none()
        .then_some("the CPU is its own host")
}

/// The samples of one cost of the device, which is number `ordinal`, seconds.
pub(super) fn measure(
    device: &Device,
    ordinal: usize,
    cost: HostCost,
    options: &ProfileOptions,
    share: Duration,
) -> Result<Vec<f64>, Error> {
    let mut once: Box<dyn FnMut() -> Result<f64, Error>> = match cost {
        HostCost::Copy { bytes, direction } => {
            let again = (options.device, ordinal, options.ranks);
            copies(device, bytes.0 as usize, direction, again)
        }
        HostCost::Launch => {
            let tensors = small(device);
            let device = device.clone();
            Box::new(move || Ok(launches(&device, &tensors)))
        }
        HostCost::Read => {
            let tensors = small(device);
            let device = device.clone();
            Box::new(move || Ok(reads(&device, &tensors)))
        }
    };
    let began = Instant::now();
    let mut seconds = Vec::with_capacity(options.repeats);
    for sample in 0..=options.warmup + options.repeats {
        let time = once()?;
        // The first run loads kernels and touches memory.
        if sample > options.warmup {
            seconds.push(time.max(1e-9));
        }
        if began.elapsed() >= share && seconds.len() >= SAMPLES_MIN.min(options.repeats) {
            break;
        }
    }
    Ok(seconds)
}

fn small(device: &Device) -> [Tensor; 2] {
    [0, 1].map(|seed| ops::random(device, Dtype::F32, &[ELEMENTS], seed))
}

/// Seconds the host takes to ask for one op.
fn launches(device: &Device, [x, y]: &[Tensor; 2]) -> f64 {
    device.synchronize();
    let start = Instant::now();
    for _ in 0..ROW {
        elementwise::axpy(1e-6, x, y);
    }
    let asked = start.elapsed().as_secs_f64();
    device.synchronize();
    asked / ROW as f64
}

/// Seconds that a read after each op adds to a row of them.
fn reads(device: &Device, [x, y]: &[Tensor; 2]) -> f64 {
    let first = y.view(0, &[1]);
    let row = |reading: bool| {
        device.synchronize();
        let start = Instant::now();
        for _ in 0..ROW {
            elementwise::axpy(1e-6, x, y);
            if reading {
                black_box(first.to_f32());
            }
        }
        device.synchronize();
        start.elapsed().as_secs_f64() / ROW as f64
    };
    let without = row(false);
    row(true) - without
}

/// A closure that copies once and says how long it took. `again` opens the device another time.
fn copies(
    device: &Device,
    bytes: usize,
    direction: Direction,
    again: (DeviceSpec, usize, u32),
) -> Box<dyn FnMut() -> Result<f64, Error>> {
    let len = (bytes / 4).max(1);
    let tensor = device.empty(TensorClass::Transient, Dtype::F32, &[len]);
    let mut values: Vec<f32> = ops::random_values(len, 0);
    let device = device.clone();
    match direction {
        Direction::ToDevice => Box::new(move || Ok(upload(&device, &tensor, &values))),
        Direction::ToHost => {
            tensor.copy_from_f32(&values);
            Box::new(move || Ok(download(&device, &tensor, &mut values)))
        }
        Direction::Both => {
            tensor.copy_from_f32(&values);
            let (spec, ordinal, ranks) = again;
            Box::new(move || {
                // Uploads go through a device of their own thread: a copy to the host waits.
                let ready = std::sync::Barrier::new(2);
                thread::scope(|scope| {
                    let other = scope.spawn(|| {
                        // Whatever happens before it, the other side is not left waiting.
                        let opened = catch(|| {
                            let device = spec.open(ordinal, ranks)?;
                            let tensor = device.empty(TensorClass::Transient, Dtype::F32, &[len]);
                            let values = ops::random_values(len, 1);
                            upload(&device, &tensor, &values);
                            Ok::<_, Error>((device, tensor, values))
                        });
                        ready.wait();
                        let (device, tensor, values) = opened.map_err(Error::Device)??;
                        catch(|| upload(&device, &tensor, &values)).map_err(Error::Device)
                    });
                    ready.wait();
                    let own = download(&device, &tensor, &mut values);
                    let other = other.join().expect("its device's failures are caught")?;
                    Ok(own.max(other))
                })
            })
        }
    }
}

fn upload(device: &Device, tensor: &Tensor, values: &[f32]) -> f64 {
    device.synchronize();
    let start = Instant::now();
    tensor.copy_from_f32(values);
    device.synchronize();
    start.elapsed().as_secs_f64()
}

fn download(device: &Device, tensor: &Tensor, values: &mut [f32]) -> f64 {
    device.synchronize();
    let start = Instant::now();
    tensor.copy_to_f32(values);
    start.elapsed().as_secs_f64()
}
