//! Tests of `adamw` against its f64 reference in plain loops.

use moefold_kernels::adamw::*;
use moefold_kernels::scalars::{Factor, Scalars};
use moefold_kernels::{Dtype, Tensor, TensorClass};

use crate::support::{
    Check, Rng, inside, on_every_device, oracle_everywhere, statistic, tensor, wide,
};

const RULE: Adamw = Adamw {
    lr: 1e-2,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    step: 1,
};

#[test]
fn oracle_several_steps() {
    oracle_everywhere(12, |device, rng| {
        let len = [0, 1, 3, 8, 33, 100, 1030][rng.size(0..=6)];
        let first = rng.values(len);
        // At any place in 16 bytes: all at the same, or the gradient elsewhere.
        let (offset, apart) = (rng.size(0..=4), rng.size(0..=1));
        let state = |values: &[f32]| inside(&statistic(device, values, &[len]), offset);
        let w = state(&first);
        let (m, v) = (state(&vec![0.0; len]), state(&vec![0.0; len]));
        let model = inside(&tensor(device, &first, &[len]), offset);
        let writes = rng.coin();
        let kind = [tensor, statistic][rng.size(0..=1)];
        let (mut ww, mut mw, mut vw) = (wide(&first), vec![0.0; len], vec![0.0; len]);
        let weight_decay = [0.0, 0.1][rng.size(0..=1)];
        let scale = 0.5f32;
        for t in 1..=4u64 {
            let grad = rng.values(len);
            let rule = Adamw {
                weight_decay,
                step: t,
                ..RULE
            };
            let g = inside(&kind(device, &grad, &[len]), offset + apart);
            let known = Scalars::zeros(device, TensorClass::Transient, 1);
            known.write(&[4.0]);
            if t == 3 {
                // The same scale, known to the device alone: clipped from 1 by a norm of 2.
                let factor = Factor::clipped(&known, 0, 1.0, Some(1.0 + 5e-7));
                step_by(&w, &g, &m, &v, writes.then_some(&model), &rule, &factor);
            } else if writes {
                step_into(&w, &g, &m, &v, Some(&model), &rule, scale);
            } else {
                step(&w, &g, &m, &v, &rule, scale);
            }
            for i in 0..len {
                let g = f64::from(grad[i]) * f64::from(scale);
                mw[i] = 0.9 * mw[i] + 0.1 * g;
                vw[i] = 0.95 * vw[i] + 0.05 * g * g;
                let m_hat = mw[i] / (1.0 - 0.9f64.powi(t as i32));
                let v_hat: f64 = vw[i] / (1.0 - 0.95f64.powi(t as i32));
                ww[i] -= 1e-2 * weight_decay * ww[i];
                ww[i] -= 1e-2 * m_hat / (v_hat.sqrt() + 1e-8);
            }
        }
        let model_want = if writes { ww.clone() } else { wide(&first) };
        vec![
            Check("weights", w, ww),
            Check("model", model, model_want),
            Check("m", m, mw),
            Check("v", v, vw),
        ]
    });
}

/// Of bf16: half a unit in the last of its eight places, over the number.
const HALF_ULP: f64 = 1.0 / 256.0;

/// Moments of bf16 are off by half a unit a step, of which a share lives on as the moment does; weights by
/// what moments so far off can make of their update, whose terms are monotone in either.
#[test]
fn oracle_several_steps_with_narrow_moments() {
    on_every_device(3, |device| {
        for (len, offset) in [(1, 0), (8, 0), (33, 3), (1030, 2)] {
            let mut rng = Rng::new(len as u64);
            let first = rng.values(len);
            let w = inside(&statistic(device, &first, &[len]), offset);
            let moments = || {
                let all = device.zeros(TensorClass::Optimizer, Dtype::Bf16, &[len + offset]);
                all.view(offset, &[len])
            };
            let (m, v) = (moments(), moments());
            let model = inside(&tensor(device, &first, &[len]), offset);
            // Value and error.
            let (mut ww, mut mw, mut vw) = (wide(&first), vec![[0.0; 2]; len], vec![[0.0; 2]; len]);
            let mut off = vec![0.0f64; len];
            for step in 1..=6u64 {
                let grad = rng.values(len);
                let rule = Adamw { step, ..RULE };
                let g = inside(&statistic(device, &grad, &[len]), offset);
                step_into(&w, &g, &m, &v, Some(&model), &rule, 0.5);
                let (got, first, second) = (w.to_f32(), m.to_f32(), v.to_f32());
                let corrections = [0.9f64, 0.95].map(|beta| 1.0 - beta.powi(step as i32));
                for i in 0..len {
                    let g = 0.5 * f64::from(grad[i]);
                    let next = |[old, off]: [f64; 2], beta: f64, term: f64| {
                        [beta * old + (1.0 - beta) * term, beta * off]
                    };
                    let ([mi, mo], [vi, vo]) = (next(mw[i], 0.9, g), next(vw[i], 0.95, g * g));
                    let update = |m: f64, v: f64| {
                        let root = (v.max(0.0) / corrections[1]).sqrt() + 1e-8;
                        1e-2 * m / corrections[0] / root
                    };
                    let exact = update(mi, vi);
                    let ends = [
                        (mi - mo, vi - vo),
                        (mi - mo, vi + vo),
                        (mi + mo, vi - vo),
                        (mi + mo, vi + vo),
                    ];
                    let worst = ends.map(|(m, v)| (update(m, v) - exact).abs());
                    let worst = worst.into_iter().fold(0.0, f64::max);
                    off[i] += worst + 1e-6;
                    ww[i] = ww[i] * (1.0 - 1e-3) - exact;
                    let stored =
                        |value: f64, off: f64| [value, off + HALF_ULP * (value.abs() + off)];
                    (mw[i], vw[i]) = (stored(mi, mo), stored(vi, vo));
                    for (name, got, [want, off]) in [
                        ("weight", got[i], [ww[i], off[i]]),
                        ("m", first[i], mw[i]),
                        ("v", second[i], vw[i]),
                    ] {
                        let error = (f64::from(got) - want).abs();
                        let most = off + 1e-6 * want.abs() + 1e-12;
                        assert!(
                            error <= most,
                            "step {step} {name} {i}: {got} for {want}, {error:e} above {most:e}"
                        );
                    }
                }
            }
            let narrowed = |t: &Tensor| {
                t.to_f32()
                    .iter()
                    .all(|x| x.to_bits().trailing_zeros() >= 16)
            };
            assert!(narrowed(&m) && narrowed(&v), "moments are bf16");
        }
    });
}

