//! Masters that are kept as remainders change no bit: losses, norms of gradients and masters are those of f32 masters.

use moefold_executor::train::Trainer;
use moefold_kernels::TensorClass;
use moefold_planner::choice::{Masters, Optimizer};

use crate::common::{Fixture, degrees};
use crate::cuda;

#[test]
fn law_remainders_change_no_bit_of_training() {
    for (name, on, layout, optimizer) in [
        (
            "qwen3_moe_raw",
            cuda::BF16,
            degrees(2, 2, 2, 1, 2),
            Optimizer::Adam,
        ),
        (
            "qwen3_tied",
            cuda::HOPPER,
            degrees(1, 1, 1, 1, 2),
            Optimizer::AdamBf16Moments,
        ),
    ] {
        if !on.is_there() {
            return;
        }
        let mut fixture = Fixture::load(name).with_batch(2);
        fixture.savers.optimizer = optimizer;
        let mut train = |masters| {
            fixture.savers.masters = masters;
            let states = |trainer: &Trainer| {
                let memory = trainer.cx.device.memory();
                memory.live(TensorClass::Optimizer).0
            };
            fixture.train_on(|| on.open(), &layout, 3, &fixture.options(), states)
        };
        let ((whole, all), (rest, kept)) = (train(Masters::Fp32), train(Masters::Remainder));
        assert_eq!(whole.steps, rest.steps, "{name}: steps");
        assert!(whole.weights == rest.weights, "{name}: masters");
        // Of a parameter: four bytes or two, and its moments.
        let moments = 2 * optimizer.moments().bits() / 8;
        for (all, kept) in all.into_iter().zip(kept) {
            assert_eq!(kept * (4 + moments), all * (2 + moments), "{name}: bytes");
        }
    }
}
