//! Efficiency formulas: how long an op takes on a device of which only the peaks are known, and the
//! shape on which measurements of others are laid.
//!
//! Two rooflines meet smoothly: `t = hypot(compute, memory) + latency`, where a plain maximum is too
//! fast by up to 40% at the corner. Every formula grows with every size of the op. Left out: clock and
//! power throttling, L2 residency, wave quantization, and what neighbours on the same device do.

use crate::cluster::Gpu;
use crate::dtype::Dtype;
use crate::op::{Op, Pass};
use crate::table;
use crate::units::FlopsPerSecond;

/// Share of memory bandwidth that what products and attention read and write reaches, and least time of streaming
/// kernels: aiconfigurator's constants (ai-dynamo/aiconfigurator@095f58a51c4c).
const STREAM_EFFICIENCY: f64 = 0.8;
const STREAM_LATENCY_S: f64 = 3e-6;

/// What kernels reach of memory bandwidth by what they do: a share of it, or bytes a second.
#[derive(Debug, Clone)]
struct Moved {
    /// Those that stream.
    stream: f64,
    /// Those that gather rows.
    gather: f64,
    /// The softmax over the vocabulary.
    softmax: f64,
}

impl Moved {
    /// The shares of an architecture. Blackwell has more bandwidth a multiprocessor than loads of elementwise kernels keep in flight:
    /// SimuMax@4dcaae51 fits 0.67 to a B200 and 0.91 to an A100, and copies of 117 MB on a GB200 reach 0.69
    /// (pytorch/ao#4247). On an H100, RMS norms of 67 MB reach 0.77 where the same on a B200 reach 0.58
    /// (linkedin/Liger-Kernel#1462); 0.8 is aiconfigurator's for all GPUs. Permutation reaches 0.50 on SimuMax's B200, taken
    /// for all, and 0.19 on its A100 with an older kernel; the softmax 0.28 to 0.32 on the B200 and 0.81 on the A100, and
    /// 0.4 is assumed elsewhere.
    fn of(arch: &str) -> Self {
        match arch {
            "sm_100" | "sm_103" => Self {
                stream: 0.67,
                gather: 0.5,
                softmax: 0.3,
            },
            _ => Self {
                stream: STREAM_EFFICIENCY,
                gather: 0.5,
                softmax: 0.4,
            },
        }
    }
}

/// Least time of a matrix kernel: about that of the smallest products of the shipped tables.
const MATRIX_LATENCY_S: f64 = 2e-6;

/// Rows and columns of an output that a multiprocessor computes at once: the smallest that large products have, of which
/// what lies outside the output takes as long as the rest (NVIDIA, "Matrix Multiplication Background User's Guide", tile
/// quantization).
pub(super) const TILE: f64 = 128.0;

/// Share of the bf16 peak that a chunked recurrent mixer reaches. An assumption.
const RECURRENT_EFFICIENCY: f64 = 0.25;

/// FLOP/s of such a mixer that no GPU exceeds: scans are Triton kernels of small tiles (mamba_ssm, `ssd_combined.py`),
/// which larger matrix units do not speed up. The one of 15, 20, 25, 30, 40 and 60 TFLOP/s that is nearest to published
/// steps of Nemotron 3 Nano on five GPUs (`docs/accuracy.md`).
const RECURRENT_RATE: f64 = 20e12;

/// Share of the peak that attention reaches where nothing was measured on the architecture.
const ATTENTION_EFFICIENCY: f64 = 0.4;

/// A product at the largest sizes reaches `ceiling` of the peak. It loses to partly filled waves as if
/// it had `fill` more output elements a multiprocessor, and to prologues as if it were `depth` deeper:
/// `2 (m n + fill SMs) (k + depth) / (ceiling peak)`. Fitted by grid search to the median over the
/// shipped tables of each dtype (mean error 9 to 15% before neighbours correct it).
struct MatrixShape {
    ceiling: f64,
    fill: f64,
    depth: f64,
}

fn matrix_shape(dtype: Dtype) -> MatrixShape {
    let (ceiling, fill, depth) = match dtype {
        Dtype::F32 | Dtype::I32 => (0.88, 2_000.0, 50.0),
        Dtype::Bf16 => (0.88, 5_500.0, 400.0),
        Dtype::Fp8 => (0.90, 15_000.0, 2_000.0),
        Dtype::Fp4 => (0.47, 27_000.0, 2_200.0),
    };
    MatrixShape {
        ceiling,
        fill,
        depth,
    }
}

/// What of a device the formulas read.
#[derive(Debug, Clone)]
pub(super) struct Roofline {
    /// FLOP/s by dtype index, with the next wider type where the device lacks one.
    peak: [f64; 4],
    /// Share of the peak the largest products reach, by dtype index.
    ceiling: [f64; 4],
    /// Share of the peak that products keep up in training.
    sustained: f64,
    memory_rate: f64,
    /// Bytes a second of kernels that move memory.
    moved: Moved,
    sms: f64,
    cpu: bool,
}

/// Position of a dtype in tables by dtype.
pub(super) fn dtype_index(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 | Dtype::I32 => 0,
        Dtype::Bf16 => 1,
        Dtype::Fp8 => 2,
        Dtype::Fp4 => 3,
    }
}

pub(super) const MATRIX_DTYPES: [Dtype; 4] = [Dtype::F32, Dtype::Bf16, Dtype::Fp8, Dtype::Fp4];

