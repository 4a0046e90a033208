//! The core of attention: over sequences that a rank has whole, or that context-parallel ranks have cut.
//!
//! Of a sequence of `2 CP` equal chunks a rank has two ([`mesh::chunks`]), so that causal attention is as much
//! work on every rank. Its tokens are `[first chunks of all sequences, second chunks of all]`: either half is
//! `sequences` sequences of one chunk, and every pair of a half of queries and a half of keys is one call: causal
//! where they are the same chunk, over all keys where the keys are of an earlier one, and none where they are of
//! a later one. What the calls give is [merged](moefold_kernels::merge) by their log-sum-exp.
//!
//! Keys of other ranks come in one of three ways ([`CpComm`]). On a ring, blocks go from neighbour to neighbour
//! beside the work on the block before; their gradients follow them and come home with the last step. Gathered,
//! all blocks come at once, and their gradients are summed and scattered. Both go through the blocks in the same
//! order, so that their outputs have the same bits. Or heads are exchanged against tokens: a rank then has
//! whole sequences of a share of the heads, and the core is that of one rank: with windows and documents, which
//! blocks have none of. Sinks are those of its heads there, and over blocks they come once all are merged.
//!
//! Blocks are keys and values, or what those are made of ([`Carrier`]).

use std::ops::Range;

use moefold_kernels::attention::{self, Mask, Sequences};
use moefold_kernels::elementwise::add_into;
use moefold_kernels::{Tensor, TensorClass, merge, rows, sinks};
use moefold_planner::choice::CpComm;
use moefold_planner::mesh;
use moefold_profiles::trace::Category;

use crate::error::Error;
use crate::rank::Context;
use crate::store::Weight;
use crate::transport::Pending;

const CATEGORY: Category = Category::Attention;

/// What [`crate::support`] refuses.
const CUT: &str = "windows and documents are of whole sequences only";

/// What a rank gives others to make its keys and values of `[T, ..]`, or the gradients of it.
pub(super) type Carried = [Tensor; 2];

/// How keys and values are made of what travels.
pub(super) trait Carrier {
    /// Keys `[N, m, k]` and values `[N, m, v]` of `N` tokens.
    fn expand(&self, cx: &Context, carried: &Carried) -> [Tensor; 2];

    /// From the gradients of these keys and values the gradients of what is carried of them. Adds to the
    /// gradients of weights.
    fn reduce(&self, cx: &Context, carried: &Carried, gradients: [Tensor; 2]) -> Carried;
}

/// Keys and values themselves travel.
pub(super) struct AsTheyAre;

impl Carrier for AsTheyAre {
    fn expand(&self, _cx: &Context, carried: &Carried) -> [Tensor; 2] {
        carried.clone()
    }

    fn reduce(&self, _cx: &Context, _carried: &Carried, gradients: [Tensor; 2]) -> Carried {
        gradients
    }
}

/// What the core reads on one rank.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a> {
    /// Queries `[T, n, k]`.
    pub(super) query: &'a Tensor,
    /// Keys `[T, m, k]`.
    pub(super) key: &'a Tensor,
    /// Values `[T, m, v]`.
    pub(super) value: &'a Tensor,
    /// What others are given of the last two, where blocks travel.
    pub(super) carried: Option<&'a Carried>,
    /// Of the microbatch. Where those are cut, documents are not apart.
    pub(super) sequences: Sequences<'a>,
    /// Of whole sequences: blocks travel of those that are causal alone.
    pub(super) mask: Mask,
    /// On the scores.
    pub(super) scale: f32,
    /// One of each head here `[n]`, where there are some.
    pub(super) sinks: Option<&'a Weight>,
}

/// Adds sinks to the output of a core, in place; its log-sum-exp with them.
fn sink(cx: &Context, weight: Option<&Weight>, output: &Tensor, lse: Tensor) -> Tensor {
    match weight {
        None => lse,
        Some(weight) => cx.op(CATEGORY, || sinks::forward(output, &lse, &weight.value)),
    }
}

/// Adds to the gradients of sinks, from that of the output and what [`sink`] gave.
fn sink_backward(cx: &Context, weight: Option<&Weight>, [d, output, lse]: [&Tensor; 3]) {
    if let Some(Weight { value, grad }) = weight {
        cx.op(CATEGORY, || sinks::backward(d, output, lse, value, grad));
    }
}

