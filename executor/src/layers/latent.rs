//! Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1, equations 9 to 18).
//!
//! Down-projections and the norms of what they compress run on the rank's own tokens with weights that every
//! TP rank holds in full; the compressed tokens are gathered, and up-projections are split by heads, as in
//! Megatron-Core. One rotated part of a key serves all heads. `q` and `c` are the compressed widths of queries
//! and of keys with values, `k` and `v` the widths of a head's key and value, `r` of its rotated part; `n` the
//! heads on this rank.
//!
//! Where context-parallel ranks give each other their keys and values block by block, what travels is the
//! compressed tokens and the rotated part of keys, and every rank up-projects what it gets. Of DeepSeek-V3 that is
//! 576 numbers a token, where keys and values of all heads are 40,960; the products that are done again take
//! `2 c n (k + v)` FLOPs a token, which over one NVLink is less time than the difference.
//!
//! The block is two parts that can run again alone: up-projection (compressed tokens to queries, keys and
//! values) and the core (those to the output of attention).

use moefold_kernels::attention::{Mask, Sequences};
use moefold_kernels::elementwise::{self, add_into};
use moefold_kernels::rope::{self, Pairing, Rope};
use moefold_kernels::{Tensor, TensorClass, latent_kv, rows};
use moefold_planner::choice::{Module, OffloadModule, Recompute};
use moefold_planner::model::{Mla, RopeScaling};
use moefold_profiles::trace::Category;

use super::context::{self, Carried, Carrier, Inputs, flat};
use super::norm::{Norm, Normed};
use super::tokens::Gathering;
use super::{linear, tokens};
use crate::error::Error;
use crate::model::Part;
use crate::offload::Saved;
use crate::rank::Context;
use crate::recompute::Kept;
use crate::rotary::latent_scale;
use crate::store::{Store, Weight};

const CATEGORY: Category = Category::Attention;

/// Added under the root of the norms of compressed tokens, whatever the other norms have: DeepSeek's code and
/// transformers leave it at its default.
const LATENT_EPS: f64 = 1e-6;

/// The latent attention block of one layer.
#[derive(Debug)]
pub struct Latent {
    norm: Norm,
    /// Where queries are compressed.
    query_down: Option<Compression>,
    query: Weight,
    kv_down: Compression,
    kv_up: Weight,
    output: Weight,
    nope: usize,
    rope: usize,
    value: usize,
    pairing: Pairing,
    scale: f32,
}

/// A down-projection and the norm of what it gives.
#[derive(Debug)]
struct Compression {
    matrix: Weight,
    norm: Norm,
}

/// What a compression saves for backward.
#[derive(Debug)]
struct Compressed {
    /// Before the norm `[t, width]`.
    before_norm: Tensor,
    /// Its reciprocal root mean squares `[t]`.
    rstd: Tensor,
    /// After it: input of the up-projection `[t, width]`.
    normed: Tensor,
}

/// Inputs of the core.
#[derive(Debug)]
struct Heads {
    /// Queries `[T, n, k]`, rotated.
    query: Tensor,
    /// Keys `[T, n, k]`, rotated.
    key: Tensor,
    /// Values `[T, n, v]`.
    value: Tensor,
    /// Where blocks of keys travel, the part of keys that is rotated, rotated `[T, r]`.
    rotated: Option<Tensor>,
}

/// What the block saves for backward.
#[derive(Debug)]
pub struct LatentSaved {
    /// Residual stream `[t, h]`.
    input: Tensor,
    /// Input of the down-projections `[t, h]`.
    norm: Kept<Normed>,
    /// Compressed queries, where they are.
    query: Option<Compressed>,
    /// Compressed keys and values.
    kv: Compressed,
    heads: Kept<Heads>,
    /// Where the up-projection runs again, the part of keys that it rotates `[t, r]`.
    rotated: Option<Tensor>,
    core: Kept<Core>,
}

/// What comes out of the core.
#[derive(Debug)]
struct Core {
    /// Output `[T, n, v]`.
    output: Tensor,
    /// Log-sum-exp of the scores.
    lse: Tensor,
}

impl Saved for LatentSaved {
    fn each_tensor(&mut self, see: &mut dyn FnMut(OffloadModule, &mut Tensor)) {
        see(OffloadModule::AttnNorm, &mut self.input);
        if let Some(norm) = self.norm.there() {
            see(OffloadModule::QkvLinear, &mut norm.output);
        }
        for compressed in self.query.iter_mut().chain([&mut self.kv]) {
            see(OffloadModule::QkvLinear, &mut compressed.normed);
        }
        if let Some(heads) = self.heads.there() {
            for tensor in [&mut heads.query, &mut heads.key, &mut heads.value] {
                see(OffloadModule::CoreAttn, tensor);
            }
        }
        if let Some(core) = self.core.there() {
            see(OffloadModule::AttnProj, &mut core.output);
        }
    }
}

