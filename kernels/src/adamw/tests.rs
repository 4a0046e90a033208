//! Tests of `adamw` against its f64 twin in plain loops.

use super::*;
use crate::testing::{Check, oracle, tensor, wide};

#[test]
fn oracle_several_steps() {
    oracle(15, |device, rng| {
        let len = rng.size(0..=100);
        let first = rng.values(len);
        let (w, m, v) = (
            tensor(device, &first, &[len]),
            tensor(device, &vec![0.0; len], &[len]),
            tensor(device, &vec![0.0; len], &[len]),
        );
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
            step(&w, &tensor(device, &grad, &[len]), &m, &v, &rule, scale);
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
        vec![
            Check("weights", w, ww),
            Check("m", m, mw),
            Check("v", v, vw),
        ]
    });
}
