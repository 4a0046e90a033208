//! What a factor is known to be.

use super::*;
use crate::emulated::on_every_device;

#[test]
fn oracle_the_clip_rule() {
    on_every_device(1, |device| {
        for (square, scale, limit) in [
            (16.0, 0.5, Some(1.0)),
            (16.0, 0.3, Some(8.0)),
            (0.0, 0.1, Some(1.0)),
            (9.0, 1.0 / 3.0, None),
            (f64::NAN, 0.5, Some(1.0)),
            (f64::INFINITY, 0.5, Some(1.0)),
        ] {
            let squares = Scalars::zeros(device, TensorClass::Transient, 2);
            squares.write(&[7.0, square]);
            let want = match limit {
                Some(limit) if limit / (square.sqrt() + 1e-6) < 1.0 => {
                    scale * limit / (square.sqrt() + 1e-6)
                }
                _ => scale,
            };
            let factor = Factor::clipped(&squares, 1, scale, limit);
            let got = f64::from(match factor.0 {
                Known::Host(value) => value,
                Known::Device(value) => value.to_f32()[0],
            });
            assert!(
                (got - want).abs() <= 2e-7 * want,
                "{got} not {want} of {square} on {device:?}"
            );
        }
    });
}