/// The gradients of [`Inputs`].
pub(super) struct Gradients {
    pub(super) query: Tensor,
    /// By the queries of this rank alone where blocks travel, as that of values.
    pub(super) key: Tensor,
    pub(super) value: Tensor,
    /// By the queries of other ranks, where blocks travel.
    pub(super) carried: Option<Carried>,
}

/// Whether blocks of keys travel between ranks.
pub(super) fn travels(cx: &Context) -> bool {
    !cx.cp.is_solo() && cx.cp_comm != CpComm::A2a
}

/// The output `[T, n, v]` and the log-sum-exp of the scores; with exchanged heads that of whole sequences of a
/// share of them `[n / CP, CP T]`.
pub(super) fn forward(
    cx: &Context,
    carrier: &dyn Carrier,
    inputs: Inputs<'_>,
) -> Result<[Tensor; 2], Error> {
    if let Some(carried) = inputs.carried {
        return forward_over_blocks(cx, carrier, inputs, carried);
    }
    let Inputs {
        query,
        key,
        value,
        sequences,
        mask,
        scale,
        sinks,
        ..
    } = inputs;
    let core = |q: &Tensor, k: &Tensor, v: &Tensor| {
        cx.op(CATEGORY, || {
            attention::forward(mask, q, k, v, sequences, scale)
        })
    };
    if cx.cp.is_solo() {
        let (output, lse) = core(query, key, value);
        let lse = sink(cx, sinks, &output, lse);
        return Ok([output, lse]);
    }
    let heads = Heads::of(cx, query.dims()[0], sequences.count);
    let [q, k, v] = heads.take(cx, [query, key, value])?;
    let (output, lse) = core(&q, &k, &v);
    drop((q, k, v));
    let lse = sink(cx, own_sinks(cx, sinks).as_ref(), &output, lse);
    let [output] = heads.give_back(cx, [output])?;
    Ok([output, lse])
}

/// From the gradient of the output, and what [`forward`] read and gave.
pub(super) fn backward(
    cx: &Context,
    carrier: &dyn Carrier,
    inputs: Inputs<'_>,
    doutput: Tensor,
    [output, lse]: [Tensor; 2],
) -> Result<Gradients, Error> {
    if let Some(carried) = inputs.carried {
        return backward_over_blocks(cx, carrier, inputs, carried, &doutput, [&output, &lse]);
    }
    let Inputs {
        query,
        key,
        value,
        sequences,
        mask,
        scale,
        sinks,
        ..
    } = inputs;
    let core = |[d, q, k, v, o]: [&Tensor; 5]| {
        cx.op(CATEGORY, || {
            attention::backward(mask, d, q, k, v, o, &lse, sequences, scale)
        })
    };
    let (query, key, value) = if cx.cp.is_solo() {
        sink_backward(cx, sinks, [&doutput, &output, &lse]);
        core([&doutput, query, key, value, &output])
    } else {
        let heads = Heads::of(cx, query.dims()[0], sequences.count);
        let all = heads.take(cx, [&doutput, query, key, value, &output])?;
        drop((doutput, output));
        let [d, .., o] = &all;
        sink_backward(cx, own_sinks(cx, sinks).as_ref(), [d, o, &lse]);
        let (dq, dk, dv) = core(all.each_ref());
        drop(all);
        heads.give_back(cx, [dq, dk, dv])?.into()
    };
    Ok(Gradients {
        query,
        key,
        value,
        carried: None,
    })
}

/// Those of the heads of which this rank has whole sequences, where they are exchanged.
fn own_sinks(cx: &Context, all: Option<&Weight>) -> Option<Weight> {
    all.map(|Weight { value, grad }| {
        let heads = value.len() / cx.cp.size();
        let own = |all: &Tensor| all.view(cx.cp.index() * heads, &[heads]);
        Weight {
            value: own(value),
            grad: own(grad),
        }
    })
}

/// `[T, n, d]` as `[T, n * d]`.
pub(super) fn flat(heads: &Tensor) -> Tensor {
    let dims = heads.dims();
    heads.reshape(&[dims[0], dims[1] * dims[2]])
}

