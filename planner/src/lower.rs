//! Lowering: a layer and its [`Local`](crate::local::Local) shape become the ops and collectives one rank runs for one
//! microbatch, forward and backward.
//!
//! Nothing is priced here. Each piece of work says which [`Part`] of a layer it belongs to, so that
//! recomputing a module is running the forward work of its parts again. Attention is lowered in
//! [`attention`], feed-forward blocks and dispatch in [`ffn`], embedding, head and the step's own
//! work in [`ends`]. Formulas: Megatron-LM at d98e8a64 and arXiv 2603.07685, sections 4 and 5.

pub mod attention;
pub mod dispatch;
pub mod ends;
pub mod ffn;
pub mod keys;

use moefold_profiles::op::SweepKind;
use moefold_profiles::trace::Category;
use moefold_profiles::units::Bytes;
use moefold_profiles::{Collective, CollectiveKind, Dtype, Op, Pass, Precision};

use crate::mesh::Placement;
use crate::model::Layer;
use crate::runtime::{Block, Lowered, Part, Setting, Task, Work};

/// A collective over a group.
pub(crate) fn over(group: Placement, kind: CollectiveKind, bytes: Bytes) -> Collective {
    Collective {
        kind,
        bytes,
        ranks: group.ranks,
        ranks_per_domain: group.ranks_per_domain,
    }
}

/// Lowers one decoder layer.
pub fn layer(setting: &Setting<'_>, layer: &Layer) -> Lowered {
    let mut work = Writer::new(setting);
    if let Some(mixer) = &layer.mixer {
        attention::lower(&mut work, mixer);
    }
    if let Some(ffn) = &layer.ffn {
        ffn::lower(&mut work, ffn);
    }
    work.lowered
}

/// Lowers one block of a decoder layer.
pub fn block(setting: &Setting<'_>, layer: &Layer, block: Block) -> Lowered {
    let mut work = Writer::new(setting);
    match (block, &layer.mixer, &layer.ffn) {
        (Block::Mixer, Some(mixer), _) => attention::lower(&mut work, mixer),
        (Block::FeedForward, _, Some(ffn)) => ffn::lower(&mut work, ffn),
        (Block::Mixer, None, _) | (Block::FeedForward, _, None) => {}
    }
    work.lowered
}

