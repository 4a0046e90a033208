//! Every op against its reference, and against the clock, on a device that is at hand.
//!
//! A [`Case`] is one call of one op at one shape: it makes its inputs on any device from a seed, and
//! runs. [`agrees`] runs it on the CPU in f32, whose ops are tested against f64 loops, and on the
//! device, and compares what they wrote. [`time`] runs it many times between marks of the device's
//! own clock. What a case must move and compute is its [`Op`]'s count, so that a time has a floor to
//! be held against.

use std::fmt;

use moefold_profiles::random::SplitMix64;
use moefold_profiles::{Dtype, Op};
use rayon::prelude::*;

use crate::cases::{Call, Source};
use crate::device::{Device, TensorClass};
use crate::tensor::Tensor;

mod cases;
mod clock;

pub use cases::{Sizes, cases, dense_peer, loads};
pub use clock::{Ceilings, Timing, ceilings, time};

/// One call of an op.
pub struct Case {
    /// The op and what of it (`grouped_gemm::wgrad fc1`).
    pub name: String,
    /// What it computes and moves.
    pub op: Op,
    /// What it moves, where the op counts another function's bytes.
    bytes: Option<u64>,
    /// Whether it is a grouped product for the vendor's library.
    by_library: bool,
    prepare: Box<dyn Fn(&mut Inputs<'_>) -> Work>,
}

/// What a case does on one device. Inputs live as long as it does.
type Work = Box<dyn Fn() -> Vec<Written>>;

/// One output of a call.
struct Written {
    name: &'static str,
    values: Values,
}

/// Outputs: compared in the norm, or exactly where they are integers.
enum Values {
    Tensor(Tensor),
    /// What the host works out when outputs are compared: it is no part of the call's time.
    Host(Box<dyn Fn() -> Vec<f64>>),
}

impl Written {
    fn new(name: &'static str, tensor: &Tensor) -> Self {
        let values = Values::Tensor(tensor.clone());
        Self { name, values }
    }

    fn host(name: &'static str, values: impl Fn() -> Vec<f64> + 'static) -> Self {
        let values = Values::Host(Box::new(values));
        Self { name, values }
    }

    /// What a call writes.
    fn all(call: &Call) -> Vec<Self> {
        let mut written = Vec::new();
        call.run_into(&mut |name, tensor| written.push(Self::new(name, tensor)));
        written
    }

    fn dtype(&self) -> Dtype {
        match &self.values {
            Values::Tensor(tensor) => tensor.dtype(),
            Values::Host(_) => Dtype::F32,
        }
    }

    /// Elements of a row; none where all are one.
    fn width(&self) -> Option<usize> {
        match &self.values {
            Values::Tensor(tensor) => Some(tensor.width()),
            Values::Host(_) => None,
        }
    }

    fn read(&self) -> Vec<f64> {
        match &self.values {
            Values::Tensor(tensor) if tensor.dtype() == Dtype::I32 => {
                tensor.to_i32().into_par_iter().map(f64::from).collect()
            }
            Values::Tensor(tensor) => tensor.to_f32().into_par_iter().map(f64::from).collect(),
            Values::Host(values) => values(),
        }
    }
}

/// Inputs of a case: the same numbers on every device, drawn from the seed and rounded to what the
/// device under test stores, so that its reference reads them too.
struct Inputs<'a> {
    device: &'a Device,
    rounding: Dtype,
    random: SplitMix64,
}

impl Inputs<'_> {
    /// Uniform in -1..1, times `scale`, as stored in `dtype`.
    fn values(&mut self, len: usize, scale: f32, dtype: Dtype) -> Vec<f32> {
        let random = self.random.clone();
        let value = |drawn: u64| {
            let value = scale * (((drawn >> 40) as f32) / (1u32 << 23) as f32 - 1.0);
            match dtype {
                Dtype::Bf16 => crate::bf16::widen(crate::bf16::narrow(value)),
                _ => value,
            }
        };
        self.random.skip(len as u64);
        let each = (0..len as u64).into_par_iter();
        each.map(|i| value(random.nth(i))).collect()
    }
}

impl Source for Inputs<'_> {
    fn device(&self) -> &Device {
        self.device
    }

    fn tensor(&mut self, dims: &[usize], scale: f32) -> Tensor {
        let tensor = self
            .device
            .empty(TensorClass::Activations, self.device.dtype(), dims);
        tensor.copy_from_f32(&self.values(tensor.len(), scale, self.rounding));
        tensor
    }

    fn statistic(&mut self, dims: &[usize], scale: f32) -> Tensor {
        let values = self.values(dims.iter().product(), scale, Dtype::F32);
        self.device
            .from_f32(TensorClass::Activations, &values, dims)
    }

    fn ids(&mut self, dims: &[usize], below: usize) -> Tensor {
        let len = dims.iter().product();
        let ids: Vec<i32> = (0..len)
            .map(|_| (self.random.draw() % below as u64) as i32)
            .collect();
        self.device.from_i32(TensorClass::Activations, &ids, dims)
    }
}