/// The two halves of `tokens` tokens.
fn halves(tokens: usize) -> [Range<usize>; 2] {
    [0..tokens / 2, tokens / 2..tokens]
}

/// Halves of queries of one rank, each with a half of keys of another that all of its tokens see whole.
fn pairs(cp: u32, queries: u32, keys: u32) -> Vec<[usize; 2]> {
    let [queries, keys] = [queries, keys].map(|rank| mesh::chunks(cp, rank));
    let all = (0..2).flat_map(|query| [0, 1].map(|key| [query, key]));
    all.filter(|&[query, key]| keys[key] < queries[query])
        .collect()
}

/// The tokens of a block that some query of a rank sees: its first half at least.
fn seen(pairs: &[[usize; 2]], tokens: usize) -> Range<usize> {
    let last = pairs.iter().map(|pair| pair[1]).max().unwrap_or(0);
    0..halves(tokens)[last].end
}

fn rows_of(carried: &Carried, range: &Range<usize>) -> Carried {
    carried.each_ref().map(|part| part.rows(range.clone()))
}

fn forward_over_blocks(
    cx: &Context,
    carrier: &dyn Carrier,
    inputs: Inputs<'_>,
    carried: &Carried,
) -> Result<[Tensor; 2], Error> {
    let Inputs {
        query,
        key,
        value,
        sequences: Sequences {
            count: sequences,
            documents,
        },
        mask,
        scale,
        sinks,
        ..
    } = inputs;
    assert!(documents.is_none() && mask == Mask::Causal, "{CUT}");
    let mut blocks = Blocks::start(cx, carried)?;
    let (cp, me, tokens) = (cx.layout.cp(), cx.at.cp, query.dims()[0]);
    let (output, lse) = cx.op(CATEGORY, || {
        attention::forward(Mask::Causal, query, key, value, 2 * sequences, scale)
    });
    let attend = |pairs: &[[usize; 2]], key: &Tensor, value: &Tensor| {
        for &[queries, keys] in pairs {
            let [queries, keys] = [queries, keys].map(|half| halves(tokens)[half].clone());
            let at = queries.start;
            let (query, key, value) = (
                query.rows(queries),
                key.rows(keys.clone()),
                value.rows(keys),
            );
            cx.op(CATEGORY, || {
                let (part, part_lse) =
                    attention::forward(Mask::Full, &query, &key, &value, sequences, scale);
                merge::merge(&part, &part_lse, at, &output, &lse);
            });
        }
    };
    attend(&pairs(cp, me, me), key, value);
    while let Some((owner, block)) = blocks.next(cx)? {
        let pairs = pairs(cp, me, owner);
        let block = rows_of(&block, &seen(&pairs, tokens));
        let [key, value] = carrier.expand(cx, &block);
        attend(&pairs, &key, &value);
    }
    let lse = sink(cx, sinks, &output, lse);
    Ok([output, lse])
}

