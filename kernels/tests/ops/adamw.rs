//! Tests of `adamw` against its f64 reference in plain loops.

use moefold_kernels::TensorClass;
use moefold_kernels::adamw::*;
use moefold_kernels::scalars::{Factor, Scalars};

use crate::support::{Check, inside, oracle_everywhere, statistic, tensor, wide};

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
                lr: 1e-2,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay,
                step: t,
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

/// A model of f32 weights is its own master copy.
#[test]
fn the_model_may_be_the_masters() {
    let device = moefold_kernels::Device::cpu(1);
    let state = |value: f32| statistic(&device, &[value; 5], &[5]);
    let (w, g, m, v) = (state(1.0), state(0.5), state(0.0), state(0.0));
    let rule = Adamw {
        lr: 0.1,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.0,
        step: 1,
    };
    step_into(&w, &g, &m, &v, Some(&w), &rule, 1.0);
    assert!(w.to_f32().iter().all(|w| (w - 0.9).abs() < 1e-6));
}
