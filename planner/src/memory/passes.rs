//! [`Passes`]: what a run of layers does to memory forward and backward, and how runs compose.

use moefold_profiles::TensorClass;
use moefold_profiles::units::Bytes;

use super::tape::{Level, Tape};

/// The memory of a run of layers, of one microbatch. Exact where every layer's is, for what runs between
/// two layers is alive in both (the residual stream, its gradient).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Passes {
    /// What the forward pass leaves alive.
    pub saved: Level,
    /// The highest of the forward pass, above what was alive before it.
    pub forward: Level,
    /// The highest of the backward pass, above what was alive before it, what is saved included.
    pub backward: Level,
}

impl Passes {
    /// Of layers of which nothing is known but what they keep.
    pub fn keeping(bytes: Bytes) -> Self {
        let saved = Level::of(TensorClass::Activations, bytes);
        Self {
            saved,
            forward: saved,
            backward: Level::default(),
        }
    }

    /// Both passes as played.
    ///
    /// # Panics
    /// When the backward pass does not give back what the forward pass left.
    pub fn of(forward: &Tape, backward: &Tape) -> Self {
        let saved = forward.live();
        assert_eq!(
            saved + backward.live(),
            Level::default(),
            "a backward pass gives back all that is saved"
        );
        Self {
            saved,
            forward: forward.peak(),
            backward: backward.peak(),
        }
    }

    /// This run and then another; backward the other comes first.
    #[must_use]
    pub fn then(self, next: Self) -> Self {
        Self {
            saved: self.saved + next.saved,
            forward: self.forward.higher(self.saved + next.forward),
            backward: next.backward.higher(self.backward - next.saved),
        }
    }

    /// As many such runs, one after the other.
    #[must_use]
    pub fn repeated(self, count: u32) -> Self {
        let Some(before) = count.checked_sub(1) else {
            return Self::default();
        };
        Self {
            saved: self.saved * i64::from(count),
            // What the others keep is no less than nothing: the last run is the highest forward, and
            // backward, where it is the first, as well.
            forward: self
                .forward
                .higher(self.saved * i64::from(before) + self.forward),
            backward: self.backward,
        }
    }
}

#[cfg(test)]
mod tests {
    use moefold_profiles::Dtype;
    use proptest::prelude::*;

    use super::*;
    use crate::memory::tape::Held;

    /// What a layer takes and gives: saved, working forward, working backward before and after it gives
    /// back what it saved.
    type Layer = [u64; 4];

    fn take(tape: &mut Tape, bytes: u64) -> Held {
        tape.take(TensorClass::Activations, Dtype::Fp8, bytes)
    }

    fn forward(tape: &mut Tape, layer: Layer) -> Held {
        let saved = take(tape, layer[0]);
        tape.work_in(Dtype::Fp8, layer[1]);
        saved
    }

    fn backward(tape: &mut Tape, layer: Layer, saved: Held) {
        tape.work_in(Dtype::Fp8, layer[2]);
        tape.give(saved);
        tape.work_in(Dtype::Fp8, layer[3]);
    }

    fn passes(layer: Layer) -> Passes {
        let (mut there, mut back) = (Tape::default(), Tape::default());
        let saved = forward(&mut there, layer);
        backward(&mut back, layer, saved);
        Passes::of(&there, &back)
    }

    proptest! {
        #[test]
        fn law_composing_is_playing_one_tape(layers in prop::collection::vec(prop::array::uniform4(0_u64..100), 0..8)) {
            let (mut there, mut back) = (Tape::default(), Tape::default());
            let saved: Vec<_> = layers.iter().map(|&layer| forward(&mut there, layer)).collect();
            for (&layer, saved) in layers.iter().zip(saved).rev() {
                backward(&mut back, layer, saved);
            }
            let whole = Passes::of(&there, &back);
            let composed = layers.iter().map(|&layer| passes(layer)).fold(Passes::default(), Passes::then);
            for (a, b) in [(whole.saved, composed.saved), (whole.forward, composed.forward), (whole.backward, composed.backward)] {
                prop_assert_eq!(a.total(), b.total());
            }
        }

        #[test]
        fn law_repeating_is_composing_with_itself(layer in prop::array::uniform4(0_u64..100), count in 0_u32..9) {
            let one = passes(layer);
            let all = (0..count).map(|_| one).fold(Passes::default(), Passes::then);
            prop_assert_eq!(one.repeated(count), all);
        }
    }
}
