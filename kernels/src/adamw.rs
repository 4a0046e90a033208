//! The AdamW step, in place.
//!
//! `g = scale * grad`; `m = b1 m + (1-b1) g`; `v = b2 v + (1-b2) g^2`;
//! `w = w (1 - lr wd) - lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)`, decay decoupled
//! (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2, with PyTorch's reading of eps).
//!
//! A device implementation: one elementwise pass over f32 master weights and moments, which also
//! writes the model's narrower weights ([`step_into`]). Moments may be bf16 (Transformer Engine's fused Adam
//! with `exp_avg_dtype`): they are widened, and what is stored is the nearest bf16, ties to even; the weights
//! are updated with the moments before that.
//!
//! Narrow weights are their masters rounded to the nearest bf16, ties away from zero, here and in
//! [`put_masters`]: then a weight and the lower half of its master, the *remainder*, are the master to the bit,
//! and the remainder can be all that is kept beside the weight (Transformer Engine's
//! `store_param_remainders`). Rounded to even, 65537 masters have the same even weight, one more than a
//! remainder tells apart.

use moefold_profiles::{Dtype, Op};

use crate::bf16;
use crate::buffer::with;
use crate::device::Backend;
use crate::elementwise;
use crate::scalars::{Factor, Known};
use crate::tensor::{Tensor, expect_dims};

pub(crate) use cuda::programs;

/// The numbers of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adamw {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay; 0 for tensors that do not decay.
    pub weight_decay: f64,
    /// The step, counted from 1.
    pub step: u64,
}

/// The cost-table key of a step on `masters`, those of a `model` where they are not its weights themselves, with moments
/// such as `m`.
pub fn key(masters: &Tensor, model: Option<&Tensor>, m: &Tensor) -> Op {
    Op::Adamw {
        len: masters.len() as u64,
        dtype: model.unwrap_or(masters).dtype(),
        moments: m.dtype(),
        remainders: are_remainders(masters),
    }
}

/// Whether masters are kept as what the model's weights lack of them. There are 16 bits of each, in a tensor of
/// bf16 whose values mean nothing.
fn are_remainders(masters: &Tensor) -> bool {
    masters.dtype() == Dtype::Bf16
}

/// Gives weights of a model and their masters, f32 or remainders, the values of `values`: to the former rounded
/// where they are narrow. Where both are the same memory, it is written once.
///
/// # Panics
/// When the lengths differ, or `masters` are remainders and `model` is not of bf16.
pub fn put_masters(model: Option<&Tensor>, masters: Option<&Tensor>, values: &[f32]) {
    let halves = |of: fn(f32) -> u16| -> Vec<u16> { values.iter().map(|&v| of(v)).collect() };
    if let Some(model) = model {
        if model.dtype() == Dtype::Bf16 {
            model.copy_from_halves(&halves(bf16::of_master));
        } else {
            model.copy_from_f32(values);
        }
    }
    if let Some(masters) = masters {
        if are_remainders(masters) {
            masters.copy_from_halves(&halves(bf16::remainder));
        } else {
            masters.copy_from_f32(values);
        }
    }
}

/// The masters of a model's weights, f32 or remainders, on the host.
///
/// # Panics
/// When the lengths differ, or `masters` are remainders and `model` is not of bf16.
pub fn masters_of(model: &Tensor, masters: &Tensor) -> Vec<f32> {
    expect_dims("adamw::masters_of", "masters", masters, model.dims());
    if !are_remainders(masters) {
        return masters.to_f32();
    }
    let pairs = model.to_halves().into_iter().zip(masters.to_halves());
    pairs
        .map(|(weight, rest)| bf16::master(weight, rest))
        .collect()
}

/// One step on f32 `weights` with `grad * scale`; updates `weights`, `m` and `v` in place.
///
/// # Panics
/// When the shapes differ, the moments are not both of f32 or both of bf16, or the step is 0.
pub fn step(weights: &Tensor, grad: &Tensor, m: &Tensor, v: &Tensor, rule: &Adamw, scale: f32) {
    step_into(weights, grad, m, v, None, rule, scale);
}

