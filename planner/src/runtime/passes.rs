//! [`Passes`]: what a run of layers does to memory forward and backward, and how runs compose.

use moefold_profiles::TensorClass;
use moefold_profiles::units::Bytes;

use super::level::{Account, Height, Level};

/// What runs at an instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Running {
    /// A forward pass.
    Forward,
    /// A backward pass, or of a divided one the gradient of the input.
    Backward,
    /// Gradients of weights, of a divided backward pass.
    Weight,
    /// A forward pass beside a backward pass of so numbered a chunk.
    Combined {
        /// The chunk of the rank that runs backward.
        backward: usize,
    },
}

/// The memory of a run of layers, of one microbatch. Exact where every layer's is, for what runs between
/// two layers is alive in both (the residual stream, its gradient). Where the backward pass is divided, gradients of
/// weights are computed later, in the order of the backward pass; where it is whole, nothing is kept for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Passes<H = Level> {
    /// What the forward pass leaves alive.
    pub saved: H,
    /// The highest of the forward pass, above what was alive before it.
    pub forward: H,
    /// The highest of the backward pass, above what was alive before it, what is saved included.
    pub backward: H,
    /// What the backward pass leaves alive for gradients of weights.
    pub kept: H,
    /// The highest of these, above what was alive before them, what is kept included.
    pub weight: H,
    /// Where something leaves for the host.
    pub away: Away<H>,
}

/// What of a run of blocks rests on the host between its passes, none of which is in [`Passes::saved`]. The tensors
/// of a block leave while the next one runs forward, and come back while it runs backward: so long they take
/// memory of the device beside what the next block does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Away<H = Level> {
    /// On the host, of all blocks.
    pub host: H,
    /// Of the last block alone.
    pub last: H,
    /// The highest of the first block forward, and backward, above what was alive before the pass of the run.
    first: [H; 2],
    /// Whether there is a block.
    is_there: bool,
}

impl<H: Height> Passes<H> {
    /// This run and then another; backward the other comes first.
    #[must_use]
    pub fn then(self, next: Self) -> Self {
        let both = Self {
            saved: self.saved + next.saved,
            forward: self.forward.higher(self.saved + next.forward),
            backward: next.backward.higher(self.backward - next.saved + next.kept),
            kept: self.kept + next.kept,
            weight: next.weight.higher(self.weight - next.kept),
            away: next.away,
        };
        if !(self.away.is_there && next.away.is_there) {
            // Nothing leaves, or one of them is nothing.
            let away = if next.away.is_there { next } else { self }.away;
            return Self { away, ..both };
        }
        let (first, leaving) = (next.away.first, self.away.last);
        // Beside the first block of the next run, what leaves of the last of this or comes back.
        let forward = self.forward.higher(self.saved + leaving + first[0]);
        Self {
            forward: forward.higher(both.forward),
            backward: (next.backward.higher(leaving + first[1])).higher(both.backward),
            away: Away {
                host: self.away.host + next.away.host,
                last: next.away.last,
                first: [
                    self.away.first[0],
                    self.away.first[1] - next.saved + next.kept,
                ],
                is_there: true,
            },
            ..both
        }
    }

    /// The highest of a pass, above all that is kept between passes while it runs.
    pub(crate) fn running(&self, pass: Running) -> H {
        match pass {
            Running::Forward => self.forward - self.saved,
            Running::Backward => self.backward,
            Running::Weight => self.weight,
            Running::Combined { .. } => unreachable!("two passes of two chunks"),
        }
    }

    /// One block, of which `host` leaves and the rest is as it was played: it leaves when the block has run
    /// forward, and is back before it runs backward.
    #[must_use]
    pub fn leaving(self, host: H) -> Self {
        Self {
            away: Away {
                host,
                last: host,
                first: [self.forward, self.backward],
                is_there: true,
            },
            ..self
        }
    }