fn backward_over_blocks(
    cx: &Context,
    carrier: &dyn Carrier,
    inputs: Inputs<'_>,
    carried: &Carried,
    doutput: &Tensor,
    [output, lse]: [&Tensor; 2],
) -> Result<Gradients, Error> {
    let Inputs {
        query,
        key,
        value,
        sequences: Sequences {
            count: sequences,
            documents,
        },
        mask,
        scale,
        sinks,
        ..
    } = inputs;
    assert!(documents.is_none() && mask == Mask::Causal, "{CUT}");
    let mut blocks = Blocks::start(cx, carried)?;
    sink_backward(cx, sinks, [doutput, output, lse]);
    let (cp, me, tokens) = (cx.layout.cp(), cx.at.cp, query.dims()[0]);
    let (dquery, dkey, dvalue) = cx.op(CATEGORY, || {
        let seqs = 2 * sequences;
        attention::backward(
            Mask::Causal,
            doutput,
            query,
            key,
            value,
            output,
            lse,
            seqs,
            scale,
        )
    });
    let lse = halves(tokens).map(|half| cx.op(CATEGORY, || rows::gather_columns(lse, half)));
    // Adds to the gradient of queries, and gives those of a half of keys and of values.
    let pass = |[queries, keys]: [usize; 2], key: &Tensor, value: &Tensor| {
        let at = halves(tokens)[queries].clone();
        let half = |x: &Tensor| x.rows(at.clone());
        let keys = halves(tokens)[keys].clone();
        let (key, value) = (key.rows(keys.clone()), value.rows(keys));
        cx.op(CATEGORY, || {
            let (dpart, dkey, dvalue) = attention::backward(
                Mask::Full,
                &half(doutput),
                &half(query),
                &key,
                &value,
                &half(output),
                &lse[queries],
                sequences,
                scale,
            );
            add_into(&half(&dquery), &dpart);
            [dkey, dvalue]
        })
    };
    for pair in pairs(cp, me, me) {
        let parts = pass(pair, key, value);
        let own = rows_of(&[dkey.clone(), dvalue.clone()], &halves(tokens)[pair[1]]);
        add_onto(cx, own.each_ref(), &parts);
    }
    let mut returning = Returning::new(cx, carried);
    while let Some((owner, block)) = blocks.next(cx)? {
        let pairs = pairs(cp, me, owner);
        let seen = rows_of(&block, &seen(&pairs, tokens));
        let [key, value] = carrier.expand(cx, &seen);
        let mut of_halves: [Option<[Tensor; 2]>; 2] = [None, None];
        for pair in pairs {
            let parts = pass(pair, &key, &value);
            match &of_halves[pair[1]] {
                Some(sums) => add_onto(cx, sums.each_ref(), &parts),
                None => of_halves[pair[1]] = Some(parts),
            }
        }
        drop((key, value, seen));
        let mut gradients = Vec::new();
        for (half, parts) in halves(tokens).into_iter().zip(of_halves) {
            if let Some(parts) = parts {
                let reduced = carrier.reduce(cx, &rows_of(&block, &half), parts);
                gradients.push((half, reduced));
            }
        }
        drop(block);
        returning.add(cx, owner, &gradients)?;
    }
    Ok(Gradients {
        query: dquery,
        key: dkey,
        value: dvalue,
        carried: Some(returning.finish(cx)?),
    })
}

/// Blocks of the other ranks: that of the one before this, then of the one before it, and so on.
struct Blocks {
    /// Steps done.
    step: usize,
    coming: Coming,
}

enum Coming {
    /// All of them, and what is to be awaited before they are there.
    Gathered(Carried, Vec<Pending>),
    /// The next on a ring, with what is sent meanwhile.
    Ring(Option<OnTheWay>),
}

/// One step on a ring.
struct OnTheWay {
    /// Kept until it has left.
    sent: Carried,
    arriving: Carried,
    pending: Vec<Pending>,
}

impl OnTheWay {
    fn start(cx: &Context, sent: Carried) -> Result<Self, Error> {
        let arriving = sent.each_ref().map(|part| empty(cx, part, 1));
        let mut pending = Vec::with_capacity(sent.len());
        for (sent, arriving) in sent.iter().zip(&arriving) {
            pending.push(cx.comm(Category::CpComm, "send_recv", || {
                cx.cp.start_shift(sent, arriving)
            })?);
        }
        Ok(Self {
            sent,
            arriving,
            pending,
        })
    }

    fn finish(self, cx: &Context) -> Result<Carried, Error> {
        await_all(cx, "send_recv", self.pending)?;
        drop(self.sent);
        Ok(self.arriving)
    }
}

/// Room for so many blocks.
fn empty(cx: &Context, block: &Tensor, blocks: usize) -> Tensor {
    let mut dims = block.dims().to_vec();
    dims[0] *= blocks;
    cx.device
        .empty(TensorClass::Transient, block.dtype(), &dims)
}

fn await_all(cx: &Context, stem: &'static str, pending: Vec<Pending>) -> Result<(), Error> {
    for pending in pending {
        cx.comm(Category::CpComm, stem, || pending.wait())?;
    }
    Ok(())
}

/// The rank whose block comes after so many steps.
fn owner(cx: &Context, step: usize) -> usize {
    let cp = cx.cp.size();
    (cx.cp.index() + cp - step) % cp
}