impl Latent {
    /// The block of `layer`, on weights of `store`.
    pub fn new(
        store: &Store,
        layer: u32,
        mla: &Mla,
        scaling: Option<&RopeScaling>,
        eps: f64,
    ) -> Self {
        let weight = |part| store.weight(Some(layer), part);
        let compression = |matrix, norm| Compression {
            matrix: weight(matrix),
            norm: Norm::new(weight(norm), LATENT_EPS, CATEGORY),
        };
        Self {
            norm: Norm::new(weight(Part::InputNorm), eps, CATEGORY),
            query_down: mla
                .q_lora_rank
                .map(|_| compression(Part::QueryDown, Part::QueryNorm)),
            query: weight(Part::Query),
            kv_down: compression(Part::KvDown, Part::KvNorm),
            kv_up: weight(Part::KvUp),
            output: weight(Part::Output),
            nope: mla.qk_nope_head_dim as usize,
            rope: mla.qk_rope_head_dim as usize,
            value: mla.v_head_dim as usize,
            pairing: if mla.rope_interleave {
                Pairing::Neighbours
            } else {
                Pairing::Halves
            },
            scale: latent_scale(mla, scaling) as f32,
        }
    }

    /// Runs `attention(norm(x))` of `x [t, h]`, of these sequences, until its output projection.
    pub fn run(
        &self,
        cx: &Context,
        x: &Tensor,
        sequences: Sequences<'_>,
        rope: &Rope,
        again: &Recompute,
    ) -> Result<LatentSaved, Error> {
        let mut norm = Kept::new(self.norm.forward(cx, x));
        let normed = &norm.get().output;
        let (kv, rotated) = self.compress_kv(cx, normed);
        let query = self.query_down.as_ref().map(|down| {
            let compressed = linear::forward(cx, CATEGORY, normed, &down.matrix.value);
            down.normed(cx, compressed)
        });
        let up_again = *again != Recompute::Full && again.covers(Module::MlaUpProj);
        // The up-projection rotates it where it is.
        let before = up_again.then(|| copied(cx, &rotated));
        let query_input = query.as_ref().map_or(normed, |query| &query.normed);
        let (heads, compressed) = self.up_project(cx, query_input, &kv.normed, &rotated, rope)?;
        drop(rotated);
        norm.drop_of(Module::Layernorm, again);
        let core = self.core(cx, &heads, heads.carried(compressed).as_ref(), sequences)?;
        let mut heads = Kept::new(heads);
        heads.drop_of(Module::MlaUpProj, again);
        Ok(LatentSaved {
            input: x.clone(),
            norm,
            query,
            kv,
            heads,
            rotated: before,
            core: Kept::new(core),
        })
    }

    /// `x + attention(norm(x))`, from what has run of it.
    pub fn finish(
        &self,
        cx: &Context,
        saved: &mut LatentSaved,
        again: &Recompute,
    ) -> Result<Tensor, Error> {
        let output = flat(&saved.core.get().output);
        let projected = linear::forward(cx, CATEGORY, &output, &self.output.value);
        drop(output);
        saved.core.drop_of(Module::CoreAttn, again);
        let y = tokens::scatter_sum(cx, projected)?;
        cx.op(CATEGORY, || add_into(&y, &saved.input));
        Ok(y)
    }

    fn core(
        &self,
        cx: &Context,
        heads: &Heads,
        carried: Option<&Carried>,
        sequences: Sequences<'_>,
    ) -> Result<Core, Error> {
        let inputs = self.inputs(heads, carried, sequences);
        let [output, lse] = context::forward(cx, self, inputs)?;
        Ok(Core { output, lse })
    }

