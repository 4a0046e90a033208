//! Causal attention with grouped queries, blocked over queries.
//!
//! `q [T,h,dk]`, `k [T,hk,dk]`, `v [T,hk,dv]` hold `seqs` sequences of `T / seqs` tokens each, query
//! head `i` reading key/value head `i / (h / hk)`. `o_t = sum over s <= t of softmax(scale * q_t .
//! k_s) v_s`, and `lse [h,T]` is the logarithm of the softmax denominator, which is all that
//! backward needs besides the inputs and o: it recomputes the scores (FlashAttention-2, arXiv
//! 2307.08691, algorithms 1 and 2).
//!
//! That is [`Mask::Causal`]. With [`Mask::Full`] the sum is over all tokens of the sequence: what a
//! rank of a ring computes against keys of an earlier one. With [`Mask::Window`] it is over the last so
//! many up to `t` (Mistral, arXiv 2310.06825, section 2). Where sequences are of several [`Documents`], the sum
//! begins at the document of `t` besides.
//!
//! Scores exist for one block of queries of one head a thread at a time, never for a whole sequence.
//! A device implementation: a flash kernel with the same `lse`; gradients of k and v sum over the
//! query heads of their group in a fixed order, those of q over the keys. Blocks of keys out of reach
//! are not touched. `scale` is positive. A GPU takes heads of at most [`MAX_WIDTH`].

use moefold_profiles::{Dtype, Op, Pass};

use crate::buffer::with;
use crate::device::{Backend, Device, TensorClass};
use crate::tensor::{Tensor, expect_dims};

/// Width of a head on a GPU, at most: of queries and keys as of values.
pub const MAX_WIDTH: usize = 256;

/// Which keys of its sequence a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// Those up to its own.
    Causal,
    /// All.
    Full,
    /// The last so many, at least one, up to its own.
    Window(usize),
}

/// How the tokens of a call are divided: what is in different parts does not see each other.
#[derive(Debug, Clone, Copy)]
pub struct Sequences<'a> {
    /// Sequences of as many tokens each.
    pub count: usize,
    /// The documents in them, where they are apart. Not with [`Mask::Full`].
    pub documents: Option<&'a Documents>,
}

impl From<usize> for Sequences<'_> {
    /// Whole sequences.
    fn from(count: usize) -> Self {
        Self {
            count,
            documents: None,
        }
    }
}

/// Documents, one after the other in every sequence.
#[derive(Debug, Clone)]
pub struct Documents {
    /// Of each token where its document begins, then of each where it ends `[2, T]`, in its sequence.
    bounds: Tensor,
}

impl Documents {
    /// Documents that begin at `starts [T]`: of each token of `seqs` sequences, the first one of its document,
    /// counted in its sequence.
    ///
    /// # Panics
    /// When a token begins no document and is not in that of the token before it.
    pub fn new(device: &Device, class: TensorClass, starts: &[i32], seqs: usize) -> Self {
        let tokens = starts.len();
        assert!(
            seqs > 0 && tokens.is_multiple_of(seqs),
            "attention::Documents: {tokens} tokens are not {seqs} equal sequences"
        );
        let mut bounds = starts.to_vec();
        bounds.resize(2 * tokens, 0);
        let (starts, ends) = bounds.split_at_mut(tokens);
        let len = (tokens / seqs).max(1);
        for (starts, ends) in starts.chunks_exact(len).zip(ends.chunks_exact_mut(len)) {
            let mut end = len;
            for token in (0..len).rev() {
                ends[token] = end as i32;
                let (start, begins) = (starts[token], starts[token] == token as i32);
                assert!(
                    begins || token > 0 && start == starts[token - 1],
                    "attention::Documents: token {token} of a sequence is in a document from {start}"
                );
                if begins {
                    end = token;
                }
            }
        }
        Self {
            bounds: device.from_i32(class, &bounds, &[2, tokens]),
        }
    }
}

/// Sizes of one call.
#[derive(Clone, Copy)]
struct Sizes {
    mask: Mask,
    seqs: usize,
    seq_len: usize,
    heads: usize,
    kv_heads: usize,
    dk: usize,
    dv: usize,
}

