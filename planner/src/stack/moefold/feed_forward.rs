//! The feed-forward block: the dense MLP as `executor/src/layers/mlp.rs` runs it, or experts.

use super::moe::MoeKept;
use super::ops::{Normed, Pass};
use super::{Kept, list};
use crate::memory::tape::Held;
use crate::model::{Ffn, Mlp};

/// What the block keeps.
pub(super) enum FeedForwardKept {
    Dense(MlpKept),
    Sparse(Box<MoeKept>),
}

impl FeedForwardKept {
    pub(super) fn forward(pass: &mut Pass<'_>, ffn: &Ffn, x: Held) -> (Held, Self) {
        match ffn {
            Ffn::Dense(mlp) => {
                let (y, kept) = MlpKept::forward(pass, mlp, x);
                (y, Self::Dense(kept))
            }
            Ffn::Moe(moe) => {
                let (y, kept) = MoeKept::forward(pass, moe, x);
                (y, Self::Sparse(Box::new(kept)))
            }
        }
    }

    pub(super) fn backward(self, pass: &mut Pass<'_>, ffn: &Ffn) -> Held {
        match (self, ffn) {
            (Self::Dense(kept), Ffn::Dense(mlp)) => kept.backward(pass, mlp),
            (Self::Sparse(kept), Ffn::Moe(moe)) => kept.backward(pass, moe),
            _ => unreachable!("a layer keeps what its own kind keeps"),
        }
    }

    pub(super) fn list(&self) -> Vec<Kept> {
        match self {
            Self::Dense(kept) => kept.list(),
            Self::Sparse(kept) => kept.list(),
        }
    }
}

/// What the dense block keeps.
pub(super) struct MlpKept {
    input: Held,
    norm: Normed,
    fc1_output: Held,
    activation: Held,
}

impl MlpKept {
    fn forward(pass: &mut Pass<'_>, mlp: &Mlp, x: Held) -> (Held, Self) {
        let (local, hidden) = (pass.at.local, pass.at.model.hidden);
        let width = mlp.width / local.tp;
        let norm = pass.block_norm();
        let all = pass.gather(hidden);
        let fc1_output = pass.float(local.tokens * 2 * width);
        pass.give(all);
        let activation = pass.float(local.tokens * width);
        let y = pass.float(local.tokens * hidden);
        let y = pass.scatter_sum(y);
        let kept = Self {
            input: x,
            norm,
            fc1_output,
            activation,
        };
        (y, kept)
    }

    fn backward(self, pass: &mut Pass<'_>, mlp: &Mlp) -> Held {
        let (local, hidden) = (pass.at.local, pass.at.model.hidden);
        let width = mlp.width / local.tp;
        let Normed { rstd, output } = self.norm;
        let dy_all = pass.gather(hidden);
        let dactivation = pass.dgrad(local.tokens * width);
        pass.give_all([dy_all, self.activation]);
        let all = pass.gather(hidden);
        let dgate_up = pass.float(local.tokens * 2 * width);
        pass.give_all([dactivation, self.fc1_output, all, output]);
        let dall = pass.dgrad(local.tokens * hidden);
        let dnormed = pass.scatter_sum(dall);
        let dx = pass.block_norm_backward();
        pass.give_all([dnormed, dgate_up, self.input, rstd]);
        dx
    }

    fn list(&self) -> Vec<Kept> {
        let Normed { rstd, output } = &self.norm;
        list(
            "mlp",
            [
                ("input", &self.input),
                ("rstd", rstd),
                ("norm_output", output),
                ("fc1_output", &self.fc1_output),
                ("activation", &self.activation),
            ],
        )
    }
}