    fn inputs<'a>(
        &self,
        heads: &'a Heads,
        carried: Option<&'a Carried>,
        sequences: Sequences<'a>,
    ) -> Inputs<'a> {
        Inputs {
            query: &heads.query,
            key: &heads.key,
            value: &heads.value,
            carried,
            sequences,
            mask: Mask::Causal,
            scale: self.scale,
            sinks: None,
        }
    }

    /// `normed [t, h]` to compressed keys and values `[t, c]` and the part of keys that is rotated `[t, r]`.
    fn compress_kv(&self, cx: &Context, normed: &Tensor) -> (Compressed, Tensor) {
        let both = linear::forward(cx, CATEGORY, normed, &self.kv_down.matrix.value);
        let width = both.width() - self.rope;
        let columns = |range| cx.op(CATEGORY, || rows::gather_columns(&both, range));
        let (compressed, rotated) = (columns(0..width), columns(width..width + self.rope));
        drop(both);
        (self.kv_down.normed(cx, compressed), rotated)
    }

    /// Compressed tokens of this rank to the heads of all tokens: `query [t, q]` (`[t, h]` where queries are not
    /// compressed), `kv [t, c]`, `rotated [t, r]`, which may be overwritten. Where blocks of keys travel, also
    /// `kv` of all tokens `[T, c]`.
    fn up_project(
        &self,
        cx: &Context,
        query: &Tensor,
        kv: &Tensor,
        rotated: &Tensor,
        rope: &Rope,
    ) -> Result<(Heads, Option<Tensor>), Error> {
        let query = tokens::start_gather(cx, query)?;
        let kv = tokens::start_gather(cx, kv)?;
        let rotated = tokens::start_gather(cx, rotated)?;
        let [of_queries, of_keys] = self.rotations(rope);

        let query = linear::forward(cx, CATEGORY, &query.finish(cx)?, &self.query.value);
        let query = by_heads(&query, self.nope + self.rope);
        cx.op(CATEGORY, || rope::forward(&query, &of_queries));
        let compressed = kv.finish(cx)?;
        let kv = linear::forward(cx, CATEGORY, &compressed, &self.kv_up.value);
        let kv = by_heads(&kv, self.nope + self.value);
        let travels = context::travels(cx);
        let compressed = travels.then_some(compressed);
        let rotated = rotated.finish(cx)?;
        let (key, value) = cx.op(CATEGORY, || {
            rope::forward(&by_heads(&rotated, self.rope), &of_keys);
            latent_kv::forward(&kv, &rotated, self.value)
        });
        let heads = Heads {
            query,
            key,
            value,
            rotated: travels.then_some(rotated),
        };
        Ok((heads, compressed))
    }

    /// Rotations of whole query heads, and of the part of keys alone.
    fn rotations(&self, rope: &Rope) -> [Rope; 2] {
        let rope = rope.clone().pairing(self.pairing);
        [rope.clone().skipping(self.nope), rope]
    }

    /// `dy [t, h] -> dx [t, h]`; adds to the gradients of the weights.
    pub fn backward(
        &self,
        cx: &Context,
        dy: &Tensor,
        saved: LatentSaved,
        sequences: Sequences<'_>,
        rope: &Rope,
    ) -> Result<Tensor, Error> {
        let LatentSaved {
            input,
            mut norm,
            query,
            kv,
            mut heads,
            rotated,
            mut core,
        } = saved;
        norm.again(cx, || Ok(self.norm.forward(cx, &input)))?;
        let Normed {
            output: norm_output,
            rstd,
        } = norm.into_inner();
        let query_input = query.as_ref().map_or(&norm_output, |query| &query.normed);
        heads.again(cx, || {
            let rotated = rotated.expect("kept where the up-projection runs again");
            let (heads, _) = self.up_project(cx, query_input, &kv.normed, &rotated, rope)?;
            Ok(heads)
        })?;
        let travels = context::travels(cx);
        let compressed = travels.then(|| tokens::gather(cx, &kv.normed));
        let carried = heads.get().carried(compressed.transpose()?);
        core.again(cx, || {
            self.core(cx, heads.get(), carried.as_ref(), sequences)
        })?;
        let Core { output, lse } = core.into_inner();
        let dy_all = tokens::gather(cx, dy)?;
        let doutput = linear::dgrad(cx, CATEGORY, &dy_all, &self.output.value);
        linear::wgrad(cx, CATEGORY, &dy_all, &flat(&output), &self.output.grad);
        drop(dy_all);
        let query_all = tokens::start_gather(cx, query_input)?;
        let kv_all = match &carried {
            Some([compressed, _]) => Gathering::done(compressed.clone()),
            None => tokens::start_gather(cx, &kv.normed)?,
        };

        let heads = heads.into_inner();
        let doutput = doutput.reshape(output.dims());
        let inputs = self.inputs(&heads, carried.as_ref(), sequences);
        let gradients = context::backward(cx, self, inputs, doutput, [output, lse])?;
        drop((carried, heads));
        let (dquery, dkey, dvalue) = (gradients.query, gradients.key, gradients.value);
        let (others_compressed, others_rotated) = gradients.carried.map(Into::into).unzip();
        let [of_queries, of_keys] = self.rotations(rope);
        cx.op(CATEGORY, || rope::backward(&dquery, &of_queries));
        let (dkv, drotated) = cx.op(CATEGORY, || {
            let (dkv, drotated) = latent_kv::backward(&dkey, &dvalue, self.rope);
            if let Some(others) = others_rotated {
                add_into(&drotated, &others);
            }
            rope::backward(&by_heads(&drotated, self.rope), &of_keys);
            (dkv, drotated)
        });
        drop((dkey, dvalue));
        let drotated = tokens::scatter_sum(cx, drotated)?;

        let (dkv, kv_all) = (flat(&dkv), kv_all.finish(cx)?);
        linear::wgrad(cx, CATEGORY, &dkv, &kv_all, &self.kv_up.grad);
        drop(kv_all);
        let dcompressed = linear::dgrad(cx, CATEGORY, &dkv, &self.kv_up.value);
        drop(dkv);
        if let Some(others) = others_compressed {
            cx.op(CATEGORY, || add_into(&dcompressed, &others));
        }
        let dcompressed = tokens::scatter_sum(cx, dcompressed)?;
        let dcompressed = self.kv_down.before_norm(cx, &dcompressed, kv);

        let (dquery, query_all) = (flat(&dquery), query_all.finish(cx)?);
        linear::wgrad(cx, CATEGORY, &dquery, &query_all, &self.query.grad);
        drop(query_all);
        let dinput = linear::dgrad(cx, CATEGORY, &dquery, &self.query.value);
        drop(dquery);
        let dinput = tokens::scatter_sum(cx, dinput)?;
        let dnormed = match (&self.query_down, query) {
            (Some(down), Some(query)) => {
                let dcompressed = down.before_norm(cx, &dinput, query);
                let matrix = &down.matrix;
                linear::wgrad(cx, CATEGORY, &dcompressed, &norm_output, &matrix.grad);
                linear::dgrad(cx, CATEGORY, &dcompressed, &matrix.value)
            }
            _ => dinput,
        };

        let both = self.joined(cx, &dcompressed, &drotated);
        drop((dcompressed, drotated));
        let matrix = &self.kv_down.matrix;
        linear::wgrad(cx, CATEGORY, &both, &norm_output, &matrix.grad);
        linear::dgrad_onto(cx, CATEGORY, &both, &matrix.value, &dnormed);
        drop((both, norm_output));
        let dx = self.norm.backward(cx, &dnormed, &input, &rstd);
        cx.op(CATEGORY, || add_into(&dx, dy));
        Ok(dx)
    }

    /// `[t, c]` and `[t, r]` as `[t, c + r]`.
    fn joined(&self, cx: &Context, compressed: &Tensor, rotated: &Tensor) -> Tensor {
        let width = compressed.width();
        let dims = [compressed.dims()[0], width + self.rope];
        let dtype = compressed.dtype();
        let both = cx.device.empty(TensorClass::Transient, dtype, &dims);
        cx.op(CATEGORY, || {
            rows::scatter_columns(compressed, &both, 0..width);
            rows::scatter_columns(rotated, &both, width..width + self.rope);
        });
        both
    }
}