    /// This run where nothing comes after it: what is saved by its last block stays.
    #[must_use]
    pub(crate) fn staying(self) -> Self {
        let Away { host, last, .. } = self.away;
        Self {
            saved: self.saved + last,
            backward: self.backward - last,
            away: Away {
                host: host - last,
                last: H::default(),
                ..self.away
            },
            ..self
        }
    }

    /// This run where it begins with a message, ends with one, or both; nothing of what is not there.
    #[must_use]
    pub(crate) fn between(self, received: H, sent: H) -> Self {
        // What is sent is not kept, and comes back as its gradient before the backward pass.
        Self {
            saved: self.saved + received - sent,
            forward: self.forward + received,
            backward: self.backward + sent,
            ..self
        }
    }
}

impl Passes {
    /// The same in bytes of all classes.
    pub fn totals(&self) -> Passes<i64> {
        Passes {
            saved: self.saved.total(),
            forward: self.forward.total(),
            backward: self.backward.total(),
            kept: self.kept.total(),
            weight: self.weight.total(),
            away: Away {
                host: self.away.host.total(),
                last: self.away.last.total(),
                first: self.away.first.map(Level::total),
                is_there: self.away.is_there,
            },
        }
    }

    /// Of layers of which nothing is known but what they keep.
    pub fn keeping(bytes: Bytes) -> Self {
        let saved = Level::of(TensorClass::Activations, bytes);
        Self {
            saved,
            forward: saved,
            ..Self::default()
        }
    }

    /// The same of a layer of which some leaves, from the end of its forward pass to the begin of its backward.
    pub fn keeping_beside(bytes: Bytes, leaving: Bytes) -> Self {
        let leaving = Level::of(TensorClass::Activations, leaving);
        let kept = Self::keeping(bytes);
        let whole = Self {
            forward: kept.forward + leaving,
            backward: leaving,
            ..kept
        };
        whole.leaving(leaving)
    }

    /// Both passes as played.
    ///
    /// # Panics
    /// When the backward pass does not give back what the forward pass left.
    pub fn of(forward: &Account, backward: &Account) -> Self {
        Self::divided(forward, backward, &Account::default())
    }

    /// The same of a backward pass whose gradients of weights come later.
    ///
    /// # Panics
    /// As [`Passes::of`].
    pub fn divided(forward: &Account, backward: &Account, weight: &Account) -> Self {
        let saved = forward.live();
        let kept = saved + backward.live();
        assert_eq!(
            kept + weight.live(),
            Level::default(),
            "a backward pass gives back all that is saved"
        );
        Self {
            saved,
            forward: forward.peak(),
            backward: backward.peak(),
            kept,
            weight: weight.peak(),
            away: Away::default(),
        }
    }

