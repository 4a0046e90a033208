//! Random numbers and tensors of tests: of those of what is private to the crate, and of those in
//! `tests/ops`, which has this file too.

use moefold_profiles::random::SplitMix64;

use crate::{Device, Dtype, Tensor, TensorClass, bf16};

/// A small random number generator.
pub(crate) struct Rng {
    random: SplitMix64,
    /// What values are rounded to, so that a device that stores no more reads what the reference reads.
    dtype: Dtype,
}

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self::of(seed, Dtype::F32)
    }

    pub(crate) fn of(seed: u64, dtype: Dtype) -> Self {
        let random = SplitMix64::new(seed);
        Self { random, dtype }
    }

    fn next(&mut self) -> u64 {
        self.random.draw()
    }

    /// From `range`, both ends included.
    pub(crate) fn size(&mut self, range: std::ops::RangeInclusive<usize>) -> usize {
        range.start() + (self.next() % (range.end() - range.start() + 1) as u64) as usize
    }

    /// About normal, mean 0 and deviation 1, exactly an element of the device's dtype.
    pub(crate) fn value(&mut self) -> f32 {
        let uniform = |bits: u64| (bits >> 40) as f32 / (1u64 << 24) as f32;
        let sum: f32 = (0..4).map(|_| uniform(self.next()) - 0.5).sum();
        let value = sum * 1.732;
        match self.dtype {
            Dtype::Bf16 => bf16::widen(bf16::narrow(value)),
            _ => value,
        }
    }

    pub(crate) fn values(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.value()).collect()
    }
}

#[track_caller]
pub(crate) fn assert_bits(name: &str, got: &[f32], want: &[f32], seed: u64) {
    assert_eq!(got.len(), want.len(), "{name}: length, seed {seed}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(
            g.to_bits() == w.to_bits(),
            "{name}: element {i} is {g:e}, expected the bits of {w:e}, seed {seed}"
        );
    }
}

/// What a device stores as weights and activations: f32, or bf16.
pub(crate) fn tensor(device: &Device, values: &[f32], dims: &[usize]) -> Tensor {
    let tensor = device.empty(TensorClass::Activations, device.dtype(), dims);
    tensor.copy_from_f32(values);
    tensor
}

/// What every device stores as f32: statistics, probabilities, main gradients.
pub(crate) fn statistic(device: &Device, values: &[f32], dims: &[usize]) -> Tensor {
    device.from_f32(TensorClass::Activations, values, dims)
}

pub(crate) fn integers(device: &Device, values: &[i32], dims: &[usize]) -> Tensor {
    device.from_i32(TensorClass::Activations, values, dims)
}