impl Heads {
    /// What other ranks are given, with compressed tokens `[T, c]`.
    fn carried(&self, compressed: Option<Tensor>) -> Option<Carried> {
        Some([compressed?, self.rotated.clone()?])
    }
}

impl Carrier for Latent {
    fn expand(&self, cx: &Context, [compressed, rotated]: &Carried) -> [Tensor; 2] {
        let kv = linear::forward(cx, CATEGORY, compressed, &self.kv_up.value);
        let kv = by_heads(&kv, self.nope + self.value);
        cx.op(CATEGORY, || latent_kv::forward(&kv, rotated, self.value))
            .into()
    }

    fn reduce(
        &self,
        cx: &Context,
        [compressed, _]: &Carried,
        [dkey, dvalue]: [Tensor; 2],
    ) -> Carried {
        let (dkv, drotated) = cx.op(CATEGORY, || latent_kv::backward(&dkey, &dvalue, self.rope));
        drop((dkey, dvalue));
        let dkv = flat(&dkv);
        linear::wgrad(cx, CATEGORY, &dkv, compressed, &self.kv_up.grad);
        let dcompressed = linear::dgrad(cx, CATEGORY, &dkv, &self.kv_up.value);
        [dcompressed, drotated]
    }
}

impl Compression {
    fn normed(&self, cx: &Context, before_norm: Tensor) -> Compressed {
        let Normed {
            output: normed,
            rstd,
        } = self.norm.forward(cx, &before_norm);
        Compressed {
            before_norm,
            rstd,
            normed,
        }
    }

    /// The gradient before the norm, from that after it.
    fn before_norm(&self, cx: &Context, dnormed: &Tensor, saved: Compressed) -> Tensor {
        let Compressed {
            before_norm, rstd, ..
        } = saved;
        self.norm.backward(cx, dnormed, &before_norm, &rstd)
    }
}

fn copied(cx: &Context, x: &Tensor) -> Tensor {
    let copy = cx
        .device
        .empty(TensorClass::Activations, x.dtype(), x.dims());
    cx.op(CATEGORY, || elementwise::copy(x, &copy));
    copy
}

/// `[T, n * width]` as `[T, n, width]`.
fn by_heads(x: &Tensor, width: usize) -> Tensor {
    x.reshape(&[x.dims()[0], x.dims()[1] / width, width])
}
