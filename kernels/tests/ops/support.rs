//! What the tests of all ops share: random cases from a printed seed, devices that must agree bit
//! for bit, and comparison with f64 references.
//!
//! A reference is the op as plain loops in f64, sharing no code with it. Backward ops are compared with
//! central differences of the forward reference.

use moefold_emulator::at_hand;
use moefold_kernels::cuda::Architecture;
use moefold_kernels::{Device, Dtype, Tensor, TensorClass, catch};

pub(crate) use crate::testing::{Rng, assert_bits, integers, statistic, tensor};

/// Error norm over reference norm that a result stored in this dtype is allowed. What reads bf16
/// and writes f32 computes in f32, from values that bf16 holds exactly.
fn tolerance(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::Bf16 => 1e-2,
        _ => 1e-5,
    }
}

impl Rng {
    pub(crate) fn coin(&mut self) -> bool {
        self.size(0..=1) == 1
    }

    pub(crate) fn ids(&mut self, len: usize, below: usize) -> Vec<i32> {
        (0..len).map(|_| self.size(0..=below - 1) as i32).collect()
    }

    /// How many rows each group has: any may be empty, and sometimes one has them all.
    pub(crate) fn counts(&mut self, groups: usize, rows: usize) -> Vec<usize> {
        let mut counts = vec![0; groups];
        let alone = self.size(0..=3) == 0;
        let favourite = self.size(0..=groups - 1);
        for _ in 0..rows {
            let group = if alone {
                favourite
            } else {
                self.size(0..=groups - 1)
            };
            counts[group] += 1;
        }
        counts
    }
}

/// A result and what the reference says it should be.
pub(crate) struct Check(
    pub(crate) &'static str,
    pub(crate) Tensor,
    pub(crate) Vec<f64>,
);

impl Check {
    /// Sums whose terms may cancel: what a sum may be off by is a part of its terms, not of itself, so
    /// the norm of its terms (`scales`, one a sum) stands beside it, on both sides the same.
    pub(crate) fn of_sums(
        name: &'static str,
        sums: &Tensor,
        want: Vec<f64>,
        scales: impl Iterator<Item = f64>,
    ) -> Self {
        let scales: Vec<f32> = scales.map(|scale| scale as f32).collect();
        let got = [sums.to_f32(), scales.clone()].concat();
        let beside = sums
            .device()
            .empty(TensorClass::Activations, sums.dtype(), &[got.len()]);
        beside.copy_from_f32(&got);
        Self(name, beside, [want, wide(&scales)].concat())
    }
}

/// Runs `case` with random shapes on a CPU of one thread and one of three, which share even the
/// smallest work, with poisoned outputs; results agree with the reference, and bit for bit with each
/// other.
pub(crate) fn oracle(cases: u64, case: impl Fn(&Device, &mut Rng) -> Vec<Check>) {
    for seed in seeds(cases) {
        on_cpus(seed, &case);
    }
}

/// As [`oracle`], and on every emulated CUDA device too: in f32 and in bf16, on an architecture
/// without warpgroup products and on one with.
pub(crate) fn oracle_everywhere(cases: u64, case: impl Fn(&Device, &mut Rng) -> Vec<Check>) {
    for seed in seeds(cases) {
        on_cpus(seed, &case);
        for device in emulated(seed) {
            let checks = catch(|| case(&device, &mut Rng::of(seed, device.dtype())))
                .unwrap_or_else(|error| panic!("on {device:?}, MOEFOLD_SEED={seed}: {error}"));
            for check in checks {
                agree(&check, &device, seed);
            }
        }
    }
}

