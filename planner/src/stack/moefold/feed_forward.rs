//! The feed-forward block: the dense MLP as `executor/src/layers/mlp.rs` runs it, or experts.

use super::moe::MoeSaved;
use super::ops::{Normed, Pass};
use super::{SavedTensor, list};
use crate::memory::tape::Held;
use crate::model::{Ffn, Mlp};

/// What the block keeps.
pub(super) enum FeedForwardSaved {
    Dense(MlpSaved),
    Sparse(Box<MoeSaved>),
}

impl FeedForwardSaved {
    pub(super) fn forward(pass: &mut Pass<'_>, ffn: &Ffn, x: Held) -> (Held, Self) {
        match ffn {
            Ffn::Dense(mlp) => {
                let (y, saved) = MlpSaved::forward(pass, mlp, x);
                (y, Self::Dense(saved))
            }
            Ffn::Moe(moe) => {
                let (y, saved) = MoeSaved::forward(pass, moe, x);
                (y, Self::Sparse(Box::new(saved)))
            }
        }
    }

    pub(super) fn backward(self, pass: &mut Pass<'_>, ffn: &Ffn) -> Held {
        match (self, ffn) {
            (Self::Dense(saved), Ffn::Dense(mlp)) => saved.backward(pass, mlp),
            (Self::Sparse(saved), Ffn::Moe(moe)) => saved.backward(pass, moe),
            _ => unreachable!("a layer keeps what its own kind keeps"),
        }
    }

    pub(super) fn list(&self) -> Vec<SavedTensor> {
        match self {
            Self::Dense(saved) => saved.list(),
            Self::Sparse(saved) => saved.list(),
        }
    }
}

/// What the dense block keeps.
pub(super) struct MlpSaved {
    input: Held,
    norm: Normed,
    fc1_output: Held,
    activation: Held,
}

impl MlpSaved {
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
        let saved = Self {
            input: x,
            norm,
            fc1_output,
            activation,
        };
        (y, saved)
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

    fn list(&self) -> Vec<SavedTensor> {
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