/// As [`step`] on the masters `weights`, and writes the updated ones to `model`, in its dtype.
/// Where `model` is the same memory, the masters are the model's weights and nothing more is done. Where
/// `weights` are remainders, masters are made of them and `model`, which is of bf16, with the same bits.
///
/// # Panics
/// When the shapes differ, the step is 0, or remainders have no `model` of bf16.
pub fn step_into(
    weights: &Tensor,
    grad: &Tensor,
    m: &Tensor,
    v: &Tensor,
    model: Option<&Tensor>,
    rule: &Adamw,
    scale: f32,
) {
    step_by(weights, grad, m, v, model, rule, &Factor::of(scale));
}

/// As [`step_into`], with a scale that may be known to the device alone.
///
/// # Panics
/// When the shapes differ or the step is 0.
pub fn step_by(
    weights: &Tensor,
    grad: &Tensor,
    m: &Tensor,
    v: &Tensor,
    model: Option<&Tensor>,
    rule: &Adamw,
    scale: &Factor,
) {
    for (name, t) in [("grad", grad), ("m", m), ("v", v)] {
        expect_dims("adamw::step", name, t, weights.dims());
    }
    let model = model.filter(|model| !model.same_memory(weights));
    if let Some(model) = model {
        expect_dims("adamw::step", "model", model, weights.dims());
    }
    assert!(
        m.dtype() == v.dtype() && matches!(m.dtype(), Dtype::F32 | Dtype::Bf16),
        "adamw::step: moments are {m:?} and {v:?}, expected both f32 or both bf16"
    );
    let remainders = are_remainders(weights);
    assert!(
        !remainders || model.is_some_and(|model| model.dtype() == Dtype::Bf16),
        "adamw::step: remainders {weights:?} of {model:?}, expected a model of bf16"
    );
    assert!(
        rule.step > 0,
        "adamw::step: steps are counted from 1, got 0"
    );
    let _op = weights.device().begin(|| key(weights, model, m));
    let (scale, factor) = match &scale.0 {
        Known::Host(scale) => (*scale, None),
        Known::Device(factor) => (1.0, Some(factor)),
    };
    let numbers = Numbers::of(rule, scale);
    let narrow = m.dtype() == Dtype::Bf16;
    match &weights.device().0.backend {
        Backend::Cpu(cpu) => {
            assert!(
                factor.is_none(),
                "adamw::step: the scale is another device's"
            );
            if remainders {
                let model = model.expect("remainders are of one");
                return cpu::step_remainders(cpu, grad, [model, weights, m, v], numbers);
            }
            with(
                "adamw::step",
                [grad],
                [weights, m, v],
                |[grad], [w, m, v]| {
                    let (grad, w) = (grad.f32(), w.f32());
                    if narrow {
                        cpu::step_narrow(cpu, grad, w, m.bf16(), v.bf16(), numbers);
                    } else {
                        cpu::step(cpu, grad, w, m.f32(), v.f32(), numbers);
                    }
                },
            );
            match model {
                Some(model) if model.dtype() == Dtype::Bf16 => {
                    with("adamw::step", [weights], [model], |[w], [model]| {
                        for (weight, &w) in model.bf16().iter_mut().zip(w.f32()) {
                            *weight = bf16::of_master(w);
                        }
                    });
                }
                Some(model) => elementwise::copy(weights, model),
                None => {}
            }
        }
        Backend::Cuda(gpu) => cuda::step(gpu, grad, [weights, m, v], model, numbers, factor),
    }
}

/// The step's numbers as the loop over elements uses them.
#[derive(Clone, Copy)]
struct Numbers {
    scale: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    keep: f32,
    rate: f32,
    root: f32,
    eps: f32,
}

