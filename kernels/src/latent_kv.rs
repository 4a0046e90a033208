//! Keys and values of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), from what the
//! up-projection gives for each head and the rotated part that all keys of a token share.
//!
//! `kv [T, n, nope + v]` holds for each head the unrotated part of its key and its value, `shared [T, rope]`
//! the rotated part: a key is `[nope, rope]`. Backward takes the keys' and values' gradients apart again; that
//! of the shared part is the sum over heads, in a fixed order.
//!
//! A device implementation: copies, and one sum of `n` rows a token in f32. The floor: either pass moves
//! `T (n (2 nope + 2 v + rope) + rope)` elements. A GPU takes shared parts of up to [`MAX_SHARED`] elements.

use moefold_profiles::{Op, Pass};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::tensor::{Tensor, expect_dims};

/// The widest shared part that a GPU sums: as wide as its attention takes keys.
pub const MAX_SHARED: usize = 256;

/// Sizes of one call.
#[derive(Clone, Copy)]
struct Sizes {
    tokens: usize,
    heads: usize,
    nope: usize,
    rope: usize,
    v: usize,
}

impl Sizes {
    fn key(self, pass: Pass, of: &Tensor) -> Op {
        Op::LatentKv {
            rows: self.tokens as u64,
            heads: self.heads as u64,
            nope: self.nope as u64,
            rope: self.rope as u64,
            v_dim: self.v as u64,
            pass,
            dtype: of.dtype(),
        }
    }

    fn kv(self) -> [usize; 3] {
        [self.tokens, self.heads, self.nope + self.v]
    }

    fn keys(self) -> [usize; 3] {
        [self.tokens, self.heads, self.nope + self.rope]
    }

    fn values(self) -> [usize; 3] {
        [self.tokens, self.heads, self.v]
    }

    fn shared(self) -> [usize; 2] {
        [self.tokens, self.rope]
    }

    /// Elements that a pass moves.
    fn work(self) -> usize {
        self.tokens * (self.heads * (2 * (self.nope + self.v) + self.rope) + self.rope)
    }
}

/// `kv [T, n, nope + v]`, `shared [T, rope]` to `(keys [T, n, nope + rope], values [T, n, v])`.
///
/// # Panics
/// When the shapes do not agree.
pub fn forward(kv: &Tensor, shared: &Tensor, v: usize) -> (Tensor, Tensor) {
    const OP: &str = "latent_kv::forward";
    let (&[tokens, heads, width], &[_, rope]) = (kv.dims(), shared.dims()) else {
        panic!("{OP}: {kv:?} and {shared:?}, expected [tokens, heads, width] and [tokens, rope]")
    };
    assert!(v <= width, "{OP}: values of {v} are not inside {kv:?}");
    let nope = width - v;
    let sizes = Sizes {
        tokens,
        heads,
        nope,
        rope,
        v,
    };
    let _op = kv.device().begin(|| sizes.key(Pass::Forward, kv));
    expect_dims(OP, "shared", shared, &sizes.shared());
    let device = kv.device();
    let new = |dims: [usize; 3]| device.empty(TensorClass::Activations, kv.dtype(), &dims);
    let (keys, values) = (new(sizes.keys()), new(sizes.values()));
    match &device.0.backend {
        Backend::Cpu(cpu) => with(
            OP,
            [kv, shared],
            [&keys, &values],
            |[kv, shared], [keys, values]| {
                cpu::forward(
                    cpu,
                    sizes,
                    [kv.f32(), shared.f32()],
                    keys.f32(),
                    values.f32(),
                );
            },
        ),
        Backend::Cuda(gpu) => cuda::forward(gpu, OP, sizes, [kv, shared], [&keys, &values]),
    }
    (keys, values)
}

