//! Attention on CUDA devices: `attention.cu`, for every GPU and for f32 and bf16 alike. What
//! Hopper does better in bf16 is [`hopper`]'s.
//!
//! Forward is FlashAttention-2 (arXiv 2307.08691): a block has the queries of one head on chip and
//! goes through the keys they see with an online softmax in base 2. A score of a head of width `w`
//! takes `4 w` FLOPs, 2 for the score and 2 for the value. Blocks of keys above the diagonal are
//! never touched; only those on it are masked. Of a window, blocks of keys before it are not touched either, and of
//! documents those of others: the work falls with their length.
//!
//! Backward recomputes the scores and needs `10 w`: `s = q k`, `dp = do v`, and the three sums
//! `dv += p do`, `dk += ds q`, `dq += ds k`. A block of keys owns its dk and dv, in registers; dq
//! is owed to many blocks. Three ways keep its bits the same every run. A second pass recomputes s and
//! dp (`14 w`); or every block of keys has a copy of dq (memory quadratic in the sequence); or blocks of
//! keys add in a fixed order. The last has the fewest FLOPs and is what is done here. What it costs: an f32 copy of dq as workspace (read and
//! written through the second-level cache once a step), a counter for each tile of it, and waiting
//! for one's turn. Two choices keep the waiting short. Blocks take the work by tickets, so that one
//! only ever waits for blocks that have started. And a block goes through its queries from the last
//! to the first, with the heads of a group inside. What a block of later keys does is then the start
//! of what a block of earlier keys does. All go at one pace, one step behind another, and none is held up
//! by the longer work of the one before it.
//!
//! Memory traffic is that of q, k, v, o and their gradients plus the workspace; both passes are
//! limited by the tensor cores (and by `ldmatrix`, which is why a warp takes two row tiles of
//! queries in forward where registers allow).

use moefold_profiles::Dtype;

use super::{MAX_WIDTH, Mask, Sizes, hopper};
use crate::TensorClass;
use crate::buffer::disjoint;
use crate::cuda::Cuda;
use crate::cuda::operand::vector;
use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
use crate::tensor::Tensor;

const SOURCE: Source = source!("attention", "../attention.cu");

/// What selects code, and the sizes on chip that follow from it. The rules are those that leave
/// every kernel without spills.
#[derive(Clone, Copy)]
struct Tiling {
    mask: Mask,
    /// Whether documents are apart.
    documents: bool,
    dtype: Dtype,
    /// Whether rows are aligned for accesses of 16 bytes.
    aligned: bool,
    /// Widths of a head, rounded up to what a product takes.
    dk: usize,
    dv: usize,
    /// Forward: queries of a block and keys of a step.
    queries: usize,
    keys: usize,
    /// Backward: keys of a block and queries of a step.
    tile: usize,
}

impl Tiling {
    fn new(op: &'static str, gpu: &Cuda, s: Sizes, documents: bool, aligned: bool) -> Self {
        let widest = s.dk.max(s.dv);
        assert!(
            widest <= MAX_WIDTH,
            "{op}: heads are {widest} wide, expected at most {MAX_WIDTH}"
        );
        Self::of(
            s.mask,
            documents,
            gpu.dtype(),
            aligned,
            [s.dk, s.dv],
            gpu.properties().shared_per_block.0 as usize,
        )
    }

    /// The widest tiles that registers and `shared` bytes of shared memory hold.
    fn of(
        mask: Mask,
        documents: bool,
        dtype: Dtype,
        aligned: bool,
        widths: [usize; 2],
        shared: usize,
    ) -> Self {
        let [dk, dv] = widths.map(|width| width.next_multiple_of(16));
        let half = dtype == Dtype::Bf16;
        let (queries, keys) = match (half, dv) {
            (false, _) => (64, 32),
            (true, ..=64) => (128, 64),
            // Without a mask the compiler for sm_100 keeps a register too many.
            (true, ..=128) if mask == Mask::Full => (64, 32),
            (true, ..=128) => (128, 32),
            (true, _) => (64, 64),
        };
        let mut tiling = Self {
            mask,
            documents,
            dtype,
            aligned,
            dk,
            dv,
            queries,
            keys,
            tile: if half { 64 } else { 32 },
        };
        if tiling.forward_shared() > shared {
            (tiling.queries, tiling.keys) = (64, 32);
        }
        if tiling.backward_shared() > shared {
            tiling.tile = 32;
        }
        tiling
    }

