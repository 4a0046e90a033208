//! Prices of fused attention: measured rates by sequence length and head width, filled by heads.
//!
//! A table gives the rate with enough heads to fill the device. Fewer heads or shorter queries cost as
//! if there were a few hundred more query rows a multiprocessor. Backward does 2.5 times the work
//! (FlashAttention-2, arXiv 2307.08691) at a share of the forward rate. Left out: the group size of
//! key/value heads (within 3% in the tables), packing, and windows (the op says fewer keys instead).

use super::curve::Curve;
use super::lender;
use super::roofline::Roofline;
use crate::cluster::Gpu;
use crate::cost::Source;
use crate::dtype::Dtype;
use crate::op::{Op, Pass};
use crate::presets;
use crate::table::{self, Mask};

/// Query rows (over heads and sequences) a multiprocessor that a launch loses to partly filled waves,
/// forward and backward: fitted to SimuMax@4dcaae51's rows of 4 to 128 heads at 4096 positions, on a
/// B200 and an A100 whose tiles are half as large. Hopper is taken as the A100.
fn fill(arch: &str) -> [f64; 2] {
    match arch {
        "sm_100" | "sm_103" => [400.0, 100.0],
        _ => [190.0, 100.0],
    }
}

/// Backward rate over forward rate, both by their own work, by architecture.
///
/// Ampere: what FlashAttention-2's forward-and-backward curve (173 TFLOP/s at 4096) leaves beside the
/// A100's forward rate. Hopper and Blackwell: cuDNN's rates at DeepSeek-V3's heads ("Scalable Training
/// of MoE Models with Megatron Core", arXiv 2603.07685, table 9), means over 4096 and 16384 positions:
/// (422/553, 523/638) and (1083/1324, 1298/1698).
fn backward_rate(arch: &str) -> f64 {
    match arch {
        "sm_80" => 0.81,
        _ => 0.79,
    }
}

/// Head width 64 over head width 128 in rate, where only the latter was measured: FlashAttention-2 on
/// an A100 (156 and 173 at 4096), which the prefill kernels of the others bear out (0.6 to 0.8).
const NARROW_RATE: f64 = 0.85;

/// Time of a head of some width over that of as many units of width 128, beyond 256: cuDNN's heads of 512 reach 168
/// TFLOP/s on a B300 in a window of 128 at 4096 positions, and 161 to 166 at longer ones, where 284 is the price by width
/// (NVIDIA/cudnn-frontend@63447f2f, `benchmark/sdpa_benchmark_training/results/deepseek_v4`). It has no backward kernel for
/// them, and those that train are taken to lose as much. Widths between lose the same share at each doubling.
fn wide_time(width: f64) -> f64 {
    WIDE_TIME.powf((width / 256.0).log2().clamp(0.0, 1.0))
}

/// See [`wide_time`].
const WIDE_TIME: f64 = 1.69;

/// Rate of fp8 attention over that of bf16 by architecture and width of a head, forward and backward: cuDNN's causal
/// rates at 4096 positions, means of one scale a tensor and MXFP8 (NVIDIA/cudnn-frontend@60e572b7,
/// `benchmark/sdpa_benchmark_training/results`, `llama3.1` and `dsv3` of GB200 and GB300, cuDNN 9.22; `gpt_oss` and the
/// H200 at afa9f7c0, cuDNN 9.19). Heads of 128: GB200 1805 and 1685 for 1408 TFLOP/s, back 1178 and 1054 for 1148; GB300
/// at 2048 positions 1954 and 1751 for 1373, back 944 and 811 for 967; H200 854 for 591, back 471 for 474. DeepSeek-V3's
/// of 192 and 128: GB200 2095 and 1925 for 1406, back 1692 and 1364 for 1057; GB300 2788 and 2517 for 1590, back 1982 and
/// 1522 for 1143. Heads of 64: GB200 591 for 574 in a window, back taken as the wider ones.
fn fp8_rate(arch: &str, width: f64, pass: Pass) -> f64 {
    let [forward, backward] = match (arch, width) {
        (_, ..=64.0) => [1.03, 1.0],
        ("sm_100", ..=128.0) => [1.24, 0.97],
        ("sm_103", ..=128.0) => [1.35, 0.91],
        ("sm_100", _) => [1.43, 1.45],
        ("sm_103", _) => [1.67, 1.53],
        _ => [1.44, 1.0],
    };
    if pass == Pass::Forward {
        forward
    } else {
        backward
    }
}

/// Attention on one device.
#[derive(Debug, Clone)]
pub(super) struct Attention {
    roofline: Roofline,
    /// Seconds per query row, key position and unit of `(qk_dim + v_dim) / 2`, times key positions, at
    /// head widths 64 and 128; by key positions.
    forward: Option<[Curve; 2]>,
    /// Query rows a multiprocessor, forward and backward.
    fill: [f64; 2],
    backward_rate: f64,
    arch: String,
    measured_here: bool,
}