/// Writes forward and backward work side by side.
pub(crate) struct Writer<'a> {
    pub(crate) setting: Setting<'a>,
    pub(crate) lowered: Lowered,
    /// Type activations travel in.
    pub(crate) wide: Dtype,
    category: Category,
    part: Part,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(setting: &Setting<'a>) -> Self {
        Self {
            setting: *setting,
            lowered: Lowered::default(),
            wide: setting.precision.activation(),
            category: Category::Dense,
            part: Part::Ends,
        }
    }

    /// What the work that follows counts as and belongs to.
    pub(crate) fn at(&mut self, category: Category, part: Part) {
        self.category = category;
        self.part = part;
    }

    /// Whether the work that follows belongs to a part.
    pub(crate) fn is_at(&self, part: Part) -> bool {
        self.part == part
    }

    fn work(&self, task: Task, category: Category) -> Work {
        Work {
            task,
            category,
            part: Some(self.part),
            beside: None,
            of_weights: false,
            pauses: false,
        }
    }

    pub(crate) fn forward(&mut self, op: Op) {
        let work = self.work(Task::Op(op), self.category);
        self.lowered.forward.push(work);
    }

    pub(crate) fn backward(&mut self, op: Op) {
        let work = self.work(Task::Op(op), self.category);
        self.lowered.backward.push(work);
    }

    /// An op with one kernel for each pass.
    pub(crate) fn both(&mut self, op: impl Fn(Pass) -> Op) {
        self.forward(op(Pass::Forward));
        self.backward(op(Pass::Backward));
    }

    /// A linear layer from width `k` to `n` over `m` rows: product, dgrad, wgrad. Its input and the gradient of its
    /// output are quantized where the recipe multiplies narrower numbers.
    pub(crate) fn linear(&mut self, m: u64, n: u64, k: u64) {
        self.quantize(true, m * k);
        self.linear_of_norm(m, n, k);
    }

    /// [`Self::linear`] behind a norm in one module, which writes its output quantized (Transformer Engine,
    /// `LayerNormLinear`).
    pub(crate) fn linear_of_norm(&mut self, m: u64, n: u64, k: u64) {
        let dtype = self.setting.precision.compute();
        self.linear_in(m, n, k, dtype);
        self.quantize(false, m * n);
    }

    /// Quantizes a tensor of so many elements in the forward or backward pass, where the recipe does: it is read as
    /// bf16, and two copies of half the bytes are written, one for the product along rows and one along columns: in
    /// bytes a copy in bf16. Of NVFP4 the two are 9 bits an element together with their scales: 25 of 32 bytes. Scales
    /// of a whole tensor need its largest element before.
    pub(crate) fn quantize(&mut self, forward: bool, len: u64) {
        let precision = self.setting.precision;
        if precision.compute().bits() >= self.wide.bits() {
            return;
        }
        let dtype = self.wide;
        let sweep = |kind, len| Op::Sweep { kind, len, dtype };
        let scan = (precision == Precision::Fp8 || precision == Precision::Nvfp4)
            .then(|| sweep(SweepKind::Sum, len));
        let copied = if precision == Precision::Nvfp4 {
            len * 25 / 32
        } else {
            len
        };
        for op in scan.into_iter().chain([sweep(SweepKind::Copy, copied)]) {
            if forward {
                self.forward(op);
            } else {
                self.backward(op);
            }
        }
    }

    /// [`Self::linear`] in a given type.
    pub(crate) fn linear_in(&mut self, m: u64, n: u64, k: u64, dtype: Dtype) {
        let gemm = |m, n, k, pass| Op::Gemm {
            m,
            n,
            k,
            pass,
            dtype,
        };
        self.forward(gemm(m, n, k, Pass::Forward));
        self.backward(gemm(m, k, n, Pass::Dgrad));
        self.backward(gemm(n, k, m, Pass::Wgrad));
    }

    pub(crate) fn norm(&mut self, rows: u64, dim: u64) {
        let dtype = self.wide;
        self.both(|pass| Op::RmsNorm {
            rows,
            dim,
            pass,
            dtype,
        });
    }

    pub(crate) fn rope(&mut self, rows: u64, dim: u64) {
        let dtype = self.wide;
        if dim > 0 {
            self.both(|pass| Op::Rope {
                rows,
                dim,
                pass,
                dtype,
            });
        }
    }

    pub(crate) fn residual(&mut self) {
        let (part, category) = (self.part, self.category);
        self.part = Part::Residual;
        let streams = self.setting.model.residual_streams;
        let len = self.setting.local.tokens_local * self.setting.model.hidden * streams;
        let dtype = self.wide;
        if streams > 1 {
            self.mix_streams(len);
        }
        self.forward(Op::Add { len, dtype });
        self.backward(Op::Add { len, dtype });
        (self.part, self.category) = (part, category);
    }

    /// What hyper-connections pass over the streams of a block beside the sum into them (Megatron-Core,
    /// `transformer/hyper_connection.py`, compiled piece by piece): read for their norm, for the projection to weights
    /// and for the block's input; read and written by the mixing matrix, and written as the block's output is spread.
    /// Back, each of these reads or writes a gradient too, and gradients of streams that several read are summed.
    fn mix_streams(&mut self, len: u64) {
        let dtype = self.wide;
        let sweep = |kind| Op::Sweep { kind, len, dtype };
        let forward = [
            SweepKind::Sum,
            SweepKind::Sum,
            SweepKind::Sum,
            SweepKind::Copy,
            SweepKind::Fill,
        ];
        for kind in forward {
            self.forward(sweep(kind));
        }
        for kind in [
            SweepKind::Sum,
            SweepKind::Sum,
            SweepKind::Copy,
            SweepKind::Copy,
            SweepKind::Copy,
        ] {
            self.backward(sweep(kind));
        }
        self.backward(Op::Add { len, dtype });
        self.backward(Op::Add { len, dtype });
    }

    fn collective(
        &self,
        group: Placement,
        kind: CollectiveKind,
        elements: u64,
        dtype: Dtype,
        category: Category,
    ) -> Option<Work> {
        if group.ranks < 2 || elements == 0 {
            return None;
        }
        let collective = over(group, kind, dtype.bytes(elements));
        Some(self.work(Task::Collective(collective), category))
    }

    pub(crate) fn send_forward(
        &mut self,
        group: Placement,
        kind: CollectiveKind,
        elements: u64,
        category: Category,
    ) {
        let work = self.collective(group, kind, elements, self.wide, category);
        self.lowered.forward.extend(work);
    }

    pub(crate) fn send_backward(
        &mut self,
        group: Placement,
        kind: CollectiveKind,
        elements: u64,
        category: Category,
    ) {
        let work = self.collective(group, kind, elements, self.wide, category);
        self.lowered.backward.extend(work);
    }

    /// Pushes finished work.
    pub(crate) fn push(
        &mut self,
        forward: bool,
        task: Task,
        category: Category,
        beside: Option<Part>,
    ) {
        let mut work = self.work(task, category);
        work.beside = beside;
        if forward {
            self.lowered.forward.push(work);
        } else {
            self.lowered.backward.push(work);
        }
    }

    /// Elements of the wide type that as many bytes are as `elements` have in what a linear layer multiplies: its input
    /// is gathered after it was quantized, and so is the gradient of its output (Transformer Engine,
    /// `gather_along_first_dim` of `pytorch/distributed.py` with a quantizer). Blocks of 16 values share a scale of a
    /// byte in NVFP4, of 32 in MXFP8.
    fn gathered(&self, elements: u64) -> u64 {
        let bits = match self.setting.precision {
            Precision::Fp32 | Precision::Bf16 => return elements,
            Precision::Fp8 | Precision::Fp8Delayed | Precision::Fp8Blockwise => 8.0,
            Precision::Mxfp8 => 8.25,
            Precision::Nvfp4 => 4.5,
        };
        (elements as f64 * bits / self.wide.bits() as f64).round() as u64
    }

    /// Entering a tensor-parallel region under sequence parallelism: the input of `width` is
    /// gathered, gathered again for the weight gradient, and its gradient scattered.
    pub(crate) fn enter_tp(&mut self, width: u64) {
        let elements = self.setting.local.tokens * width;
        let tp = self.setting.groups.tp;
        // The head multiplies in the wide type.
        let gathered = if self.is_at(Part::Ends) {
            elements
        } else {
            self.gathered(elements)
        };
        self.send_forward(tp, CollectiveKind::AllGather, gathered, Category::TpComm);
        self.send_backward(tp, CollectiveKind::AllGather, gathered, Category::TpComm);
        self.send_backward(
            tp,
            CollectiveKind::ReduceScatter,
            elements,
            Category::TpComm,
        );
    }

    /// Leaving it: the partial sums are scattered, and in backward the gradient gathered.
    pub(crate) fn leave_tp(&mut self, width: u64) {
        let elements = self.setting.local.tokens * width;
        let tp = self.setting.groups.tp;
        self.send_forward(
            tp,
            CollectiveKind::ReduceScatter,
            elements,
            Category::TpComm,
        );
        let gathered = if self.is_at(Part::Ends) {
            elements
        } else {
            self.gathered(elements)
        };
        self.send_backward(tp, CollectiveKind::AllGather, gathered, Category::TpComm);
    }
}