    fn element(&self) -> usize {
        self.dtype.bytes(1).0 as usize
    }

    /// Bytes of `rows` rows of shared memory, each with 16 bytes of padding.
    fn rows(&self, rows: usize, width: usize) -> usize {
        rows * (width * self.element() + 16)
    }

    fn forward_shared(&self) -> usize {
        let probabilities = match self.dtype {
            Dtype::F32 => self.rows(self.queries, self.keys),
            _ => 0,
        };
        self.rows(self.queries, self.dk)
            + self.rows(self.keys, self.dk)
            + self.rows(self.keys, self.dv)
            + probabilities
    }

    fn backward_shared(&self) -> usize {
        let inputs = self.rows(2 * self.tile, self.dk) + self.rows(2 * self.tile, self.dv);
        let scores = self.rows(2 * self.tile, self.tile);
        inputs + scores + 2 * self.tile * 4 + 16
    }

    fn program(&self, tiles: &[Define]) -> Program {
        let mut defines = vec![
            Define::dtype("T", self.dtype),
            Define::flag("VEC", self.aligned),
            Define::flag("CAUSAL", self.mask != Mask::Full),
            Define::int("DK", self.dk),
            Define::int("DV", self.dv),
        ];
        defines.extend_from_slice(tiles);
        if self.documents || matches!(self.mask, Mask::Window(_)) {
            defines.push(Define::flag("WINDOW", true));
        }
        if self.documents {
            defines.push(Define::flag("DOCUMENTS", true));
        }
        SOURCE.with(&defines)
    }

    fn forward_program(&self) -> Program {
        self.program(&[
            Define::int("QUERIES", self.queries),
            Define::int("KEYS", self.keys),
        ])
    }

    fn backward_program(&self) -> Program {
        self.program(&[Define::int("TILE", self.tile)])
    }
}

/// What every kernel of `attention.cu` takes after its tensors: sizes, the last of them that of a window, the scale,
/// and where documents are apart their bounds.
fn size_args(s: Sizes, scale: f32, bounds: Option<&Tensor>) -> Vec<Arg> {
    let group = s.heads / s.kv_heads;
    let window = match s.mask {
        Mask::Window(keys) => keys,
        Mask::Causal | Mask::Full => s.seq_len,
    };
    let sizes = [s.seqs, s.seq_len, s.heads, group, s.dk, s.dv, window].map(Arg::size);
    let mut args = sizes.to_vec();
    args.push(Arg::F32(scale));
    args.extend(bounds.map(Arg::from));
    args
}

pub(super) fn forward(
    gpu: &Cuda,
    s: Sizes,
    bounds: Option<&Tensor>,
    scale: f32,
    [q, k, v]: [&Tensor; 3],
    o: &Tensor,
    lse: &Tensor,
) {
    const OP: &str = "attention::forward";
    disjoint(OP, &[q, k, v], &[o, lse]);
    let aligned = vector(&[q, k, v, o]) > 1;
    let tiling = Tiling::new(OP, gpu, s, bounds.is_some(), aligned);
    if bounds.is_none() && hopper::applies(gpu, s.mask, aligned) {
        return hopper::forward(OP, gpu, s, scale, [q, k, v], o, lse);
    }
    let blocks = s.seq_len.div_ceil(tiling.queries) * s.heads * s.seqs;
    let mut args: Vec<Arg> = [q, k, v, o, lse].map(Arg::from).to_vec();
    args.extend(size_args(s, scale, bounds));
    gpu.launch(
        OP,
        &tiling.forward_program(),
        "attention_forward",
        Grid::linear(blocks, 128, tiling.forward_shared()),
        &args,
    );
}