/// `dkeys [T, n, nope + rope]`, `dvalues [T, n, v]` to `(dkv [T, n, nope + v], dshared [T, rope])`.
///
/// # Panics
/// When the shapes do not agree.
pub fn backward(dkeys: &Tensor, dvalues: &Tensor, rope: usize) -> (Tensor, Tensor) {
    const OP: &str = "latent_kv::backward";
    let (&[tokens, heads, width], &[_, _, v]) = (dkeys.dims(), dvalues.dims()) else {
        panic!("{OP}: {dkeys:?} and {dvalues:?}, expected [tokens, heads, width] both")
    };
    assert!(
        rope <= width,
        "{OP}: shared parts of {rope} are not inside {dkeys:?}"
    );
    let sizes = Sizes {
        tokens,
        heads,
        nope: width - rope,
        rope,
        v,
    };
    let _op = dkeys.device().begin(|| sizes.key(Pass::Backward, dkeys));
    expect_dims(OP, "dvalues", dvalues, &sizes.values());
    let device = dkeys.device();
    let new = |dims: &[usize]| device.empty(TensorClass::Activations, dkeys.dtype(), dims);
    let (dkv, dshared) = (new(&sizes.kv()), new(&sizes.shared()));
    match &device.0.backend {
        Backend::Cpu(cpu) => with(
            OP,
            [dkeys, dvalues],
            [&dkv, &dshared],
            |[dkeys, dvalues], [dkv, dshared]| {
                let inputs = [dkeys.f32(), dvalues.f32()];
                cpu::backward(cpu, sizes, inputs, dkv.f32(), dshared.f32());
            },
        ),
        Backend::Cuda(gpu) => cuda::backward(gpu, OP, sizes, [dkeys, dvalues], [&dkv, &dshared]),
    }
    (dkv, dshared)
}

mod cpu {
    use super::Sizes;
    use crate::parallel::Cpu;

    pub(super) fn forward(
        cpu: &Cpu,
        s: Sizes,
        [kv, shared]: [&[f32]; 2],
        keys: &mut [f32],
        values: &mut [f32],
    ) {
        let [of_kv, of_keys, of_values] = widths(s);
        let outputs = [(keys, of_keys), (values, of_values)];
        cpu.rows(s.tokens, s.work(), outputs, |range, [keys, values]| {
            for (at, token) in range.enumerate() {
                let kv = &kv[token * of_kv..][..of_kv];
                let shared = &shared[token * s.rope..][..s.rope];
                for head in 0..s.heads {
                    let (nope, value) =
                        kv[head * (s.nope + s.v)..][..s.nope + s.v].split_at(s.nope);
                    let key = &mut keys[at * of_keys + head * (s.nope + s.rope)..];
                    key[..s.nope].copy_from_slice(nope);
                    key[s.nope..][..s.rope].copy_from_slice(shared);
                    values[at * of_values + head * s.v..][..s.v].copy_from_slice(value);
                }
            }
        });
    }

    pub(super) fn backward(
        cpu: &Cpu,
        s: Sizes,
        [dkeys, dvalues]: [&[f32]; 2],
        dkv: &mut [f32],
        dshared: &mut [f32],
    ) {
        let [of_kv, of_keys, of_values] = widths(s);
        let outputs = [(dkv, of_kv), (dshared, s.rope)];
        cpu.rows(s.tokens, s.work(), outputs, |range, [dkv, dshared]| {
            dshared.fill(0.0);
            for (at, token) in range.enumerate() {
                let sum = &mut dshared[at * s.rope..][..s.rope];
                for head in 0..s.heads {
                    let dkey = &dkeys[token * of_keys + head * (s.nope + s.rope)..];
                    let dvalue = &dvalues[token * of_values + head * s.v..][..s.v];
                    let both = &mut dkv[at * of_kv + head * (s.nope + s.v)..][..s.nope + s.v];
                    both[..s.nope].copy_from_slice(&dkey[..s.nope]);
                    both[s.nope..].copy_from_slice(dvalue);
                    let parts = dkey[s.nope..][..s.rope].iter();
                    sum.iter_mut().zip(parts).for_each(|(sum, x)| *sum += x);
                }
            }
        });
    }

    /// Elements of a token in kv, keys and values.
    fn widths(s: Sizes) -> [usize; 3] {
        [s.nope + s.v, s.nope + s.rope, s.v].map(|width| s.heads * width)
    }
}

pub(crate) mod cuda;
