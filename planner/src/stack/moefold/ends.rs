//! Embedding, and final norm with head and loss, as `executor/src/layers` runs them.

use moefold_profiles::{Dtype, TensorClass as Class};

use super::ops::{Normed, Pass};
use super::{Site, list};
use crate::memory::passes::Passes;
use crate::memory::tape::Held;
use crate::saved::SavedTensor;

/// What final norm, head and loss keep: the gradient by the logits lies where they were.
struct HeadSaved {
    input: Held,
    norm: Normed,
    logits_gradient: Held,
}

impl Site<'_> {
    /// Both passes of the embedding. It keeps nothing itself: the stream that begins here is what the
    /// first layer keeps.
    pub fn embedding(&self) -> Passes {
        let (mut forward, mut backward) = (self.pass(), self.pass());
        let own = forward.float(self.local.tokens * self.model.hidden);
        // What comes of it is the first layer's to keep.
        let _ = forward.scatter_sum(own);
        let dx_all = backward.gather(self.model.hidden);
        let order = self.device.embedding_order(self.local.tokens);
        backward.tape.work_in(Dtype::I32, order);
        backward.give(dx_all);
        backward.give(self.stream());
        Passes::of(&forward.tape, &backward.tape)
    }

    /// Both passes of final norm, head and loss.
    pub fn head(&self) -> Passes {
        let (mut forward, mut backward) = (self.pass(), self.pass());
        let (losses, saved) = HeadSaved::forward(&mut forward, self.stream());
        // The step adds them up.
        let sums = self.device.total(Dtype::F32, losses.elements());
        forward.tape.work_in(Dtype::I32, sums);
        forward.give(losses);
        let _ = saved.backward(&mut backward);
        Passes::of(&forward.tape, &backward.tape)
    }

    /// What the head keeps between its passes.
    pub fn kept_by_head(&self) -> Vec<SavedTensor> {
        let (_, saved) = HeadSaved::forward(&mut self.pass(), self.stream());
        saved.list()
    }
}

impl HeadSaved {
    /// The losses, and what is saved.
    fn forward(pass: &mut Pass<'_>, x: Held) -> (Held, Self) {
        let norm = pass.block_norm();
        let all = pass.gather(pass.at.model.hidden);
        let elements = pass.at.local.tokens * pass.at.vocab;
        let logits = pass.take(Class::Logits, pass.at.dtype, elements);
        pass.give(all);
        let statistics: [Held; 3] = std::array::from_fn(|_| Self::row_numbers(pass));
        let losses = Self::row_numbers(pass);
        pass.give_all(statistics);
        let saved = Self {
            input: x,
            norm,
            logits_gradient: logits,
        };
        (losses, saved)
    }

    fn row_numbers(pass: &mut Pass<'_>) -> Held {
        pass.take(Class::Transient, Dtype::F32, pass.at.local.tokens)
    }

    fn backward(self, pass: &mut Pass<'_>) -> Held {
        let (local, hidden) = (pass.at.local, pass.at.model.hidden);
        let Normed { rstd, output } = self.norm;
        let all = pass.gather(hidden);
        pass.give_all([all, output]);
        let dall = pass.dgrad(local.tokens * hidden);
        pass.give(self.logits_gradient);
        let dnormed = pass.scatter_sum(dall);
        let dx = pass.block_norm_backward();
        pass.give_all([dnormed, self.input, rstd]);
        dx
    }

    fn list(&self) -> Vec<SavedTensor> {
        list(
            "head",
            [
                ("input", &self.input),
                ("rstd", &self.norm.rstd),
                ("norm_output", &self.norm.output),
                ("logits_gradient", &self.logits_gradient),
            ],
        )
    }
}