impl Roofline {
    pub(super) fn new(gpu: &Gpu) -> Self {
        let mut widest = gpu.peak_tflops.f32;
        let peak = MATRIX_DTYPES.map(|dtype| {
            widest = gpu.peak(dtype).map_or(widest, FlopsPerSecond::tflops);
            widest * 1e12
        });
        let ceiling = MATRIX_DTYPES.map(|dtype| {
            let found = table::matmul_max()
                .iter()
                .find(|row| gpu.name.eq_ignore_ascii_case(row.gpu) && row.dtype == dtype);
            let has_table = table::gemm()
                .iter()
                .any(|row| gpu.name.eq_ignore_ascii_case(row.gpu) && row.dtype == dtype);
            match (gpu.is_cpu(), found, gpu.peak(dtype)) {
                // What is assumed of a core is already what it achieves.
                (true, ..) => 1.0,
                // Where shapes were measured the formula keeps the constant it was fitted with.
                (_, Some(row), Some(peak)) if !has_table => row.tflops / peak.tflops(),
                _ => matrix_shape(dtype).ceiling,
            }
        });
        let memory_rate = gpu.memory_rate().0;
        let shares = Moved::of(&gpu.arch);
        // What is assumed of a core streams; gathers and the softmax are as much slower as elsewhere.
        let full = if gpu.is_cpu() { shares.stream } else { 1.0 };
        let rate = |share: f64| memory_rate * (share / full);
        Self {
            peak,
            ceiling,
            sustained: gpu.sustained_share.unwrap_or(1.0),
            memory_rate,
            moved: Moved {
                stream: rate(shares.stream),
                gather: rate(shares.gather),
                softmax: rate(shares.softmax),
            },
            sms: f64::from(gpu.num_sms),
            cpu: gpu.is_cpu(),
        }
    }

    /// FLOP/s of the largest products.
    pub(super) fn matrix_rate(&self, dtype: Dtype) -> f64 {
        let index = dtype_index(dtype);
        self.peak[index] * self.ceiling[index]
    }

    /// Peak in FLOP/s, of the next wider type where the device lacks this one.
    pub(super) fn peak(&self, dtype: Dtype) -> f64 {
        self.peak[dtype_index(dtype)]
    }

    /// The least seconds of a product of `flops` among others like it, whatever one by itself takes.
    pub(super) fn sustained(&self, flops: f64, dtype: Dtype) -> f64 {
        flops / (self.peak(dtype) * self.sustained)
    }

    /// Rows or columns of an output, with those that its last tile computes besides.
    pub(super) fn in_tiles(&self, size: f64) -> f64 {
        if self.cpu {
            size
        } else {
            (size / TILE).ceil() * TILE
        }
    }

    pub(super) fn is_cpu(&self) -> bool {
        self.cpu
    }

    /// Multiprocessors.
    pub(super) fn sms(&self) -> f64 {
        self.sms
    }

    /// Seconds to move `bytes` through memory beside products.
    pub(super) fn stream(&self, bytes: f64) -> f64 {
        bytes / (self.memory_rate * if self.cpu { 1.0 } else { STREAM_EFFICIENCY })
    }

    /// Seconds to move `bytes` through memory row by row, as rows lie elsewhere.
    pub(super) fn gather(&self, bytes: f64) -> f64 {
        bytes / self.moved.gather
    }

    /// A dense product `[m,k] x [k,n]`, forward.
    pub(super) fn gemm(&self, m: f64, n: f64, k: f64, dtype: Dtype) -> f64 {
        let MatrixShape { fill, depth, .. } = matrix_shape(dtype);
        let (fill, depth) = if self.cpu { (64.0, 8.0) } else { (fill, depth) };
        let compute = 2.0 * (m * n + fill * self.sms) * (k + depth) / self.matrix_rate(dtype);
        let width = dtype.bits() as f64 / 8.0;
        let bytes = width * (m * k + k * n) + width.max(2.0) * m * n;
        compute.hypot(self.stream(bytes)) + self.matrix_latency()
    }

    pub(super) fn matrix_latency(&self) -> f64 {
        if self.cpu { 0.5e-6 } else { MATRIX_LATENCY_S }
    }

    /// Attention where nothing was measured.
    pub(super) fn attention(&self, op: &Op) -> f64 {
        let compute = op.flops().0 / (self.peak(op.dtype()) * ATTENTION_EFFICIENCY);
        compute.hypot(self.stream(op.bytes().0 as f64)) + self.matrix_latency()
    }

    /// An op that moves memory: a streaming rate and a least time.
    pub(super) fn memory_bound(&self, op: &Op) -> f64 {
        let rate = match op {
            Op::Permute { .. } | Op::Unpermute { .. } | Op::Embedding { .. } => self.moved.gather,
            Op::CrossEntropy { .. } => self.moved.softmax,
            _ => self.moved.stream,
        };
        let latency = if self.cpu { 0.5e-6 } else { STREAM_LATENCY_S };
        latency + op.bytes().0 as f64 / rate
    }

    /// A recurrent mixer: its state's work and its traffic.
    pub(super) fn recurrent(&self, op: &Op) -> f64 {
        let rate = (self.peak(op.dtype()) * RECURRENT_EFFICIENCY).min(RECURRENT_RATE);
        let compute = op.flops().0 / rate;
        compute.hypot(self.stream(op.bytes().0 as f64)) + STREAM_LATENCY_S
    }
}

/// Rate of the three products of a linear layer relative to the forward product of the same shape,
/// beyond what their traffic explains: medians of SimuMax@4dcaae51 over 61 shapes on an A100
/// (.738, .739, .70 of the peak) and 144 on a B200 (.491, .492, .476).
pub(super) fn pass_rate(pass: Pass) -> f64 {
    match pass {
        Pass::Forward | Pass::Backward | Pass::Dgrad => 1.0,
        Pass::Wgrad => 0.96,
    }
}