pub(super) fn backward(
    gpu: &Cuda,
    s: Sizes,
    bounds: Option<&Tensor>,
    scale: f32,
    [d_o, q, k, v, o, lse]: [&Tensor; 6],
    [dq, dk, dv]: [&Tensor; 3],
) {
    const OP: &str = "attention::backward";
    disjoint(OP, &[d_o, q, k, v, o, lse], &[dq, dk, dv]);
    let aligned = vector(&[d_o, q, k, v, o, dq, dk, dv]) > 1;
    if bounds.is_none()
        && hopper::applies(gpu, s.mask, aligned)
        && hopper::backward(OP, gpu, s, scale, [d_o, q, k, v, o, lse], [dq, dk, dv])
    {
        return;
    }
    let tiling = Tiling::new(OP, gpu, s, bounds.is_some(), aligned);
    let program = tiling.backward_program();
    let device = q.device();
    let scratch = |len| device.empty(TensorClass::Transient, Dtype::F32, &[len]);
    let tokens = s.seqs * s.seq_len;

    let delta = scratch(s.heads * tokens);
    gpu.launch(
        OP,
        &program,
        "attention_delta",
        Grid::linear(tokens.div_ceil(32) * s.heads, 256, 0),
        &[
            d_o.into(),
            o.into(),
            (&delta).into(),
            Arg::size(tokens),
            Arg::size(s.heads),
            Arg::size(s.dv),
        ],
    );

    let blocks = s.seq_len.div_ceil(tiling.tile);
    let tiles = blocks * s.heads * s.seqs;
    // Where a sequence is one block, dq is nobody else's.
    let shared_tiles = if blocks > 1 { tiles } else { 0 };
    let sums = scratch(shared_tiles * tiling.tile * tiling.dk);
    let turns = device.zeros(TensorClass::Transient, Dtype::I32, &[1 + tiles]);
    let mut args: Vec<Arg> = [d_o, q, k, v, lse, &delta, dq, dk, dv, &sums, &turns]
        .map(Arg::from)
        .to_vec();
    args.extend(size_args(s, scale, bounds));
    gpu.launch(
        OP,
        &program,
        "attention_backward",
        Grid::linear(
            blocks * s.kv_heads * s.seqs,
            tiling.tile as u32 * 4,
            tiling.backward_shared(),
        ),
        &args,
    );
}

/// Shared memory of a block of an A100, the least of the GPUs that the list is compiled for.
const SHARED_SM80: usize = 163 * 1024;

/// Widths of queries and keys, and of values, in the models.
pub(super) const WIDTHS: [[usize; 2]; 4] = [[64, 64], [128, 128], [192, 128], [256, 256]];

/// Those of models with windows.
const WINDOWED: [[usize; 2]; 2] = [[64, 64], [128, 128]];

/// Whether a program of this op is for heads that no model has: of other widths, of rows that are not
/// aligned, or of f32 but for one width. There is one for every width, so not all are listed.
pub(crate) fn is_unlike_models(program: &Program) -> bool {
    let widths = ["DK", "DV"].map(|name| program.int(name).unwrap_or(0) as usize);
    let in_f32 = program.define("T") == Some(Define::dtype("T", Dtype::F32).value);
    let known: &[_] = match ["WINDOW", "DOCUMENTS"].map(|name| program.int(name)) {
        [Some(1), None] => &WINDOWED,
        _ => &WIDTHS,
    };
    !known.contains(&widths) || program.int("VEC") == Some(0) || (in_f32 && widths != [128, 128])
}

/// What the models of today launch: heads of 64, 128 and 256, MLA's 192 and 128, and f32; windows of 64 and 128;
/// documents of all, in windows or not.
pub(crate) fn programs() -> Vec<Listed> {
    let bf16 = WIDTHS.map(|widths| (Dtype::Bf16, widths));
    let cases = bf16.into_iter().chain([(Dtype::F32, [128, 128])]);
    let masks = [
        (Mask::Causal, false, Needs::Sm80),
        (Mask::Full, false, Needs::Odd),
        (Mask::Window(1), false, Needs::Sm80),
        (Mask::Causal, true, Needs::Sm80),
    ];
    let mut listed = Vec::new();
    for ((dtype, widths), (mask, documents, needs)) in
        cases.flat_map(|case| masks.map(|mask| (case, mask)))
    {
        if matches!(mask, Mask::Window(_)) && !WINDOWED.contains(&widths) {
            continue;
        }
        let tiling = Tiling::of(mask, documents, dtype, true, widths, SHARED_SM80);
        let shows: &[&str] = match dtype {
            Dtype::Bf16 => &["HMMA", "LDSM", "LDGSTS"],
            _ => &["FFMA"],
        };
        // A warp holds as much of the products as registers allow.
        let product = |name, shared| Entry {
            shows,
            ..Entry::plain(name, 255, shared)
        };
        let forward = product("attention_forward", tiling.forward_shared());
        let delta = Entry::plain("attention_delta", 160, 0);
        let backward = product("attention_backward", tiling.backward_shared());
        listed.push(Listed {
            program: tiling.forward_program(),
            needs,
            entries: vec![forward],
        });
        listed.push(Listed {
            program: tiling.backward_program(),
            needs,
            entries: vec![delta, backward],
        });
    }
    listed.extend(hopper::programs());
    listed
}