fn seeds(cases: u64) -> std::ops::Range<u64> {
    let first = std::env::var("MOEFOLD_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(1);
    first..first + cases
}

/// Runs a test on a CPU of one thread and on every emulated device.
pub(crate) fn on_every_device(seed: u64, test: impl Fn(&Device)) {
    for device in [vec![Device::cpu(1)], emulated(seed)].concat() {
        catch(|| test(&device)).unwrap_or_else(|error| panic!("on {device:?}: {error}"));
    }
}

/// The emulated devices of a test, with poisoned outputs; none where there is no emulator.
pub(crate) fn emulated(seed: u64) -> Vec<Device> {
    let devices = [
        (Architecture::SM80, Dtype::F32),
        (Architecture::SM80, Dtype::Bf16),
        (Architecture::SM90, Dtype::Bf16),
    ];
    let made = |(architecture, dtype)| moefold_emulator::device(architecture, dtype, seed);
    let devices: Vec<_> = devices.map(made).into_iter().filter_map(at_hand).collect();
    for device in &devices {
        device.poison(true);
    }
    devices
}

fn on_cpus(seed: u64, case: &impl Fn(&Device, &mut Rng) -> Vec<Check>) {
    let [one, three] = [1, 3].map(|threads| {
        let device = Device::cpu_sharing_all(threads);
        device.poison(true);
        let checks = case(&device, &mut Rng::new(seed));
        (device, checks)
    });
    for (check, Check(name, other, _)) in one.1.iter().zip(&three.1) {
        agree(check, &one.0, seed);
        assert_bits(name, &check.1.to_f32(), &other.to_f32(), seed);
    }
}

#[track_caller]
fn agree(Check(name, got, want): &Check, device: &Device, seed: u64) {
    let (dtype, got) = (got.dtype(), got.to_f32());
    assert_eq!(
        got.len(),
        want.len(),
        "{name}: length on {device:?}, MOEFOLD_SEED={seed}"
    );
    let error = error(&got, want);
    assert!(
        error <= tolerance(dtype),
        "{name}: error norm {error:.2e} of the reference on {device:?}, MOEFOLD_SEED={seed}"
    );
}

/// `|got - want| / |want|`; the absolute norm where the reference is zero.
pub(crate) fn error(got: &[f32], want: &[f64]) -> f64 {
    let difference: f64 = got
        .iter()
        .zip(want)
        .map(|(&g, w)| (f64::from(g) - w).powi(2))
        .sum();
    let reference: f64 = want.iter().map(|w| w * w).sum();
    if reference == 0.0 {
        difference.sqrt()
    } else {
        (difference / reference).sqrt()
    }
}

/// As [`tensor`], `start` elements into its memory: most of those break the alignment that wide
/// accesses need.
pub(crate) fn tensor_at(device: &Device, start: usize, values: &[f32], dims: &[usize]) -> Tensor {
    let len = start + values.len();
    let memory = device.empty(TensorClass::Activations, device.dtype(), &[len]);
    let tensor = memory.view(start, dims);
    tensor.copy_from_f32(values);
    tensor
}

/// The same values `offset` elements from the start of a larger buffer: where it is 16 bytes, or not.
pub(crate) fn inside(tensor: &Tensor, offset: usize) -> Tensor {
    let (class, dtype) = (tensor.class(), tensor.dtype());
    let all = tensor
        .device()
        .empty(class, dtype, &[offset + tensor.len()]);
    let view = all.view(offset, tensor.dims());
    view.copy_from_f32(&tensor.to_f32());
    view
}

/// As [`Rng::values`], with more bits than bf16 has on any device, as statistics have them.
pub(crate) fn statistics(rng: &mut Rng, len: usize) -> Vec<f32> {
    let (upper, lower) = (rng.values(len), rng.values(len));
    let both = upper.into_iter().zip(lower);
    both.map(|(upper, lower)| upper + lower / 256.0).collect()
}

pub(crate) fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

pub(crate) fn inner(x: &[f64], y: &[f32]) -> f64 {
    assert_eq!(x.len(), y.len());
    x.iter().zip(y).map(|(x, &y)| x * f64::from(y)).sum()
}

/// The gradient of `f` at `x` by central differences; good to about 1e-9 in f64, and
/// zero below that.
pub(crate) fn differences(x: &[f32], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let mut x = wide(x);
    (0..x.len())
        .map(|i| {
            let at = x[i];
            x[i] = at + STEP;
            let above = f(&x);
            x[i] = at - STEP;
            let below = f(&x);
            x[i] = at;
            let slope = (above - below) / (2.0 * STEP);
            if slope.abs() < 1e-9 { 0.0 } else { slope }
        })
        .collect()
}

/// `op(A) op(B)` by definition.
pub(crate) fn product(
    a: impl Fn(usize, usize) -> f64,
    b: impl Fn(usize, usize) -> f64,
    [m, n, k]: [usize; 3],
) -> Vec<f64> {
    let mut c = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            c.push((0..k).map(|l| a(i, l) * b(l, j)).sum());
        }
    }
    c
}
