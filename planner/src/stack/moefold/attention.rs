//! The attention block, as `executor/src/layers/attention.rs` runs it.

use moefold_profiles::{Dtype, TensorClass as Class};

use super::ops::{Normed, Pass};
use super::{SavedTensor, list};
use crate::memory::tape::Held;
use crate::model::{Gqa, QkNorm};

/// What the block keeps.
pub(super) struct AttentionSaved {
    input: Held,
    norm: Normed,
    core: Option<CoreSaved>,
}

/// What is saved between the projections.
struct CoreSaved {
    query: Held,
    key: Held,
    value: Held,
    before_norm: Option<[Held; 4]>,
    output: Held,
    log_sum_exp: Held,
}

/// Sizes on one rank.
struct Heads {
    tokens: u64,
    query: u64,
    key: u64,
    width: u64,
}

impl Heads {
    fn of(pass: &Pass<'_>, gqa: &Gqa) -> Self {
        let local = pass.at.local;
        Self {
            tokens: local.tokens,
            query: gqa.heads / local.tp,
            key: local.kv_heads(gqa.kv_heads),
            width: gqa.head_dim,
        }
    }

    /// Rows of queries, and elements.
    fn queries(&self) -> (u64, u64) {
        let rows = self.tokens * self.query;
        (rows, rows * self.width)
    }

    /// Rows of keys or values, and elements.
    fn keys(&self) -> (u64, u64) {
        let rows = self.tokens * self.key;
        (rows, rows * self.width)
    }
}

impl AttentionSaved {
    pub(super) fn forward(pass: &mut Pass<'_>, gqa: Option<&Gqa>, x: Held) -> (Held, Self) {
        let hidden = pass.at.model.hidden;
        let norm = pass.block_norm();
        let core = gqa.map(|gqa| CoreSaved::forward(pass, gqa));
        let projected = pass.float(pass.at.local.tokens * hidden);
        let y = pass.scatter_sum(projected);
        let saved = Self {
            input: x,
            norm,
            core,
        };
        (y, saved)
    }

    pub(super) fn backward(self, pass: &mut Pass<'_>, gqa: Option<&Gqa>) -> Held {
        let hidden = pass.at.model.hidden;
        let Normed { rstd, output } = self.norm;
        let mut gradients = None;
        if let (Some(gqa), Some(core)) = (gqa, self.core) {
            let (all, dqkv) = core.backward(pass, gqa);
            pass.give(all);
            gradients = Some(dqkv);
        }
        pass.give(output);
        let dall = pass.dgrad(pass.at.local.tokens * hidden);
        let dnormed = pass.scatter_sum(dall);
        let dx = pass.block_norm_backward();
        pass.give_all([dnormed, self.input, rstd]);
        if let Some(gradients) = gradients {
            pass.give_all(gradients);
        }
        dx
    }

    pub(super) fn list(&self) -> Vec<SavedTensor> {
        let Normed { rstd, output } = &self.norm;
        let ends = [
            ("input", &self.input),
            ("rstd", rstd),
            ("norm_output", output),
        ];
        let core = self.core.iter().flat_map(CoreSaved::tensors);
        list("attention", ends.into_iter().chain(core))
    }
}

impl CoreSaved {
    fn forward(pass: &mut Pass<'_>, gqa: &Gqa) -> Self {
        let heads = Heads::of(pass, gqa);
        let ((query_rows, queries), (key_rows, keys)) = (heads.queries(), heads.keys());
        let all = pass.gather(pass.at.model.hidden);
        let (mut query, mut key, value) = (pass.float(queries), pass.float(keys), pass.float(keys));
        pass.give(all);
        let before_norm = (gqa.qk_norm != QkNorm::None).then(|| {
            let normed_query = pass.norm(query_rows, heads.width);
            let normed_key = pass.norm(key_rows, heads.width);
            [
                std::mem::replace(&mut query, normed_query.output),
                normed_query.rstd,
                std::mem::replace(&mut key, normed_key.output),
                normed_key.rstd,
            ]
        });
        let output = pass.float(queries);
        let log_sum_exp = pass.single(query_rows);
        let tickets = pass.at.device.attention_tickets(pass.at.dtype, heads.width);
        pass.tape.work_in(Dtype::I32, tickets);
        Self {
            query,
            key,
            value,
            before_norm,
            output,
            log_sum_exp,
        }
    }

    /// The block's input gathered again, and the gradients of queries, keys and values.
    fn backward(self, pass: &mut Pass<'_>, gqa: &Gqa) -> (Held, [Held; 3]) {
        let hidden = pass.at.model.hidden;
        let heads = Heads::of(pass, gqa);
        let ((query_rows, queries), (key_rows, keys)) = (heads.queries(), heads.keys());
        let dy_all = pass.gather(hidden);
        let doutput = pass.dgrad(queries);
        pass.give(dy_all);
        let all = pass.gather(hidden);
        let (mut dquery, mut dkey, dvalue) =
            (pass.float(queries), pass.float(keys), pass.float(keys));
        Self::work(pass, &heads);
        pass.give_all([
            doutput,
            self.query,
            self.key,
            self.value,
            self.output,
            self.log_sum_exp,
        ]);
        if let Some(before_norm) = self.before_norm {
            let normed = pass.norm_backward(query_rows, heads.width);
            pass.give(std::mem::replace(&mut dquery, normed));
            let normed = pass.norm_backward(key_rows, heads.width);
            pass.give(std::mem::replace(&mut dkey, normed));
            pass.give_all(before_norm);
        }
        (all, [dquery, dkey, dvalue])
    }

    /// What the core's backward pass works in, all of it at once.
    fn work(pass: &mut Pass<'_>, heads: &Heads) {
        let local = pass.at.local;
        let pairs = heads.query * local.mbs;
        let work = pass.at.device.attention_backward(
            pass.at.dtype,
            pairs,
            local.tokens / local.mbs,
            heads.width,
        );
        let sums = pass.take(Class::Transient, Dtype::F32, work.sums);
        pass.tape.work_in(Dtype::I32, work.turns);
        pass.give(sums);
    }

    fn tensors(&self) -> Vec<(&'static str, &Held)> {
        let mut tensors = vec![
            ("query", &self.query),
            ("key", &self.key),
            ("value", &self.value),
            ("output", &self.output),
            ("log_sum_exp", &self.log_sum_exp),
        ];
        if let Some(before) = &self.before_norm {
            let names = [
                "query_before_norm",
                "query_rstd",
                "key_before_norm",
                "key_rstd",
            ];
            tensors.extend(names.into_iter().zip(before));
        }
        tensors
    }
}