/// The cost-table key of attention over `seqs` sequences.
pub fn key(q: &Tensor, k: &Tensor, v: &Tensor, seqs: usize, pass: Pass) -> Op {
    let s = sizes("attention::key", q, k, v, seqs, Mask::Causal);
    key_of(s, pass, q.dtype())
}

/// A window is a band of as many keys for every query, as the planner prices it.
fn key_of(s: Sizes, pass: Pass, dtype: Dtype) -> Op {
    let kv_len = match s.mask {
        Mask::Causal | Mask::Full => s.seq_len,
        Mask::Window(keys) => keys,
    };
    Op::Attention {
        batch: s.seqs as u64,
        heads: s.heads as u64,
        kv_heads: s.kv_heads as u64,
        q_len: s.seq_len as u64,
        kv_len: kv_len as u64,
        qk_dim: s.dk as u64,
        v_dim: s.dv as u64,
        causal: s.mask == Mask::Causal,
        pass,
        dtype,
    }
}

/// `q [T,h,dk]`, `k [T,hk,dk]`, `v [T,hk,dv]` to `(o [T,h,dv], lse [h,T])`.
///
/// # Panics
/// When the shapes do not agree, `seqs` does not divide the tokens, or documents are of others.
pub fn forward<'a>(
    mask: Mask,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqs: impl Into<Sequences<'a>>,
    scale: f32,
) -> (Tensor, Tensor) {
    let (s, bounds) = divided("attention::forward", q, k, v, seqs.into(), mask);
    let _op = q.device().begin(|| key_of(s, Pass::Forward, q.dtype()));
    let (device, tokens) = (q.device(), s.seqs * s.seq_len);
    let o = device.empty(
        TensorClass::Activations,
        q.dtype(),
        &[tokens, s.heads, s.dv],
    );
    let lse = device.empty(TensorClass::Activations, Dtype::F32, &[s.heads, tokens]);
    match &device.0.backend {
        Backend::Cpu(cpu) => {
            with(
                "attention::forward",
                [q, k, v, bounds.unwrap_or(q)],
                [&o, &lse],
                |[q, k, v, all], [o, lse]| {
                    cpu::forward(
                        cpu,
                        s,
                        bounds.map(|_| all.i32()),
                        scale,
                        [q.f32(), k.f32(), v.f32()],
                        o.f32(),
                        lse.f32(),
                    );
                },
            );
        }
        Backend::Cuda(gpu) => cuda::forward(gpu, s, bounds, scale, [q, k, v], &o, &lse),
    }
    (o, lse)
}

/// `do [T,h,dv]` and what forward read and wrote, to `(dq, dk, dv)` in the shapes of q, k and v.
///
/// # Panics
/// As [`forward`].
#[expect(
    clippy::too_many_arguments,
    reason = "the inputs and outputs of forward, by name"
)]
pub fn backward<'a>(
    mask: Mask,
    d_o: &Tensor,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    o: &Tensor,
    lse: &Tensor,
    seqs: impl Into<Sequences<'a>>,
    scale: f32,
) -> (Tensor, Tensor, Tensor) {
    let (s, bounds) = divided("attention::backward", q, k, v, seqs.into(), mask);
    let _op = q.device().begin(|| key_of(s, Pass::Backward, q.dtype()));
    let tokens = s.seqs * s.seq_len;
    expect_dims("attention::backward", "o", o, &[tokens, s.heads, s.dv]);
    expect_dims("attention::backward", "do", d_o, &[tokens, s.heads, s.dv]);
    expect_dims("attention::backward", "lse", lse, &[s.heads, tokens]);
    let device = q.device();
    let [dq, dk, dv] =
        [q, k, v].map(|t| device.empty(TensorClass::Activations, t.dtype(), t.dims()));
    match &device.0.backend {
        Backend::Cpu(cpu) => with(
            "attention::backward",
            [d_o, q, k, v, o, lse, bounds.unwrap_or(q)],
            [&dq, &dk, &dv],
            |[d_o, q, k, v, o, lse, all], outputs| {
                cpu::backward(
                    cpu,
                    s,
                    bounds.map(|_| all.i32()),
                    scale,
                    [d_o, q, k, v, o, lse].map(crate::buffer::Input::f32),
                    outputs.map(crate::buffer::Output::f32),
                );
            },
        ),
        Backend::Cuda(gpu) => {
            let inputs = [d_o, q, k, v, o, lse];
            cuda::backward(gpu, s, bounds, scale, inputs, [&dq, &dk, &dv]);
        }
    }
    (dq, dk, dv)
}