impl Numbers {
    fn of(rule: &Adamw, scale: f32) -> Self {
        let t = rule.step as f64;
        Self {
            scale,
            beta1: rule.beta1 as f32,
            rest1: (1.0 - rule.beta1) as f32,
            beta2: rule.beta2 as f32,
            rest2: (1.0 - rule.beta2) as f32,
            keep: (1.0 - rule.lr * rule.weight_decay) as f32,
            rate: (rule.lr / (1.0 - rule.beta1.powf(t))) as f32,
            root: (1.0 / (1.0 - rule.beta2.powf(t)).sqrt()) as f32,
            eps: rule.eps as f32,
        }
    }
}

mod cpu {
    use moefold_profiles::Dtype;

    use super::Numbers;
    use crate::bf16;
    use crate::buffer::with;
    use crate::parallel::Cpu;
    use crate::simd::vectorized;
    use crate::tensor::Tensor;

    /// Elements of a task where moments are bf16.
    const BLOCK: usize = 1 << 16;

    pub(super) fn step(
        cpu: &Cpu,
        grad: &[f32],
        w: &mut [f32],
        m: &mut [f32],
        v: &mut [f32],
        numbers: Numbers,
    ) {
        let outputs = [(w, 1), (m, 1), (v, 1)];
        cpu.rows(grad.len(), 4 * grad.len(), outputs, |range, [w, m, v]| {
            update(&grad[range], w, m, v, numbers);
        });
    }

    /// With moments of bf16.
    pub(super) fn step_narrow(
        cpu: &Cpu,
        grad: &[f32],
        w: &mut [f32],
        m: &mut [u16],
        v: &mut [u16],
        numbers: Numbers,
    ) {
        let moments = m.chunks_mut(BLOCK).zip(v.chunks_mut(BLOCK));
        let weights = w.chunks_mut(BLOCK).zip(grad.chunks(BLOCK));
        cpu.tasks(weights.zip(moments).collect(), |((w, grad), (m, v))| {
            update_narrow(grad, w, m, v, numbers);
        });
    }

    /// With masters as remainders: made whole, updated and divided again. What a GPU does in registers is done
    /// in memory of the host here, for comparison.
    pub(super) fn step_remainders(cpu: &Cpu, grad: &Tensor, state: [&Tensor; 4], numbers: Numbers) {
        let [_, _, m, _] = state;
        let narrow = m.dtype() == Dtype::Bf16;
        with(
            "adamw::step",
            [grad],
            state,
            |[grad], [model, rest, m, v]| {
                let (model, rest) = (model.bf16(), rest.bf16());
                let pairs = model.iter().zip(rest.iter());
                let mut w: Vec<f32> = pairs.map(|(&w, &rest)| bf16::master(w, rest)).collect();
                if narrow {
                    step_narrow(cpu, grad.f32(), &mut w, m.bf16(), v.bf16(), numbers);
                } else {
                    step(cpu, grad.f32(), &mut w, m.f32(), v.f32(), numbers);
                }
                for ((model, rest), &w) in model.iter_mut().zip(rest).zip(&w) {
                    (*model, *rest) = (bf16::of_master(w), bf16::remainder(w));
                }
            },
        );
    }

    #[expect(
        clippy::inline_always,
        reason = "compiled for the vectors of who calls it"
    )]
    #[inline(always)]
    fn one(w: &mut f32, g: f32, m: &mut f32, v: &mut f32, n: Numbers) {
        let g = g * n.scale;
        *m = n.beta1 * *m + n.rest1 * g;
        *v = n.beta2 * *v + n.rest2 * (g * g);
        *w = *w * n.keep - n.rate * *m / (v.sqrt() * n.root + n.eps);
    }

    vectorized! {
        fn update_narrow(grad: &[f32], w: &mut [f32], m: &mut [u16], v: &mut [u16], n: Numbers) {
            let moments = m.iter_mut().zip(v.iter_mut());
            for ((w, &g), (m, v)) in w.iter_mut().zip(grad).zip(moments) {
                let [mut first, mut second] = [bf16::widen(*m), bf16::widen(*v)];
                one(w, g, &mut first, &mut second, n);
                [*m, *v] = [bf16::narrow(first), bf16::narrow(second)];
            }
        }
    }

    vectorized! {
        fn update(grad: &[f32], w: &mut [f32], m: &mut [f32], v: &mut [f32], n: Numbers) {
            let moments = m.iter_mut().zip(v.iter_mut());
            for ((w, &g), (m, v)) in w.iter_mut().zip(grad).zip(moments) {
                one(w, g, m, v, n);
            }
        }
    }
}