    /// As many such runs, one after the other.
    #[must_use]
    pub fn repeated(self, count: u32) -> Self {
        let Some(before) = count.checked_sub(1) else {
            return Self::default();
        };
        if before > 0 && self.away.is_there {
            return (1..count).fold(self, |run, _| run.then(self));
        }
        Self {
            saved: self.saved * i64::from(count),
            // What the others keep is no less than nothing: the last run is the highest forward, and of
            // gradients of weights, where it is the first, as well. Backward it is the first or the last one.
            forward: self
                .forward
                .higher(self.saved * i64::from(before) + self.forward),
            backward: self
                .backward
                .higher((self.kept - self.saved) * i64::from(before) + self.backward),
            kept: self.kept * i64::from(count),
            weight: self.weight,
            away: self.away,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What a layer takes and gives: saved, working forward, working backward before and after it gives
    /// back what it saved; kept for gradients of weights, working in these.
    type Layer = [u64; 6];

    const CLASS: TensorClass = TensorClass::Activations;

    fn work_in(account: &mut Account, bytes: u64) {
        account.take(CLASS, Bytes(bytes));
        account.give(CLASS, Bytes(bytes));
    }

    fn forward(account: &mut Account, layer: Layer) {
        account.take(CLASS, Bytes(layer[0]));
        work_in(account, layer[1]);
    }

    fn backward(account: &mut Account, layer: Layer) {
        work_in(account, layer[2]);
        account.give(CLASS, Bytes(layer[0]));
        account.take(CLASS, Bytes(layer[4]));
        work_in(account, layer[3]);
    }

    fn weight(account: &mut Account, layer: Layer) {
        work_in(account, layer[5]);
        account.give(CLASS, Bytes(layer[4]));
    }

    fn passes(layer: Layer) -> Passes {
        of_layers(&[layer])
    }

    /// Of layers one after the other, whose gradients of weights come after all of their backward passes.
    fn of_layers(layers: &[Layer]) -> Passes {
        let mut accounts = [Account::default(); 3];
        let [there, back, later] = &mut accounts;
        for &layer in layers {
            forward(there, layer);
        }
        for &layer in layers.iter().rev() {
            backward(back, layer);
            weight(later, layer);
        }
        Passes::divided(there, back, later)
    }

    proptest! {
        #[test]
        fn law_composing_is_one_account(layers in prop::collection::vec(prop::array::uniform6(0_u64..100), 0..8)) {
            let whole = of_layers(&layers);
            let composed = layers.iter().map(|&layer| passes(layer)).fold(Passes::default(), Passes::then);
            for (a, b) in [(whole.saved, composed.saved), (whole.forward, composed.forward), (whole.backward, composed.backward), (whole.kept, composed.kept), (whole.weight, composed.weight)] {
                prop_assert_eq!(a.total(), b.total());
            }
        }

        /// Played by hand: what is saved leaves beside the next layer and comes back beside it, but for the last.
        #[test]
        fn law_what_leaves_is_beside_the_next(
            layers in prop::collection::vec((prop::array::uniform6(0_u64..100), 0_u64..100), 1..8),
        ) {
            let mut accounts = [Account::default(); 3];
            let [there, back, later] = &mut accounts;
            let mut leaving = 0;
            for (number, &(layer, away)) in layers.iter().enumerate() {
                there.take(CLASS, Bytes(away));
                forward(there, layer);
                there.give(CLASS, Bytes(leaving));
                leaving = if number + 1 < layers.len() { away } else { 0 };
            }
            for (number, &(layer, away)) in layers.iter().enumerate().rev() {
                if number > 0 {
                    back.take(CLASS, Bytes(layers[number - 1].1));
                }
                backward(back, layer);
                weight(later, layer);
                back.give(CLASS, Bytes(away));
            }
            let whole = Passes::divided(there, back, later);
            let of_layer = |&(layer, away): &(Layer, u64)| {
                let mut accounts = [Account::default(); 3];
                let [there, back, later] = &mut accounts;
                there.take(CLASS, Bytes(away));
                forward(there, layer);
                there.give(CLASS, Bytes(away));
                back.take(CLASS, Bytes(away));
                backward(back, layer);
                weight(later, layer);
                back.give(CLASS, Bytes(away));
                Passes::divided(there, back, later).leaving(Level::of(CLASS, Bytes(away)))
            };
            let composed = layers.iter().map(of_layer).fold(Passes::default(), Passes::then).staying();
            for (a, b) in [(whole.saved, composed.saved), (whole.forward, composed.forward), (whole.backward, composed.backward), (whole.kept, composed.kept), (whole.weight, composed.weight)] {
                prop_assert_eq!(a.total(), b.total());
            }
            let away: u64 = layers[..layers.len() - 1].iter().map(|(_, away)| away).sum();
            prop_assert_eq!(composed.away.host.total(), away as i64);
        }

        #[test]
        fn law_repeating_is_composing_with_itself(layer in prop::array::uniform6(0_u64..100), count in 0_u32..9) {
            let one = passes(layer);
            let all = (0..count).map(|_| one).fold(Passes::default(), Passes::then);
            prop_assert_eq!(one.repeated(count), all);
        }
    }
}
