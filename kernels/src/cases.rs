//! Operands of every op, in one home: for a key of a cost table, tensors of its shape and the op on them.
//!
//! The profile times these calls, [`crate::check`] compares what they write with a reference, and
//! `examples/ops.rs` times them on the CPU. What numbers operands hold is their [`Source`]'s business.
//! Variants that no key tells apart (other masks, routers and layouts of weights), odd shapes,
//! references and tolerances are in `check`.

use moefold_profiles::{Op, Pass};

use crate::device::Device;
use crate::tensor::Tensor;

mod attention;
mod grouped;
mod pointwise;
mod products;
mod routing;
mod rows;
mod sweeps;

pub(crate) use attention::{Rotary, divided, rotation};
pub(crate) use grouped::grouped;
pub(crate) use pointwise::{rests, shard};
pub(crate) use products::factors;
pub(crate) use routing::SOFTMAX_THEN_TOPK;
pub(crate) use rows::lookup;

/// Where operands come from.
pub trait Source {
    /// The device that holds them.
    fn device(&self) -> &Device;

    /// A weight or an activation, in the dtype of the op. Its numbers are of this scale where results
    /// are compared; a source for times alone may draw them at its own.
    fn tensor(&mut self, dims: &[usize], scale: f32) -> Tensor;

    /// What is f32 on every device: statistics, probabilities, gradients of weights.
    fn statistic(&mut self, dims: &[usize], scale: f32) -> Tensor;

    /// Ids below `below`.
    fn ids(&mut self, dims: &[usize], below: usize) -> Tensor;
}

/// How rows fall to the groups of a grouped product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// As equally as may be.
    Even,
    /// Falling as 1, 1/2, 1/3, the last group empty.
    Skewed,
}

impl Load {
    /// Rows of each of `groups`, `rows` in all. One group has them all.
    pub fn counts(self, rows: usize, groups: usize) -> Vec<usize> {
        if self == Self::Even || groups < 2 {
            let until = |group: usize| group * rows / groups;
            return (0..groups).map(|e| until(e + 1) - until(e)).collect();
        }
        let shares: Vec<f64> = (1..groups).map(|nth| 1.0 / nth as f64).collect();
        let all: f64 = shares.iter().sum();
        let share = |share: &f64| (rows as f64 * share / all) as usize;
        let mut counts: Vec<usize> = shares.iter().map(share).chain([0]).collect();
        counts[0] += rows - counts.iter().sum::<usize>();
        counts
    }
}

/// Takes what an op wrote, by name.
pub type Outputs<'a> = dyn FnMut(&'static str, &Tensor) + 'a;

/// An op with its operands. They live as long as it does.
pub struct Call(Box<dyn Fn(&mut Outputs<'_>)>);

impl Call {
    fn new(run: impl Fn(&mut Outputs<'_>) + 'static) -> Self {
        Self(Box::new(run))
    }

    /// Runs the op once. What it made is dropped; what it writes in place stays written.
    pub fn run(&self) {
        self.run_into(&mut |_, _| {});
    }

    /// Runs the op once and hands over what it wrote.
    pub fn run_into(&self, outputs: &mut Outputs<'_>) {
        (self.0)(outputs);
    }
}

/// The op of a key, on operands of this source.
///
/// # Panics
/// For what no kernel does: linear attention, attention of other queries than keys, an odd width
/// rotated.
pub fn call(source: &mut dyn Source, op: &Op, load: Load) -> Call {
    match *op {
        Op::Gemm {
            m,
            n,
            k,
            pass,
            dtype,
        } => products::product(source, [m, n, k].map(|size| size as usize), pass, dtype),
        Op::GroupedGemm {
            groups,
            rows,
            n,
            k,
            pass,
            ..
        } => {
            let counts = load.counts(rows as usize, groups as usize);
            grouped(source, counts.into(), [n as usize, k as usize], pass)
        }
        Op::Attention { .. } => attention::core(source, op),
        Op::RmsNorm {
            rows, dim, pass, ..
        } => rows::norm(source, [rows as usize, dim as usize], pass),
        Op::Rope {
            rows, dim, pass, ..
        } => attention::rotation_of_rows(source, rows as usize, dim as usize, pass),
        Op::LatentKv { .. } => attention::latent(source, op),
        Op::Swiglu {
            rows, dim, pass, ..
        } => routing::activation(source, rows as usize, dim as usize, pass),
        Op::Router {
            rows,
            experts,
            topk,
            pass,
        } => routing::choice(source, [rows, experts, topk].map(|n| n as usize), pass),
        // A permutation copies rows in forward and sums them in backward, its inverse the other way
        // round.
        Op::Permute {
            rows, dim, pass, ..
        } => routing::permutation(source, rows as usize, dim as usize, pass == Pass::Forward),
        Op::Unpermute {
            rows, dim, pass, ..
        } => routing::permutation(source, rows as usize, dim as usize, pass != Pass::Forward),
        Op::Embedding {
            rows, dim, pass, ..
        } => lookup(source, [rows as usize, rows::VOCAB, dim as usize], pass),
        Op::CrossEntropy {
            rows, vocab, pass, ..
        } => rows::loss(source, rows as usize, vocab as usize, pass),
        Op::Add { len, .. } => pointwise::sum(source, len as usize),
        Op::Adamw {
            len,
            dtype,
            moments,
            remainders,
        } => pointwise::step(source, len as usize, [dtype, moments], remainders),
        Op::Sweep { kind, len, dtype } => sweeps::sweep(source, kind, len as usize, dtype),
        Op::GradNorm { len } => pointwise::squares(source, len as usize),
        Op::LinearAttention { .. } => panic!("{op:?}: no kernel does linear attention"),
    }
}

#[cfg(test)]
mod tests {
    use super::Load;

    #[test]
    fn loads_deal_every_row() {
        for (rows, groups) in [(138, 5), (7, 8), (9, 1), (0, 3), (4096, 16)] {
            for load in [Load::Even, Load::Skewed] {
                let counts = load.counts(rows, groups);
                assert_eq!(counts.len(), groups);
                assert_eq!(counts.iter().sum::<usize>(), rows, "{load:?} {counts:?}");
            }
            let even = Load::Even.counts(rows, groups);
            let (least, most) = (even.iter().min(), even.iter().max());
            assert!(most <= least.map(|least| least + 1).as_ref(), "{even:?}");
        }
        assert_eq!(Load::Skewed.counts(110, 4), [60, 30, 20, 0]);
    }
}
