//! Rotary position embedding, half style, in place.
//!
//! The first `rotary_dim` elements of each head vector are rotated in pairs `(i, i + rotary_dim/2)`
//! by the angle `position * theta^(-2i / rotary_dim)` (Su et al. 2021, arXiv 2104.09864, in the
//! pairing of Hugging Face `rotate_half`); the others pass. Backward is the inverse rotation.
//!
//! A device implementation: elementwise over `[tokens, heads, d]`, from tables of cosines and sines
//! that are made in f64 on the host and rounded once.

use moefold_profiles::{Op, Pass};

use crate::buffer::with;
use crate::device::{Backend, Device, TensorClass};
use crate::tensor::{Tensor, expect_dims};

/// Cosines and sines of the angles, one row a token.
#[derive(Debug, Clone)]
pub struct Rope {
    /// `[tokens, rotary_dim / 2]`.
    pub cos: Tensor,
    /// `[tokens, rotary_dim / 2]`.
    pub sin: Tensor,
}

/// The cost-table key for `x: [tokens, heads, d]`.
pub fn key(x: &Tensor, pass: Pass) -> Op {
    Op::Rope {
        rows: x.num_rows() as u64,
        dim: x.width() as u64,
        pass,
        dtype: x.dtype(),
    }
}

/// The tables for tokens at these positions.
///
/// # Panics
/// When `rotary_dim` is odd.
pub fn table(device: &Device, positions: &[u32], rotary_dim: usize, theta: f64) -> Rope {
    assert!(
        rotary_dim.is_multiple_of(2),
        "rope::table: rotary_dim is {rotary_dim}, expected even"
    );
    let half = rotary_dim / 2;
    let frequencies: Vec<f64> = (0..half)
        .map(|i| theta.powf(-2.0 * i as f64 / rotary_dim as f64))
        .collect();
    let values = |f: fn(f64) -> f64| -> Vec<f32> {
        let angles = positions
            .iter()
            .flat_map(|&p| frequencies.iter().map(move |w| f64::from(p) * w));
        angles.map(|angle| f(angle) as f32).collect()
    };
    let dims = [positions.len(), half];
    Rope {
        cos: device.from_f32(TensorClass::Transient, &values(f64::cos), &dims),
        sin: device.from_f32(TensorClass::Transient, &values(f64::sin), &dims),
    }
}

/// Rotates `x [tokens, heads, d]` in place.
///
/// # Panics
/// When the table is of other tokens or wider than a head.
pub fn forward(x: &Tensor, rope: &Rope) {
    rotate("rope::forward", x, rope, 1.0);
}

/// Rotates the gradient `dx [tokens, heads, d]` back, in place.
///
/// # Panics
/// When the table is of other tokens or wider than a head.
pub fn backward(dx: &Tensor, rope: &Rope) {
    rotate("rope::backward", dx, rope, -1.0);
}

fn rotate(op: &str, x: &Tensor, rope: &Rope, direction: f32) {
    let &[tokens, heads, d] = x.dims() else {
        panic!("{op}: x is {x:?}, expected [tokens, heads, d]")
    };
    let half = rope.cos.width();
    assert!(
        2 * half <= d,
        "{op}: the table rotates {} elements of heads of {d}",
        2 * half
    );
    expect_dims(op, "cos", &rope.cos, &[tokens, half]);
    match &x.device().0.backend {
        Backend::Cpu(cpu) => with(op, [&rope.cos, &rope.sin], [x], |[cos, sin], [x]| {
            cpu::rotate(
                cpu,
                x.f32(),
                [tokens, heads, d],
                cos.f32(),
                sin.f32(),
                direction,
            );
        }),
        Backend::Cuda(gpu) => gpu.unwritten("rope::rotate"),
    }
}

mod cpu {
    use crate::parallel::Cpu;
    use crate::simd::vectorized;

    pub(super) fn rotate(
        cpu: &Cpu,
        x: &mut [f32],
        [tokens, heads, d]: [usize; 3],
        cos: &[f32],
        sin: &[f32],
        direction: f32,
    ) {
        if tokens == 0 || cos.is_empty() {
            return;
        }
        let half = cos.len() / tokens;
        cpu.rows(tokens, x.len(), [(x, heads * d)], |range, [x]| {
            let table = range.start * half..range.end * half;
            rotate_tokens(
                x,
                heads,
                d,
                half,
                &cos[table.clone()],
                &sin[table],
                direction,
            );
        });
    }

    vectorized! {
        fn rotate_tokens(
            x: &mut [f32],
            heads: usize,
            d: usize,
            half: usize,
            cos: &[f32],
            sin: &[f32],
            direction: f32,
        ) {
            let tables = cos.chunks_exact(half).zip(sin.chunks_exact(half));
            for (token, (cos, sin)) in x.chunks_exact_mut(heads * d).zip(tables) {
                for head in token.chunks_exact_mut(d) {
                    let (first, rest) = head.split_at_mut(half);
                    let second = &mut rest[..half];
                    let (cos, sin) = (&cos[..half], &sin[..half]);
                    for i in 0..half {
                        let (a, b, c, s) = (first[i], second[i], cos[i], sin[i] * direction);
                        first[i] = a * c - b * s;
                        second[i] = b * c + a * s;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