impl Blocks {
    fn start(cx: &Context, carried: &Carried) -> Result<Self, Error> {
        let coming = if cx.cp_comm == CpComm::P2p {
            Coming::Ring(Some(OnTheWay::start(cx, carried.clone())?))
        } else {
            let all = carried.each_ref().map(|part| empty(cx, part, cx.cp.size()));
            let mut pending = Vec::with_capacity(all.len());
            for (own, all) in carried.iter().zip(&all) {
                pending.push(cx.comm(Category::CpComm, "all_gather", || {
                    cx.cp.start_all_gather(own, all)
                })?);
            }
            Coming::Gathered(all, pending)
        };
        Ok(Self { step: 0, coming })
    }

    /// The next with the rank that it is of, where there is one.
    fn next(&mut self, cx: &Context) -> Result<Option<(u32, Carried)>, Error> {
        self.step += 1;
        if self.step == cx.cp.size() {
            return Ok(None);
        }
        let owner = owner(cx, self.step);
        let block = match &mut self.coming {
            Coming::Gathered(all, pending) => {
                await_all(cx, "all_gather", std::mem::take(pending))?;
                let tokens = all[0].dims()[0] / cx.cp.size();
                rows_of(all, &(owner * tokens..(owner + 1) * tokens))
            }
            Coming::Ring(next) => {
                let arrived = next.take().expect("one a step").finish(cx)?;
                if self.step + 1 < cx.cp.size() {
                    *next = Some(OnTheWay::start(cx, arrived.clone())?);
                }
                arrived
            }
        };
        Ok(Some((owner as u32, block)))
    }
}

/// Gradients of the blocks of other ranks, on their way home.
enum Returning<'a> {
    /// Of all blocks.
    Gathered(Carried),
    /// What the ranks before have added for the next block; for the first, only its own size.
    Ring(&'a Carried, Option<OnTheWay>),
}

impl<'a> Returning<'a> {
    /// None yet of blocks as large as `carried`.
    fn new(cx: &Context, carried: &'a Carried) -> Self {
        if cx.cp_comm == CpComm::P2p {
            Self::Ring(carried, None)
        } else {
            Self::Gathered(zeros(cx, carried, cx.cp.size()))
        }
    }

    /// Adds to the gradients of the block of a rank, in the order of [`Blocks`].
    fn add(
        &mut self,
        cx: &Context,
        owner: u32,
        gradients: &[(Range<usize>, Carried)],
    ) -> Result<(), Error> {
        let onto = |sums: &Carried, first: usize| {
            for (range, parts) in gradients {
                let sums = rows_of(sums, &(first + range.start..first + range.end));
                add_onto(cx, sums.each_ref(), parts);
            }
        };
        match self {
            Self::Gathered(all) => onto(all, owner as usize * all[0].dims()[0] / cx.cp.size()),
            Self::Ring(like, before) => {
                let sums = match before.take() {
                    Some(before) => before.finish(cx)?,
                    None => zeros(cx, like, 1),
                };
                onto(&sums, 0);
                *before = Some(OnTheWay::start(cx, sums)?);
            }
        }
        Ok(())
    }

    /// What other ranks have added for the block of this one.
    fn finish(self, cx: &Context) -> Result<Carried, Error> {
        let all = match self {
            Self::Ring(_, last) => return last.expect("one other rank at least").finish(cx),
            Self::Gathered(all) => all,
        };
        let dims = |all: &Tensor| {
            let mut dims = all.dims().to_vec();
            dims[0] /= cx.cp.size();
            dims
        };
        let own = all.each_ref().map(|all| {
            let class = TensorClass::Transient;
            cx.device.empty(class, all.dtype(), &dims(all))
        });
        let mut pending = Vec::with_capacity(all.len());
        for (all, own) in all.iter().zip(&own) {
            pending.push(cx.comm(Category::CpComm, "reduce_scatter", || {
                cx.cp.start_reduce_scatter(all, own)
            })?);
        }
        await_all(cx, "reduce_scatter", pending)?;
        Ok(own)
    }
}