/// The sizes of a call, and the bounds of documents `[2, T]` where those are apart.
fn divided<'a>(
    op: &str,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sequences: Sequences<'a>,
    mask: Mask,
) -> (Sizes, Option<&'a Tensor>) {
    let s = sizes(op, q, k, v, sequences.count, mask);
    let bounds = sequences.documents.map(|documents| &documents.bounds);
    if let Some(bounds) = bounds {
        assert!(mask != Mask::Full, "{op}: of documents no query sees all");
        expect_dims(op, "documents", bounds, &[2, s.seqs * s.seq_len]);
    }
    (s, bounds)
}

fn sizes(op: &str, q: &Tensor, k: &Tensor, v: &Tensor, seqs: usize, mask: Mask) -> Sizes {
    let dims = |name: &str, t: &Tensor| -> [usize; 3] {
        t.dims()
            .try_into()
            .unwrap_or_else(|_| panic!("{op}: {name} is {t:?}, expected [tokens, heads, width]"))
    };
    let ([tokens, heads, dk], [k_tokens, kv_heads, k_width]) = (dims("q", q), dims("k", k));
    let [v_tokens, v_heads, dv] = dims("v", v);
    assert!(
        tokens == k_tokens && tokens == v_tokens && kv_heads == v_heads && k_width == dk,
        "{op}: q {q:?}, k {k:?} and v {v:?} do not agree"
    );
    assert!(
        kv_heads > 0 && heads.is_multiple_of(kv_heads),
        "{op}: {heads} query heads over {kv_heads} key/value heads"
    );
    assert!(
        seqs > 0 && tokens.is_multiple_of(seqs),
        "{op}: {tokens} tokens are not {seqs} equal sequences"
    );
    assert!(mask != Mask::Window(0), "{op}: a window of no keys");
    // What reaches over a whole sequence is no window.
    let mask = match mask {
        Mask::Window(keys) if keys >= tokens / seqs => Mask::Causal,
        mask => mask,
    };
    Sizes {
        mask,
        seqs,
        seq_len: tokens / seqs,
        heads,
        kv_heads,
        dk,
        dv,
    }
}

pub(crate) mod cuda;
mod hopper;

mod cpu {
    use std::cell::RefCell;
    use std::ops::Range;

    use super::{Mask, Sizes};
    use crate::matrix::{Matrix, MatrixMut};
    use crate::parallel::Cpu;
    use crate::product::multiply;
    use crate::simd::{LANES, dot, exp, fold, max, vectorized};
    use crate::turn::turned;

    /// Queries in a block: enough for the product to run at speed, and a block of scores against
    /// a thousand keys fits the second-level cache.
    const BLOCK: usize = 64;

    thread_local! {
        /// Scores of one block and their gradients; keys and values of one head, transposed.
        static SCRATCH: RefCell<[Vec<f32>; 3]> = const { RefCell::new([const { Vec::new() }; 3]) };
    }

    /// Lends the thread's scratch: `len` floats for scores, and two vectors for transposes.
    fn with_scratch(len: usize, body: impl FnOnce(&mut [f32], &mut Vec<f32>, &mut Vec<f32>)) {
        SCRATCH.with_borrow_mut(|[scores, keys, values]| {
            if scores.len() < len {
                scores.resize(len, 0.0);
            }
            body(&mut scores[..len], keys, values);
        });
    }

