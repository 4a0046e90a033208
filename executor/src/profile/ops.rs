//! Ops by key, ready to be timed: each with operands of its shape in several places of memory, used
//! in turn.

use std::ops::Range;

use moefold_kernels::cases::{self, Load, Source};
use moefold_kernels::{
    Device, Dtype, Tensor, TensorClass, attention, elementwise, latent_kv, permute, router,
};
use moefold_profiles::{Op, Pass, SweepKind};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

/// Operands are spread over at least this much memory, beyond the caches of one core, ...
const SPREAD_BYTES: u64 = 32 << 20;
/// ... but over no more places than this.
const PLACES_MAX: u64 = 8;
/// What an op moves may be this part of a device's memory, of which one rank measures alone. Of so much there is one
/// place, and what is both read and written counts twice.
const MEMORY_SHARE: u64 = 3;
/// Why an op cannot be measured on `device`.
pub(super) fn refusal(device: &Device, op: &Op) -> Option<&'static str> {
    let stored = device.dtype();
    // What every device keeps in f32: statistics, gradients, masters, logits and, of a router, theirs.
    let wide = matches!(
        op,
        Op::Router { .. }
            | Op::GradNorm { .. }
            | Op::CrossEntropy { .. }
            | Op::Add { .. }
            | Op::Sweep { .. }
            | Op::Adamw { .. }
            | Op::Gemm {
                pass: Pass::Dgrad | Pass::Wgrad,
                ..
            }
    );
    let of_integers = matches!(
        op,
        Op::Sweep {
            kind: SweepKind::Sort | SweepKind::Limit | SweepKind::Copy,
            dtype: Dtype::I32,
            ..
        }
    );
    if op.dtype() != stored && !(wide && op.dtype() == Dtype::F32) && !of_integers {
        return Some(match (device.properties(), stored) {
            (None, _) => "the CPU computes in f32",
            (_, Dtype::Bf16) => "the device was opened in bf16",
            _ => "the device was opened in f32",
        });
    }
    if let Some(properties) = device.properties()
        && op.bytes().0 > properties.memory.0 / MEMORY_SHARE
    {
        return Some("its operands take too much of the device's memory");
    }
    if device.properties().is_some() && is_beyond_kernels(op) {
        return Some("it is larger than the kernels of a GPU take");
    }
    match *op {
        Op::LinearAttention { .. } => Some("linear attention is not executed"),
        Op::Attention {
            causal,
            q_len,
            kv_len,
            ..
        } if kv_len > q_len || (causal && kv_len < q_len) => {
            Some("attention is executed over whole sequences, or over windows in them")
        }
        Op::Rope { dim, .. } if dim % 2 == 1 => Some("an odd width cannot be rotated"),
        _ => None,
    }
}

/// As [`crate::support::beyond_kernels`] of a model.
fn is_beyond_kernels(op: &Op) -> bool {
    let beyond = |size: u64, most: usize| size > most as u64;
    match *op {
        Op::Attention { qk_dim, v_dim, .. } => beyond(qk_dim.max(v_dim), attention::MAX_WIDTH),
        Op::LatentKv { rope, .. } => beyond(rope, latent_kv::MAX_SHARED),
        Op::Router { experts, topk, .. } => {
            beyond(experts, permute::MAX_EXPERTS) || beyond(topk, router::MAX_TOPK)
        }
        _ => false,
    }
}

/// A closure that runs the op once. Panics on what [`refusal`] refuses.
pub(super) fn prepare(device: &Device, op: &Op) -> Box<dyn FnMut()> {
    let places = SPREAD_BYTES
        .div_ceil(op.bytes().0.max(1))
        .clamp(1, PLACES_MAX);
    let mut runs = self::places(device, op, false, 0..places);
    Box::new(move || {
        runs[0]();
        runs.rotate_left(1);
    })
}

/// One run of an op on one place's operands.
pub(super) type Run = Box<dyn FnMut()>;

/// The op on operands in each of these places of memory.
pub(super) fn places(device: &Device, op: &Op, skewed: bool, places: Range<u64>) -> Vec<Run> {
    let load = if skewed { Load::Skewed } else { Load::Even };
    places
        .map(|seed| -> Run {
            let dtype = match op {
                Op::Gemm { .. } => device.dtype(),
                _ => op.dtype(),
            };
            let mut place = Place {
                device,
                dtype,
                seed,
            };
            let call = cases::call(&mut place, op, load);
            Box::new(move || call.run())
        })
        .collect()
}

/// Values of a device's speed: a matrix product of zeros takes less power, and so less time, than
/// one of numbers. Uniform in -1..1.
pub(super) fn random_values(len: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// A tensor of random numbers; of many, the first block over and over.
pub(super) fn random(device: &Device, dtype: Dtype, dims: &[usize], seed: u64) -> Tensor {
    let tensor = device.empty(TensorClass::Transient, dtype, dims);
    let len = tensor.len();
    let mut filled = len.min(RANDOM_BLOCK);
    tensor
        .view(0, &[filled])
        .copy_from_f32(&random_values(filled, seed));
    while filled < len {
        let more = filled.min(len - filled);
        elementwise::copy(&tensor.view(0, &[more]), &tensor.view(filled, &[more]));
        filled += more;
    }
    tensor
}

/// Numbers drawn for a tensor.
const RANDOM_BLOCK: usize = 1 << 16;

/// Draws the operands of one place.
struct Place<'a> {
    device: &'a Device,
    /// What the op multiplies or moves.
    dtype: Dtype,
    seed: u64,
}

/// For times alone: all numbers are uniform in -1..1.
impl Source for Place<'_> {
    fn device(&self) -> &Device {
        self.device
    }

    fn tensor(&mut self, dims: &[usize], _scale: f32) -> Tensor {
        random(self.device, self.dtype, dims, self.seed)
    }

    fn statistic(&mut self, dims: &[usize], _scale: f32) -> Tensor {
        random(self.device, Dtype::F32, dims, self.seed)
    }

    /// Spread evenly.
    fn ids(&mut self, dims: &[usize], below: usize) -> Tensor {
        let len: usize = dims.iter().product();
        let values: Vec<i32> = (0..len).map(|i| (i * 7919 % below) as i32).collect();
        self.device.from_i32(TensorClass::Transient, &values, dims)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_of_the_sweep_runs() {
        let device = Device::cpu(1);
        for key in crate::profile::default_sweep(1, 1) {
            if let moefold_profiles::directory::Key::Op(op) = key
                && op.flops().0 < 1e8
            {
                let mut run = prepare(&device, &op);
                run();
                run();
            }
        }
    }
}