fn zeros(cx: &Context, block: &Carried, blocks: usize) -> Carried {
    let zeros = |part: &Tensor| {
        let mut dims = part.dims().to_vec();
        dims[0] *= blocks;
        let class = TensorClass::Transient;
        cx.device.zeros(class, part.dtype(), &dims)
    };
    block.each_ref().map(zeros)
}

fn add_onto(cx: &Context, sums: [&Tensor; 2], parts: &[Tensor; 2]) {
    cx.op(CATEGORY, || {
        let pairs = sums.into_iter().zip(parts);
        pairs.for_each(|(sum, part)| add_into(sum, part));
    });
}

/// The exchange of heads against tokens: `[T, n, w]` of all heads to `[CP T, n / CP, w]`, whole sequences of a
/// share of the heads, and back.
struct Heads {
    /// Of a rank.
    tokens: usize,
    /// The rows that each chunk of the sequences has among those that come, rank by rank.
    order: rows::Chunks,
}

impl Heads {
    fn of(cx: &Context, tokens: usize, sequences: usize) -> Self {
        let cp = cx.layout.cp();
        let len = tokens / 2 / sequences;
        let mut places: Vec<(u32, usize)> = (0..cp)
            .flat_map(|rank| {
                let chunks = mesh::chunks(cp, rank).into_iter().zip(halves(tokens));
                chunks.map(move |(chunk, half)| (chunk, rank as usize * tokens + half.start))
            })
            .collect();
        places.sort_unstable();
        let of_sequence = |sequence: usize| {
            let places = places.iter();
            places.map(move |(_, start)| start + sequence * len..start + (sequence + 1) * len)
        };
        Self {
            tokens,
            order: (0..sequences).flat_map(of_sequence).collect(),
        }
    }

    fn take<const N: usize>(&self, cx: &Context, all: [&Tensor; N]) -> Result<[Tensor; N], Error> {
        let cp = cx.cp.size();
        let cut = all.map(|x| {
            let (heads, width) = (x.dims()[1] / cp, x.dims()[2]);
            let dims = [cp * self.tokens, heads, width];
            let cut = cx.device.empty(TensorClass::Transient, x.dtype(), &dims);
            let all = flat(x);
            cx.op(CATEGORY, || {
                for rank in 0..cp {
                    let columns = rank * heads * width..(rank + 1) * heads * width;
                    let rows = cut.rows(rank * self.tokens..(rank + 1) * self.tokens);
                    rows::gather_columns_into(&all, columns, &flat(&rows));
                }
            });
            cut
        });
        let exchanged = exchange(cx, cut)?;
        Ok(exchanged.map(|x| cx.op(CATEGORY, || rows::gather_chunks(&x, &self.order))))
    }

    fn give_back<const N: usize>(
        &self,
        cx: &Context,
        all: [Tensor; N],
    ) -> Result<[Tensor; N], Error> {
        let cp = cx.cp.size();
        let cut = all.map(|x| cx.op(CATEGORY, || rows::scatter_chunks(&x, &self.order)));
        let exchanged = exchange(cx, cut)?;
        Ok(exchanged.map(|x| {
            let (heads, width) = (x.dims()[1], x.dims()[2]);
            let dims = [self.tokens, cp * heads * width];
            let whole = cx.device.empty(TensorClass::Activations, x.dtype(), &dims);
            cx.op(CATEGORY, || {
                for rank in 0..cp {
                    let columns = rank * heads * width..(rank + 1) * heads * width;
                    let rows = x.rows(rank * self.tokens..(rank + 1) * self.tokens);
                    rows::scatter_columns(&flat(&rows), &whole, columns);
                }
            });
            whole.reshape(&[self.tokens, cp * heads, width])
        }))
    }
}

/// As many rows of each tensor from every rank to every other.
fn exchange<const N: usize>(cx: &Context, sent: [Tensor; N]) -> Result<[Tensor; N], Error> {
    let received = sent.each_ref().map(|x| empty(cx, x, 1));
    let mut pending = Vec::with_capacity(N);
    for (sent, received) in sent.iter().zip(&received) {
        pending.push(cx.comm(Category::CpComm, "all_to_all", || {
            cx.cp.start_all_to_all_even(sent, received)
        })?);
    }
    await_all(cx, "all_to_all", pending)?;
    drop(sent);
    Ok(received)
}