/// How far one output is from the reference's.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The output.
    pub output: &'static str,
    /// `|got - want| / |want|` over all elements; for integers the count of those that differ.
    pub error: f64,
    /// What it may be.
    pub tolerance: f64,
    /// The same over the worst row alone, `|got - want|` of a row over the root mean square norm of
    /// a row: one row in thousands that is wrong moves the error of them all by little.
    pub worst_row: f64,
}

/// How many times the tolerance one row may be off by: rows differ in norm.
const ROW_SLACK: f64 = 10.0;

impl Verdict {
    /// Whether the output is what it should be; NaN never is.
    pub fn passes(&self) -> bool {
        self.error <= self.tolerance && self.worst_row <= ROW_SLACK * self.tolerance
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = if self.passes() { "ok" } else { "WRONG" };
        write!(
            f,
            "{found} {}: {:.1e} of {:.0e}, worst row {:.1e}",
            self.output, self.error, self.tolerance, self.worst_row
        )
    }
}

impl Case {
    /// Bytes that it must move.
    pub fn bytes(&self) -> u64 {
        self.bytes.unwrap_or_else(|| self.op.bytes().0)
    }

    /// Whether the device has what the case is about: for some the vendor's library, which is tried.
    pub fn is_for(&self, device: &Device) -> bool {
        if !self.by_library {
            return true;
        }
        let before = device.library_products();
        self.work(device, device.dtype(), 1)();
        device.library_products() > before
    }

    fn work(&self, device: &Device, rounding: Dtype, seed: u64) -> Work {
        let inner = self.prepared(device, rounding, seed);
        if !self.by_library {
            return inner;
        }
        let device = device.clone();
        Box::new(move || {
            device.prefer_library(true);
            let written = inner();
            device.prefer_library(false);
            written
        })
    }

    fn prepared(&self, device: &Device, rounding: Dtype, seed: u64) -> Work {
        (self.prepare)(&mut Inputs {
            device,
            rounding,
            random: SplitMix64::new(seed),
        })
    }
}

/// Runs the case on `device` and on `reference`, from inputs of this seed, and compares every output.
///
/// # Panics
/// When the two write outputs of different lengths.
pub fn agrees(case: &Case, device: &Device, reference: &Device, seed: u64) -> Vec<Verdict> {
    let rounding = device.dtype();
    let got = case.work(device, rounding, seed)();
    let want = case.work(reference, rounding, seed)();
    let names = |written: &[Written]| written.iter().map(|w| w.name).collect::<Vec<_>>();
    assert_eq!(names(&got), names(&want), "{}: outputs", case.name);
    got.iter()
        .zip(&want)
        .map(|(got, want)| verdict(got, want, rounding))
        .collect()
}

/// What an output of `dtype` may be off by on a device that stores `rounding`. An f32 output of bf16
/// operands is summed in another order and, on tensor cores, with another rounding than its reference.
fn tolerance(dtype: Dtype, rounding: Dtype) -> f64 {
    match (dtype, rounding) {
        (Dtype::I32, _) => 0.0,
        (Dtype::Bf16, _) => 1e-2,
        (_, Dtype::Bf16) => 1e-4,
        _ => 1e-5,
    }
}

fn verdict(got: &Written, want: &Written, rounding: Dtype) -> Verdict {
    let integers = got.dtype() == Dtype::I32;
    let (got_values, want_values) = (got.read(), want.read());
    assert!(
        got_values.len() == want_values.len(),
        "{}: {} values on the device, {} of its reference",
        got.name,
        got_values.len(),
        want_values.len()
    );
    let (error, worst_row) = if integers {
        let pairs = got_values.iter().zip(&want_values);
        (pairs.filter(|(g, w)| g != w).count() as f64, 0.0)
    } else {
        let width = got.width().unwrap_or(want_values.len());
        distance(&got_values, &want_values, width)
    };
    Verdict {
        output: got.name,
        error,
        tolerance: tolerance(got.dtype(), rounding),
        worst_row,
    }
}

/// Distance of all elements, and of the worst row of `width`.
fn distance(got: &[f64], want: &[f64], width: usize) -> (f64, f64) {
    let squares =
        |g: &[f64], w: &[f64]| -> f64 { g.iter().zip(w).map(|(g, w)| (g - w).powi(2)).sum() };
    let width = width.max(1);
    let rows = got.len().div_ceil(width).max(1);
    // Of each row its distance and its square, summed in order: the same for any number of threads.
    let each: Vec<(f64, f64)> = got
        .par_chunks(width)
        .zip(want.par_chunks(width))
        .map(|(g, w)| (squares(g, w), w.iter().map(|w| w * w).sum()))
        .collect();
    // NaN is the worst of all, which `f64::max` would drop.
    let worst = each.iter().fold(0.0, |worst: f64, (row, _)| {
        if row.is_nan() || worst.is_nan() {
            f64::NAN
        } else {
            worst.max(*row)
        }
    });
    let reference: f64 = each.iter().map(|(_, square)| square).sum();
    let scale = if reference == 0.0 { 1.0 } else { reference };
    let error = (each.iter().map(|(row, _)| row).sum::<f64>() / scale).sqrt();
    (error, (worst / scale * rows as f64).sqrt())
}

#[cfg(test)]
mod tests;