mod cuda {
    //! The launch.

    use moefold_profiles::Dtype;

    use super::Numbers;
    use crate::buffer::disjoint;
    use crate::cuda::Cuda;
    use crate::cuda::flat::Flat;
    use crate::cuda::program::{Arg, Define, Entry, Listed, Needs, Program, Source, source};
    use crate::tensor::Tensor;

    const SOURCE: Source = source!("adamw");

    /// `model` is the dtype of the model's weights, where they are written; masters of bf16 are remainders.
    fn program(
        grad: Dtype,
        [masters, moments]: [Dtype; 2],
        model: Option<Dtype>,
        piece: Define,
    ) -> Program {
        SOURCE.with(&[
            Define::dtype("GRAD", grad),
            Define::dtype("MASTER", masters),
            Define::dtype("MOMENT", moments),
            Define::dtype("MODEL", model.unwrap_or(Dtype::F32)),
            Define::flag("WRITES", model.is_some()),
            piece,
        ])
    }

    pub(super) fn step(
        gpu: &Cuda,
        grad: &Tensor,
        [weights, m, v]: [&Tensor; 3],
        model: Option<&Tensor>,
        n: Numbers,
        factor: Option<&Tensor>,
    ) {
        let mut written = vec![weights, m, v];
        assert!(
            matches!(weights.dtype(), Dtype::F32 | Dtype::Bf16),
            "adamw::step: weights is {weights:?}, expected f32, or remainders in bf16"
        );
        written.extend(model);
        let read: Vec<&Tensor> = [grad].into_iter().chain(factor).collect();
        disjoint("adamw::step", &read, &written);
        written.push(grad);
        let flat = Flat::of(&written);
        gpu.launch(
            "adamw::step",
            &program(
                grad.dtype(),
                [weights.dtype(), m.dtype()],
                model.map(Tensor::dtype),
                flat.define(),
            ),
            "adamw_step",
            flat.grid(1),
            &[
                grad.into(),
                weights.into(),
                m.into(),
                v.into(),
                Arg::optional(model),
                Arg::optional(factor),
                flat.len(),
                flat.head(),
                Arg::F32(n.scale),
                Arg::F32(n.beta1),
                Arg::F32(n.rest1),
                Arg::F32(n.beta2),
                Arg::F32(n.rest2),
                Arg::F32(n.keep),
                Arg::F32(n.rate),
                Arg::F32(n.root),
                Arg::F32(n.eps),
            ],
        );
    }

    /// What is launched, with its limits: for operands at the same place in 16 bytes.
    pub(crate) fn programs() -> Vec<Listed> {
        let mut programs = Vec::new();
        for grad in [Dtype::F32, Dtype::Bf16] {
            for moments in [Dtype::F32, Dtype::Bf16] {
                let (wide, rest) = (Dtype::F32, Dtype::Bf16);
                for (masters, model, piece, needs) in [
                    (wide, None, 4, Needs::Sm80),
                    (wide, Some(Dtype::Bf16), 4, Needs::Sm80),
                    (rest, Some(Dtype::Bf16), 4, Needs::Sm80),
                    (wide, Some(Dtype::F32), 4, Needs::Odd),
                    (wide, None, 1, Needs::Odd),
                    (wide, Some(Dtype::Bf16), 1, Needs::Odd),
                    (rest, Some(Dtype::Bf16), 1, Needs::Odd),
                    (wide, Some(Dtype::F32), 1, Needs::Odd),
                ] {
                    let piece = Define::int("PIECE", piece);
                    programs.push(Listed {
                        program: program(grad, [masters, moments], model, piece),
                        needs,
                        entries: vec![Entry::plain("adamw_step", 48, 0)],
                    });
                }
            }
        }
        programs
    }
}