/// What is stored is the nearest bf16, ties to even, and the same on every device.
#[test]
fn narrow_moments_are_rounded_to_nearest() {
    on_every_device(5, |device| {
        let len = 512;
        // All that lie between two neighbours: 1 and the next bf16 are 1/128 apart.
        let grad: Vec<f32> = (0..len).map(|i| 1.0 + i as f32 / 65536.0).collect();
        let zeros = |dtype| device.zeros(TensorClass::Optimizer, dtype, &[len]);
        let (w, m, v) = (zeros(Dtype::F32), zeros(Dtype::Bf16), zeros(Dtype::Bf16));
        let rule = Adamw {
            beta1: 0.0,
            beta2: 0.5,
            weight_decay: 0.0,
            ..RULE
        };
        step(&w, &statistic(device, &grad, &[len]), &m, &v, &rule, 1.0);
        let want: Vec<f32> = grad
            .iter()
            .map(|g| {
                let steps = f64::from((g - 1.0) * 128.0);
                (1.0 + steps.round_ties_even() / 128.0) as f32
            })
            .collect();
        assert_eq!(m.to_f32(), want);
    });
}

/// Remainders of masters, those of ties among them, and their weights give what masters give; the weights are the
/// same beside either.
#[test]
fn law_remainders_compute_what_masters_do_to_the_bit() {
    on_every_device(4, |device| {
        for (len, offset) in [(1, 0), (8, 0), (33, 3), (1030, 2)] {
            for moments in [Dtype::F32, Dtype::Bf16] {
                let mut rng = Rng::new(len as u64);
                // Between two neighbours, above an even weight and above an odd one.
                let ties = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -1.0 - 1.0 / 256.0];
                let first: Vec<f32> = rng.values(len);
                let first = first.iter().enumerate();
                let first: Vec<f32> = first
                    .map(|(i, &value)| if i % 4 == 3 { ties[i / 4 % 3] } else { value })
                    .collect();
                let of = |dtype| {
                    let all = device.zeros(TensorClass::Optimizer, dtype, &[len + offset]);
                    all.view(offset, &[len])
                };
                let whole = [of(Dtype::F32), of(moments), of(moments), of(Dtype::Bf16)];
                let rest = [of(Dtype::Bf16), of(moments), of(moments), of(Dtype::Bf16)];
                for [w, _, _, model] in [&whole, &rest] {
                    put_masters(Some(model), Some(w), &first);
                }
                let bits = |values: Vec<f32>| -> Vec<u32> {
                    values.into_iter().map(f32::to_bits).collect()
                };
                for step in 0..=5u64 {
                    // No step has moved anything at first.
                    let rule = Adamw { step, ..RULE };
                    let grad = statistic(device, &rng.values(len), &[len]);
                    for [w, m, v, model] in [&whole, &rest] {
                        if step > 0 {
                            step_into(w, &grad, m, v, Some(model), &rule, 0.5);
                        }
                    }
                    let [w, m, v, model] = &whole;
                    let [lower, other_m, other_v, other] = &rest;
                    assert_eq!(
                        bits(masters_of(other, lower)),
                        bits(w.to_f32()),
                        "masters, step {step}"
                    );
                    for (name, found, expected) in [
                        ("model", other, model),
                        ("m", other_m, m),
                        ("v", other_v, v),
                    ] {
                        assert_eq!(
                            bits(found.to_f32()),
                            bits(expected.to_f32()),
                            "{name}, step {step}"
                        );
                    }
                    // Half a unit of eight places at most.
                    for (weight, master) in model.to_f32().into_iter().zip(w.to_f32()) {
                        assert!((weight - master).abs() <= master.abs() / 256.0);
                    }
                }
            }
        }
    });
}

/// A model of f32 weights is its own master copy.
#[test]
fn the_model_may_be_the_masters() {
    let device = moefold_kernels::Device::cpu(1);
    let state = |value: f32| statistic(&device, &[value; 5], &[5]);
    let (w, g, m, v) = (state(1.0), state(0.5), state(0.0), state(0.0));
    let rule = Adamw {
        lr: 0.1,
        weight_decay: 0.0,
        ..RULE
    };
    step_into(&w, &g, &m, &v, Some(&w), &rule, 1.0);
    assert!(w.to_f32().iter().all(|w| (w - 0.9).abs() < 1e-6));
}