impl Attention {
    pub(super) fn new(gpu: &Gpu, roofline: &Roofline) -> Self {
        let name = gpu.name.to_lowercase();
        let measured = table::attention()
            .iter()
            .any(|row| row.gpu == name && row.source == "aic");
        let lender = if measured {
            name.as_str()
        } else {
            lender::of_kernels(&name, &gpu.arch)
        };
        // Attention is lent by the rate of the largest products.
        let preset = presets::gpu(lender).expect("tables are of presets");
        let lent = Roofline::new(&preset).matrix_rate(Dtype::Bf16);
        let faster = roofline.matrix_rate(Dtype::Bf16) / lent;
        Self {
            forward: if gpu.is_cpu() {
                None
            } else {
                curves(lender, faster)
            },
            roofline: roofline.clone(),
            fill: fill(&gpu.arch),
            backward_rate: backward_rate(&gpu.arch),
            arch: gpu.arch.clone(),
            measured_here: measured && faster == 1.0,
        }
    }

    /// Seconds of attention.
    pub(super) fn price(&self, op: &Op) -> (f64, Source) {
        let &Op::Attention {
            batch,
            heads,
            q_len,
            kv_len,
            qk_dim,
            v_dim,
            causal,
            pass,
            dtype,
            ..
        } = op
        else {
            unreachable!("the caller matched attention");
        };
        let Some(curves) = &self.forward else {
            return (self.roofline.attention(op), Source::Extrapolated);
        };
        let rows = (batch * heads * q_len).max(1) as f64;
        let keys = kv_len.max(1) as f64;
        let width = (qk_dim + v_dim).max(1) as f64 / 2.0;
        let sms = self.roofline.sms();
        let (fill, rate) = if pass == Pass::Forward {
            (self.fill[0], 1.0)
        } else {
            (self.fill[1], self.backward_rate / 2.5)
        };
        // Per row and key pair: work grows with the width, at a rate between those of 64 and 128. Narrower
        // heads lose rate as they lose work, wider ones keep it up to 256.
        let narrow = curves[0].at(keys) * 64.0;
        let wide = (curves[1].at(keys) * 128.0).max(narrow);
        let each = if width >= 128.0 {
            wide * width / 128.0 * wide_time(width)
        } else if width >= 64.0 {
            narrow * (wide / narrow).powf((width / 64.0).log2())
        } else {
            narrow * (width / 64.0).sqrt()
        };
        let mask = if causal { 0.5 } else { 1.0 };
        let dtype_rate = match dtype {
            Dtype::Fp8 | Dtype::Fp4 => fp8_rate(&self.arch, width, pass),
            Dtype::Bf16 => 1.0,
            // As products do.
            Dtype::F32 | Dtype::I32 => {
                self.roofline.matrix_rate(Dtype::F32) / self.roofline.matrix_rate(Dtype::Bf16)
            }
        };
        // Half of the causal square was counted in the rate: 2 flops, two products, half the scores.
        let time = 4.0 * mask * (rows + fill * sms) * each / (rate * dtype_rate);
        let time = time.hypot(self.roofline.stream(op.bytes().0 as f64));
        let covered = curves[1].covers(keys) && dtype == Dtype::Bf16 && causal;
        let source = if self.measured_here && covered {
            Source::Interpolated
        } else {
            Source::Extrapolated
        };
        (time + self.roofline.matrix_latency(), source)
    }
}

/// Keys over rate at head widths 64 and 128, rising in keys.
fn curves(gpu: &str, faster: f64) -> Option<[Curve; 2]> {
    let rows = |head_dim: u64| {
        let best = table::attention().iter().filter(move |row| {
            row.gpu == gpu
                && row.pass == Some(Pass::Forward)
                && row.mask == Mask::Causal
                && row.head_dim == head_dim
                && row.source == "aic"
        });
        best.map(move |row| {
            (
                row.seq_len as f64,
                row.seq_len as f64 / (row.tflops * 1e12 * faster),
            )
        })
    };
    let wide: Vec<_> = rows(128).collect();
    if wide.is_empty() {
        return None;
    }
    let mut narrow: Vec<_> = rows(64).collect();
    if narrow.is_empty() {
        narrow = wide
            .iter()
            .map(|&(keys, time)| (keys, time / NARROW_RATE))
            .collect();
    }
    // Below the shortest sequence the rate falls with its square root, as it does between the two
    // shortest; above the longest it stays.
    Some([narrow, wide].map(|points| Curve::rising(points, [0.5, 1.0])))
}
