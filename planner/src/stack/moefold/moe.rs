//! The mixture-of-experts block, as `executor/src/moe.rs` and its modules run it.

use moefold_profiles::{Dtype, TensorClass as Class};

use super::ops::{Normed, Pass};
use super::{SavedTensor, list};
use crate::memory::tape::Held;
use crate::model::Moe;

/// What the block keeps.
pub(super) struct MoeSaved {
    input: Held,
    norm: Normed,
    router: RouterKept,
    /// Offsets of the experts here, where rows come from other ranks.
    held_offsets: Held,
    experts: ExpertsKept,
    /// Intermediate and activation of a shared expert.
    shared: Option<[Held; 2]>,
}

/// What router and sorting keep.
struct RouterKept {
    ids: Held,
    probabilities: Held,
    scores: Held,
    /// `row_of`, `slot_of`, `token_of`.
    maps: [Held; 3],
    offsets: Held,
    /// Gradient of a balancing loss by the scores.
    balance: Held,
}

/// What the experts keep.
struct ExpertsKept {
    input: Held,
    fc1_output: Held,
    activation: Held,
    row_probabilities: Held,
}

impl MoeSaved {
    pub(super) fn forward(pass: &mut Pass<'_>, moe: &Moe, x: Held) -> (Held, Self) {
        let (local, hidden) = (pass.at.local, pass.at.model.hidden);
        let norm = pass.block_norm();
        let (router, score_sums) = RouterKept::forward(pass, moe);
        let chosen = local.tokens_local * moe.topk;
        let (sent, numbers) = (pass.float(chosen * hidden), pass.single(chosen));
        let held_offsets = if local.ep * local.etp > 1 {
            pass.integers(local.experts_local + 1)
        } else {
            pass.alias()
        };
        let (rows, row_probabilities) = to_experts_with(pass, sent, numbers);
        let (rows, experts) = ExpertsKept::forward(pass, moe, rows, row_probabilities);
        let rows = start_combine(pass, rows, chosen * hidden).finish(pass);
        let y = pass.float(local.tokens_local * hidden);
        pass.give(rows);
        // The step adds the balancing loss up.
        if pass.at.balanced {
            let sums = pass.at.device.total(Dtype::F32, moe.experts);
            pass.tape.work_in(Dtype::I32, sums);
        }
        pass.give(score_sums);
        let shared = moe.shared.as_ref().map(|shared| {
            let width = shared.mlp.width / local.tp;
            [2 * width, width].map(|width| pass.float(local.tokens * width))
        });
        let saved = Self {
            input: x,
            norm,
            router,
            held_offsets,
            experts,
            shared,
        };
        (y, saved)
    }

    pub(super) fn backward(self, pass: &mut Pass<'_>, moe: &Moe) -> Held {
        let (local, hidden) = (pass.at.local, pass.at.model.hidden);
        let chosen = local.tokens_local * moe.topk;
        if let Some(shared) = self.shared {
            pass.give_all(shared);
        }
        let sent = pass.float(chosen * hidden);
        let drows = start_dispatch(pass, sent, hidden).finish(pass);
        let drows = sorted(pass, drows);
        let (drows, dnumbers) = self.experts.backward(pass, moe, drows);
        let (drows, dnumbers) = from_experts_with(pass, drows, dnumbers, chosen);
        let dnormed = pass.float(local.tokens_local * hidden);
        let dprobs = pass.single(chosen);
        pass.give_all([drows, dnumbers]);
        let dlogits = pass.single(local.tokens_local * moe.experts);
        pass.give(dlogits);
        let dx = pass.block_norm_backward();
        pass.give_all([dnormed, dprobs, self.input, self.held_offsets]);
        pass.give_all([self.norm.rstd, self.norm.output]);
        self.router.give(pass);
        dx
    }

    pub(super) fn list(&self) -> Vec<SavedTensor> {
        let RouterKept {
            ids,
            probabilities,
            scores,
            maps: [row_of, slot_of, token_of],
            offsets,
            balance,
        } = &self.router;
        let mut all = list(
            "moe",
            [
                ("input", &self.input),
                ("rstd", &self.norm.rstd),
                ("norm_output", &self.norm.output),
                ("scores", scores),
                ("expert_ids", ids),
                ("probabilities", probabilities),
                ("balance", balance),
                ("row_of", row_of),
                ("slot_of", slot_of),
                ("token_of", token_of),
                ("expert_offsets", offsets),
                ("held_offsets", &self.held_offsets),
                ("dispatched", &self.experts.input),
                ("row_probabilities", &self.experts.row_probabilities),
                ("fc1_output", &self.experts.fc1_output),
                ("activation", &self.experts.activation),
            ],
        );
        if let Some(shared) = &self.shared {
            let names = ["fc1_output", "activation"];
            all.extend(list("shared_expert", names.into_iter().zip(shared)));
        }
        all
    }
}