    impl Sizes {
        /// Splits `[tokens, heads * width]` into one matrix `[seq_len, width]` for each sequence
        /// and head, sequences outermost.
        fn tiles<'a>(&self, data: &'a mut [f32], heads: usize, width: usize) -> Vec<MatrixMut<'a>> {
            let mut tiles = Vec::with_capacity(self.seqs * heads);
            let mut rest = MatrixMut::new(data, self.seqs * self.seq_len, heads * width);
            for _ in 0..self.seqs {
                let (mut sequence, later) = rest.split_rows(self.seq_len);
                for _ in 0..heads {
                    let (tile, others) = sequence.split_cols(width);
                    tiles.push(tile);
                    sequence = others;
                }
                rest = later;
            }
            tiles
        }

        /// What the queries of a sequence see, whose documents are those of `bounds`.
        fn sight<'a>(&self, bounds: Option<&'a [i32]>, seq: usize) -> Sight<'a> {
            let tokens = seq * self.seq_len..(seq + 1) * self.seq_len;
            Sight {
                mask: self.mask,
                seq_len: self.seq_len,
                starts: bounds.map(|bounds| &bounds[tokens]),
            }
        }

        /// One such matrix of an input.
        fn tile<'a>(&self, data: &'a [f32], heads: usize, seq: usize, head: usize) -> Matrix<'a> {
            let tokens = self.seqs * self.seq_len;
            let width = if tokens == 0 {
                0
            } else {
                data.len() / (tokens * heads)
            };
            Matrix::new(data, tokens, heads * width)
                .rows(seq * self.seq_len..(seq + 1) * self.seq_len)
                .cols(head * width..(head + 1) * width)
        }
    }

    /// Which keys of its sequence each query sees.
    #[derive(Clone, Copy)]
    struct Sight<'a> {
        mask: Mask,
        seq_len: usize,
        /// Where the document of each token begins, where documents are apart.
        starts: Option<&'a [i32]>,
    }

    impl<'a> Sight<'a> {
        /// The keys that a block of queries sees together.
        fn keys(&self, queries: &Range<usize>) -> Range<usize> {
            let start = self
                .starts
                .map_or(0, |starts| starts[queries.start] as usize);
            match self.mask {
                Mask::Causal => start..queries.end,
                Mask::Full => 0..self.seq_len,
                Mask::Window(keys) => {
                    (queries.start + 1).saturating_sub(keys).max(start)..queries.end
                }
            }
        }

        /// Which of them each query sees.
        fn seen(&self, queries: &Range<usize>) -> Seen<'a> {
            let keys = self.keys(queries);
            Seen {
                keys: keys.len(),
                first: match self.mask {
                    Mask::Causal | Mask::Window(_) => queries.start + 1 - keys.start,
                    Mask::Full => self.seq_len,
                },
                at_most: match self.mask {
                    Mask::Causal | Mask::Full => usize::MAX,
                    Mask::Window(keys) => keys,
                },
                before: keys.start,
                starts: self.starts.map(|starts| &starts[queries.clone()]),
            }
        }

        /// Whether the last block of queries sees every key.
        fn ends_in_all(&self) -> bool {
            self.starts.is_none() && !matches!(self.mask, Mask::Window(_))
        }
    }

    /// Which keys of a block's each of its queries sees.
    #[derive(Clone, Copy)]
    struct Seen<'a> {
        /// The block's.
        keys: usize,
        /// Where those that its first query sees end; those of each after it end one later, up to all.
        first: usize,
        /// How many before that end.
        at_most: usize,
        /// Keys of the sequence before the block's.
        before: usize,
        /// Where the document of each query begins in the sequence.
        starts: Option<&'a [i32]>,
    }

    impl Seen<'_> {
        /// What query `i` of the block sees of a row of all keys; the rest of the row is zeroed.
        #[inline]
        fn of<'b>(&self, i: usize, row: &'b mut [f32]) -> &'b mut [f32] {
            let end = (self.first + i).min(self.keys);
            let (row, after) = row.split_at_mut(end);
            after.fill(0.0);
            let mut start = end.saturating_sub(self.at_most);
            if let Some(starts) = self.starts {
                start = start.max((starts[i] as usize).saturating_sub(self.before));
            }
            let (before, row) = row.split_at_mut(start);
            before.fill(0.0);
            row
        }
    }

    /// Blocks of queries of a sequence, as ranges.
    fn blocks(seq_len: usize) -> impl DoubleEndedIterator<Item = Range<usize>> {
        (0..seq_len.div_ceil(BLOCK)).map(move |b| b * BLOCK..((b + 1) * BLOCK).min(seq_len))
    }

    pub(super) fn forward(
        cpu: &Cpu,
        s: Sizes,
        bounds: Option<&[i32]>,
        scale: f32,
        [q, k, v]: [&[f32]; 3],
        o: &mut [f32],
        lse: &mut [f32],
    ) {
        if s.seq_len == 0 {
            return;
        }
        // lse is [heads, seqs, seq_len]: its pieces are matched to the tiles of o.
        let mut pieces: Vec<Option<&mut [f32]>> =
            lse.chunks_exact_mut(s.seq_len).map(Some).collect();
        let mut tasks = Vec::new();
        for (i, o) in s.tiles(o, s.heads, s.dv).into_iter().enumerate() {
            let (seq, head) = (i / s.heads, i % s.heads);
            let lse = pieces[head * s.seqs + seq]
                .take()
                .expect("each piece is used once");
            let kv_head = head / (s.heads / s.kv_heads);
            let q = s.tile(q, s.heads, seq, head);
            let k = s.tile(k, s.kv_heads, seq, kv_head);
            let v = s.tile(v, s.kv_heads, seq, kv_head);
            tasks.push((s.sight(bounds, seq), q, k, v, o, lse));
        }
        cpu.tasks(tasks, |(sight, q, k, v, mut o, lse)| {
            with_scratch(BLOCK * s.seq_len, |scratch, turned_k, _| {
                let keys_t = turned(k.t(), turned_k);

                for queries in blocks(s.seq_len) {
                    let (rows, keys) = (queries.len(), sight.keys(&queries));
                    let scores = &mut scratch[..rows * keys.len()];
                    let target = MatrixMut::new(scores, rows, keys.len());
                    multiply(
                        scale,
                        q.rows(queries.clone()),
                        keys_t.cols(keys.clone()),
                        0.0,
                        target,
                    );
                    softmax(scores, sight.seen(&queries), &mut lse[queries.clone()]);
                    let probs = Matrix::new(scores, rows, keys.len());
                    let target = o.reborrow().rows(queries);
                    multiply(1.0, probs, v.rows(keys), 0.0, target);
                }
            });
        });
    }

    vectorized! {
        /// Softmax of each row over the keys it sees, zero beyond.
        fn softmax(scores: &mut [f32], seen: Seen<'_>, lse: &mut [f32]) {
            for i in 0..lse.len() {
                let row = seen.of(i, &mut scores[i * seen.keys..][..seen.keys]);
                let top = max(row);
                let mut lanes = [0.0; LANES];
                let (chunks, tail) = row.as_chunks_mut::<LANES>();
                for chunk in chunks {
                    for (x, lane) in chunk.iter_mut().zip(&mut lanes) {
                        *x = exp(*x - top);
                        *lane += *x;
                    }
                }
                for (x, lane) in tail.iter_mut().zip(&mut lanes) {
                    *x = exp(*x - top);
                    *lane += *x;
                }
                let sum = fold(lanes, |a, b| a + b);
                let inverse = 1.0 / sum;
                for x in row {
                    *x *= inverse;
                }
                lse[i] = top + sum.ln();
            }
        }
    }

    pub(super) fn backward(
        cpu: &Cpu,
        s: Sizes,
        bounds: Option<&[i32]>,
        scale: f32,
        [d_o, q, k, v, o, lse]: [&[f32]; 6],
        [dq, dk, dv]: [&mut [f32]; 3],
    ) {
        if s.seq_len == 0 {
            return;
        }
        let group = s.heads / s.kv_heads;
        let mut dq = s.tiles(dq, s.heads, s.dk).into_iter();
        let dk = s.tiles(dk, s.kv_heads, s.dk);
        let dv = s.tiles(dv, s.kv_heads, s.dv);
        let mut tasks = Vec::new();
        for (i, (dk, dv)) in dk.into_iter().zip(dv).enumerate() {
            let dq: Vec<MatrixMut<'_>> = dq.by_ref().take(group).collect();
            tasks.push((i / s.kv_heads, i % s.kv_heads, dq, dk, dv));
        }
        cpu.tasks(tasks, |(seq, kv_head, dq, mut dk, mut dv)| {
            with_scratch(2 * BLOCK * s.seq_len, |scratch, turned_k, turned_v| {
                let (probs, dscores) = scratch.split_at_mut(BLOCK * s.seq_len);
                let k = s.tile(k, s.kv_heads, seq, kv_head);
                let v = s.tile(v, s.kv_heads, seq, kv_head);
                let keys_t = turned(k.t(), turned_k);
                let values_t = turned(v.t(), turned_v);
                // From the last block, whose queries see every key, so that the first product
                // writes all of dk and dv and the others add; but of windows or documents none sees
                // every key.
                let sight = s.sight(bounds, seq);
                let mut beta = 0.0;
                if !sight.ends_in_all() {
                    for key in 0..s.seq_len {
                        dk.row(key).fill(0.0);
                        dv.row(key).fill(0.0);
                    }
                    beta = 1.0;
                }
                for (member, mut dq) in dq.into_iter().enumerate() {
                    let head = kv_head * group + member;
                    let q = s.tile(q, s.heads, seq, head);
                    let o = s.tile(o, s.heads, seq, head);
                    let d_o = s.tile(d_o, s.heads, seq, head);
                    let lse = &lse[(head * s.seqs + seq) * s.seq_len..][..s.seq_len];
                    for queries in blocks(s.seq_len).rev() {
                        let (rows, keys) = (queries.len(), sight.keys(&queries));
                        let (q, d_o) = (q.rows(queries.clone()), d_o.rows(queries.clone()));
                        let o = o.rows(queries.clone());

                        let probs = &mut probs[..rows * keys.len()];
                        let dscores = &mut dscores[..rows * keys.len()];
                        let target = MatrixMut::new(probs, rows, keys.len());
                        multiply(scale, q, keys_t.cols(keys.clone()), 0.0, target);
                        let target = MatrixMut::new(dscores, rows, keys.len());
                        multiply(1.0, d_o, values_t.cols(keys.clone()), 0.0, target);
                        let mut delta = [0.0; BLOCK];
                        for (row, delta) in delta[..rows].iter_mut().enumerate() {
                            *delta = d_o_dot_o(d_o.row(row), o.row(row));
                        }
                        let lse = &lse[queries.clone()];
                        gradient(probs, dscores, sight.seen(&queries), lse, &delta, scale);
                        let probs = Matrix::new(probs, rows, keys.len());
                        let dscores = Matrix::new(dscores, rows, keys.len());
                        multiply(
                            1.0,
                            dscores,
                            k.rows(keys.clone()),
                            0.0,
                            dq.reborrow().rows(queries),
                        );
                        let dk = dk.reborrow().rows(keys.clone());
                        multiply(1.0, dscores.t(), q, beta, dk);
                        let dv = dv.reborrow().rows(keys);
                        multiply(1.0, probs.t(), d_o, beta, dv);
                        beta = 1.0;
                    }
                }
            });
        });
    }

    vectorized! {
        fn d_o_dot_o(d_o: &[f32], o: &[f32]) -> f32 {
            dot(d_o, o)
        }
    }

    vectorized! {
        /// Scores to probabilities and their gradients to those of the unscaled scores:
        /// `p = exp(s - lse)`, `ds = scale * p * (dp - delta)`; zero for the keys a row does not see.
        fn gradient(
            scores: &mut [f32],
            dprobs: &mut [f32],
            seen: Seen<'_>,
            lse: &[f32],
            delta: &[f32],
            scale: f32,
        ) {
            for (i, &lse) in lse.iter().enumerate() {
                let p = seen.of(i, &mut scores[i * seen.keys..][..seen.keys]);
                let d = seen.of(i, &mut dprobs[i * seen.keys..][..seen.keys]);
                let (d, delta) = (&mut d[..p.len()], delta[i]);
                for j in 0..p.len() {
                    p[j] = exp(p[j] - lse);
                    d[j] = p[j] * (d[j] - delta) * scale;
                }
            }
        }
    }
}