impl RouterKept {
    /// What is saved, and the sums of scores that a balancing loss is made of.
    fn forward(pass: &mut Pass<'_>, moe: &Moe) -> (Self, Held) {
        let (tokens, experts) = (pass.at.local.tokens_local, moe.experts);
        let chosen = tokens * moe.topk;
        let logits = pass.single(tokens * experts);
        let (ids, probabilities) = (pass.integers(chosen), pass.single(chosen));
        let scores = pass.single(tokens * experts);
        let statistics = if pass.at.balanced { experts } else { 0 };
        let (score_sums, counts) = (pass.single(statistics), pass.integers(statistics));
        let partial = pass.at.device.router_sums(tokens, statistics);
        pass.tape.work_in(Dtype::F32, partial);
        let offsets = pass.integers(experts + 1);
        let maps = std::array::from_fn(|_| pass.integers(chosen));
        let table = pass.at.device.sorting(chosen, experts);
        pass.tape.work_in(Dtype::I32, table);
        let balance = pass.single(statistics);
        pass.give_all([counts, logits]);
        let saved = Self {
            ids,
            probabilities,
            scores,
            maps,
            offsets,
            balance,
        };
        (saved, score_sums)
    }

    fn give(self, pass: &mut Pass<'_>) {
        pass.give_all([self.ids, self.probabilities, self.scores]);
        pass.give_all(self.maps);
        pass.give_all([self.offsets, self.balance]);
    }
}

impl ExpertsKept {
    fn forward(
        pass: &mut Pass<'_>,
        moe: &Moe,
        input: Held,
        row_probabilities: Held,
    ) -> (Held, Self) {
        let rows = pass.at.local.expert_rows;
        let width = moe.expert.width / pass.at.local.etp;
        let fc1_output = pass.float(rows * 2 * width);
        let activation = pass.float(rows * width);
        let y = pass.float(rows * pass.at.model.hidden);
        let saved = Self {
            input,
            fc1_output,
            activation,
            row_probabilities,
        };
        (y, saved)
    }

    /// From the gradient of the rows to those of rows and probabilities.
    fn backward(self, pass: &mut Pass<'_>, moe: &Moe, dy: Held) -> (Held, Held) {
        let rows = pass.at.local.expert_rows;
        let width = moe.expert.width / pass.at.local.etp;
        let dactivation = pass.float(rows * width);
        pass.give_all([dy, self.activation]);
        let dgate_up = pass.float(rows * 2 * width);
        let dprobs = pass.single(rows);
        pass.give_all([dactivation, self.fc1_output, self.row_probabilities]);
        pass.give(self.input);
        let dx = pass.float(rows * pass.at.model.hidden);
        pass.give(dgate_up);
        (dx, dprobs)
    }
}

/// Rows under way: where they arrive, and what was sent, which is alive until they have.
struct Moving {
    arriving: Held,
    source: Option<Held>,
}

impl Moving {
    fn finish(self, pass: &mut Pass<'_>) -> Held {
        if let Some(source) = self.source {
            pass.give(source);
        }
        self.arriving
    }
}

/// Rows, or one number a row, on their way to the ranks that hold their experts.
fn start_dispatch(pass: &mut Pass<'_>, rows: Held, width: u64) -> Moving {
    let local = pass.at.local;
    if local.ep * local.etp == 1 {
        return Moving {
            arriving: rows,
            source: None,
        };
    }
    let elements = local.expert_rows * width;
    Moving {
        arriving: pass.take(Class::Activations, rows.dtype(), elements),
        source: Some(rows),
    }
}

/// Rows as they arrive to rows in the order of experts.
fn sorted(pass: &mut Pass<'_>, arrived: Held) -> Held {
    let blocks = pass.at.local.row_blocks;
    if blocks == 0 {
        return arrived;
    }
    let rows = pass.take(Class::Activations, arrived.dtype(), arrived.elements());
    let table = pass.at.device.chunks(blocks);
    pass.tape.work_in(Dtype::I32, table);
    pass.give(arrived);
    rows
}

fn to_experts_with(pass: &mut Pass<'_>, rows: Held, numbers: Held) -> (Held, Held) {
    let numbers = start_dispatch(pass, numbers, 1);
    let rows = start_dispatch(pass, rows, pass.at.model.hidden);
    let numbers = numbers.finish(pass);
    let numbers = sorted(pass, numbers);
    let rows = rows.finish(pass);
    (sorted(pass, rows), numbers)
}

/// The experts' rows on their way home, where they take `home` elements, summed over ETP.
fn start_combine(pass: &mut Pass<'_>, rows: Held, home: u64) -> Moving {
    let local = pass.at.local;
    // As they came, which takes what sorting them took.
    let rows = sorted(pass, rows);
    let own = if local.etp > 1 {
        let dtype = rows.dtype();
        let width = rows.elements().checked_div(local.expert_rows).unwrap_or(0);
        let elements = local.received_rows * width;
        let received = pass.take(Class::Transient, dtype, local.etp * elements);
        pass.give(rows);
        let sum = pass.take(Class::Activations, dtype, elements);
        pass.give(received);
        sum
    } else {
        rows
    };
    if local.ep == 1 {
        return Moving {
            arriving: own,
            source: None,
        };
    }
    Moving {
        arriving: pass.take(Class::Activations, own.dtype(), home),
        source: Some(own),
    }
}

fn from_experts_with(pass: &mut Pass<'_>, rows: Held, numbers: Held, chosen: u64) -> (Held, Held) {
    let numbers = start_combine(pass, numbers, chosen);
    let rows = start_combine(pass, rows, chosen * pass.at.model.hidden);
    let rows = rows.finish(pass);
    (rows, numbers.finish(pass))
}
