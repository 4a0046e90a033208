//! System files of SimuMax (github.com/MooreThreads/SimuMax@4dcaae51, Apache-2.0), another simulator:
//! efficiencies of ops measured on one machine, and what was fitted to memory-bound kernels and to NCCL.
//!
//! A measured efficiency becomes the time it was computed from, `flops / (peak x efficiency)`, with the
//! count of work that SimuMax's own benchmarks use (`simu_tools/efficency_test/test_*_efficiency.py`):
//! attention counts all scores, and 2.5 times the forward work in the backward pass. A fit
//! becomes times over a range of sizes: `bytes / (rate x efficiency) + latency` for memory
//! (`SystemConfig.compute_mem_access_time`), and for a collective the same over the bytes that leave a
//! rank, with a latency a ring step (`compute_net_op_time`). Its `gbps` are 2^30 bytes a second. Means
//! and defaults for unknown shapes are no measurements and are left out, as is `inter_node`, where no
//! collective has an efficiency of its own.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::gathered::{Imported, Leftovers, Timings};
use super::source::{File, Format, ImportError};
use crate::collective::{Collective, CollectiveKind};
use crate::directory::{Key, Taken};
use crate::dtype::Dtype;
use crate::op::{Op, Pass, SweepKind};
use crate::presets;
use crate::units::{Bytes, GIB, KIB};

#[derive(Deserialize)]
struct System {
    sys_name: String,
    num_per_node: u32,
    accelerator: Accelerator,
    networks: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
struct Accelerator {
    op: BTreeMap<String, Table>,
    bandwidth: BTreeMap<String, Bandwidth>,
}

/// Ops of one kind.
#[derive(Deserialize)]
struct Table {
    /// The peak that efficiencies are of, TFLOP/s.
    tflops: f64,
    /// Efficiencies by shape, in words.
    #[serde(default)]
    accurate_efficient_factor: BTreeMap<String, f64>,
}

/// A class of memory-bound kernels.
#[derive(Deserialize)]
struct Bandwidth {
    efficient_factor: f64,
    gbps: f64,
    #[serde(default)]
    latency_us: f64,
}

/// A network within a node.
#[derive(Deserialize)]
struct Network {
    bandwidth: Bandwidth,
    op: BTreeMap<String, NetworkOp>,
}

/// A fit of one collective: bytes that leave a rank are `size x scale x (1 + offset / ranks)`.
#[derive(Deserialize)]
struct NetworkOp {
    scale: f64,
    offset: f64,
    efficient_factor: Option<f64>,
    latency_us: Option<f64>,
    fixed_latency_us: Option<f64>,
    #[serde(default)]
    fixed_latency_us_by_comm_num: BTreeMap<String, f64>,
}

pub(super) fn read(file: &File<'_>) -> Result<Imported, ImportError> {
    let expected = "a system file of SimuMax: sys_name, num_per_node, accelerator and networks";
    let system: System =
        serde_json::from_str(file.text).map_err(|error| file.no_json(&error, expected))?;
    let stated = presets::gpu_name(&system.sys_name);
    let known = presets::gpu(&stated).is_ok();
    let device = file.device(known.then_some(stated.as_str()))?;
    let mut timings = Timings::default();
    let mut leftovers = Leftovers::default();
    for (kind, table) in &system.accelerator.op {
        let place = format!("accelerator.op.{kind}");
        positive(file, &format!("{place}.tflops"), table.tflops)?;
        for (words, &efficiency) in &table.accurate_efficient_factor {
            let place = format!("{place}.accurate_efficient_factor[\"{words}\"]");
            positive(file, &place, efficiency)?;
            let shape = Shape::parse(file, &place, words)?;
            match shape.op(kind)? {
                Named::Op(op, flops) => {
                    let rate = table.tflops * 1e12 * efficiency;
                    timings.add(Key::Op(op), flops / rate);
                }
                Named::Unknown(why) => leftovers.add(kind, why, None),
            }
        }
        if table.accurate_efficient_factor.is_empty() {
            leftovers.add(kind, "a default and no shape", None);
        }
    }
    memory_bound(file, &system.accelerator.bandwidth, &mut timings)?;
    for (name, network) in &system.networks {
        if name == INTER_NODE {
            leftovers.add(name, "no collective has an efficiency of its own", None);
        } else if network.is_object() {
            collectives(file, name, network, system.num_per_node, &mut timings)?;
        }
    }
    if timings.is_empty() {
        return Err(file.nothing(Format::Simumax, "no shape has an efficiency"));
    }
    Ok(Imported {
        format: Format::Simumax,
        profile: file.profile(&device, timings.into_samples(Taken::Repeated)),
        left_out: leftovers.into_list(None),
        device_time: None,
        notes: vec![
            "memory-bound ops and collectives are fits of SimuMax, here at a range of sizes; products \
             and attention are what its benchmarks measured"
                .to_owned(),
        ],
    })
}

const INTER_NODE: &str = "inter_node";

fn positive(file: &File<'_>, place: &str, found: f64) -> Result<f64, ImportError> {
    if found.is_finite() && found > 0.0 {
        return Ok(found);
    }
    Err(file.malformed(place, found.to_string(), "a number above 0"))
}

/// What a shape's words say.
struct Shape<'a> {
    file: &'a File<'a>,
    place: &'a str,
    fields: BTreeMap<&'a str, &'a str>,
}

/// What a shape is in the terms of this program.
enum Named {
    /// An op, and the work its efficiency counts.
    Op(Op, f64),
    /// Nothing, and why.
    Unknown(&'static str),
}

/// More than any size of an operand.
const MOST: u64 = 1 << 28;

impl<'a> Shape<'a> {
    /// Reads `b=1, m=4096, layout=TN`.
    fn parse(file: &'a File<'a>, place: &'a str, words: &'a str) -> Result<Self, ImportError> {
        let pairs = words.split(", ").map(|pair| {
            pair.split_once('=')
                .ok_or_else(|| file.malformed(place, format!("`{pair}`"), "name=value"))
        });
        Ok(Self {
            file,
            place,
            fields: pairs.collect::<Result<_, _>>()?,
        })
    }

    fn word(&self, name: &str) -> Result<&'a str, ImportError> {
        self.fields.get(name).copied().ok_or_else(|| {
            let expected = format!("`{name}=` among its words");
            self.file.malformed(self.place, "none", expected)
        })
    }

    fn size(&self, name: &str) -> Result<u64, ImportError> {
        let word = self.word(name)?;
        let size = word.parse().ok().filter(|size| (1..=MOST).contains(size));
        size.ok_or_else(|| {
            let found = format!("`{name}={word}`");
            let expected = format!("a whole number from 1 to {MOST}");
            self.file.malformed(self.place, found, expected)
        })
    }

    fn op(&self, kind: &str) -> Result<Named, ImportError> {
        match kind {
            "matmul" => self.product(Dtype::Bf16),
            "fp8_matmul" => self.product(Dtype::Fp8),
            "group_matmul" => self.grouped(Dtype::Bf16),
            "fp8_group_matmul" => self.grouped(Dtype::Fp8),
            "sdp_fwd" => self.attention(Pass::Forward),
            "sdp_bwd" => self.attention(Pass::Backward),
            _ => Ok(Named::Unknown("prices know no such op")),
        }
    }

    /// Layouts of cuBLAS are the passes: TN forward, NN of the input's gradient, NT of the weight's.
    fn product(&self, dtype: Dtype) -> Result<Named, ImportError> {
        let (b, m) = (self.size("b")?, self.size("m")?);
        let (n, k) = (self.size("n")?, self.size("k")?);
        let pass = match self.word("layout")? {
            "TN" => Pass::Forward,
            "NN" => Pass::Dgrad,
            "NT" => Pass::Wgrad,
            other => {
                let found = format!("`layout={other}`");
                return Err(self.file.malformed(self.place, found, "TN, NN or NT"));
            }
        };
        if pass == Pass::Wgrad && self.word("out_dtype")? != "fp32" {
            return Ok(Named::Unknown(NARROW_GRADIENTS));
        }
        // Rows of a batch are rows, and those of a weight's gradient are contracted.
        let (m, k) = match pass {
            Pass::Wgrad => (m, k * b),
            _ => (m * b, k),
        };
        let op = Op::Gemm {
            m,
            n,
            k,
            pass,
            dtype,
        };
        Ok(Named::Op(op, op.flops().0))
    }

    /// Sizes are those of the forward product in every pass, rows of each group.
    fn grouped(&self, dtype: Dtype) -> Result<Named, ImportError> {
        let (groups, rows) = (self.size("ng")?, self.size("M")?);
        let pass = match self.word("stage")? {
            "fwd" => Pass::Forward,
            "bwd_grad_act" => Pass::Dgrad,
            "bwd_grad_w" => Pass::Wgrad,
            other => {
                let found = format!("`stage={other}`");
                let expected = "fwd, bwd_grad_act or bwd_grad_w";
                return Err(self.file.malformed(self.place, found, expected));
            }
        };
        if pass == Pass::Wgrad && self.word("main_grad_dtype")? != "fp32" {
            return Ok(Named::Unknown(NARROW_GRADIENTS));
        }
        let op = Op::GroupedGemm {
            groups,
            rows: groups * rows,
            n: self.size("N")?,
            k: self.size("K")?,
            pass,
            dtype,
        };
        Ok(Named::Op(op, op.flops().0))
    }

    fn attention(&self, pass: Pass) -> Result<Named, ImportError> {
        let (batch, length) = (self.size("batch")?, self.size("seq_len")?);
        let op = Op::Attention {
            batch,
            heads: self.size("head_num")?,
            kv_heads: self.size("kv_head_num")?,
            q_len: length,
            kv_len: length,
            qk_dim: self.size("qk_head_dim")?,
            v_dim: self.size("v_head_dim")?,
            causal: true,
            pass,
            dtype: Dtype::Bf16,
        };
        // All scores are counted, though half exist.
        Ok(Named::Op(op, 2.0 * op.flops().0))
    }
}

const NARROW_GRADIENTS: &str = "a weight gradient summed in bf16: keys have f32 ones";

/// Rows that fits of memory-bound ops are put at.
const ROWS: [u64; 5] = [256, 1024, 4096, 16_384, 65_536];
/// Widths of them.
const WIDTHS: [u64; 4] = [512, 2048, 8192, 32_768];
/// Vocabularies of a rank.
const VOCABULARIES: [u64; 4] = [4096, 16_384, 65_536, 262_144];
/// Lengths of tensors without rows.
const LENGTHS: [u64; 8] = [
    1 << 16,
    1 << 18,
    1 << 20,
    1 << 22,
    1 << 24,
    1 << 26,
    1 << 28,
    1 << 31,
];

/// Rows an expert sends out for each token: eight experts a token, as most of SimuMax's cases have.
const TOPK: f64 = 8.0;

/// Bytes a logit of unfused cross entropy, forward and backward, and of the fused one
/// (`ce_theoretical_bytes` in `test_ce_permute_efficiency.py`).
const CE_BYTES: [f64; 2] = [38.0, 14.0];
const CE_FUSED_BYTES: [f64; 2] = [4.0, 4.0];

fn memory_bound(
    file: &File<'_>,
    classes: &BTreeMap<String, Bandwidth>,
    timings: &mut Timings,
) -> Result<(), ImportError> {
    for (class, fit) in classes {
        let place = |key: &str| format!("accelerator.bandwidth.{class}.{key}");
        positive(file, &place("efficient_factor"), fit.efficient_factor)?;
        positive(file, &place("gbps"), fit.gbps)?;
        let seconds = |bytes: f64| {
            bytes / (fit.gbps * GIB as f64 * fit.efficient_factor) + fit.latency_us * 1e-6
        };
        match class.as_str() {
            "default" => {
                for op in ordinary() {
                    timings.add(Key::Op(op), seconds(op.bytes().0 as f64));
                }
            }
            "permute_fwd" | "permute_bwd" => {
                let forward = class == "permute_fwd";
                for op in permutations(if forward {
                    Pass::Forward
                } else {
                    Pass::Backward
                }) {
                    // Each way reads tokens once and touches permuted rows three times
                    // (`permute_theoretical_bytes`); the key's bytes are two touches.
                    let bytes = op.bytes().0 as f64 / 2.0 * (3.0 + 1.0 / TOPK);
                    timings.add(Key::Op(op), seconds(bytes));
                }
            }
            "ce" if classes.contains_key("ce_fusion") => {}
            "ce" | "ce_fusion" => {
                let each = if class == "ce" {
                    CE_BYTES
                } else {
                    CE_FUSED_BYTES
                };
                for (pass, bytes) in [Pass::Forward, Pass::Backward].into_iter().zip(each) {
                    for (rows, vocab) in pairs(&ROWS, &VOCABULARIES) {
                        let op = Op::CrossEntropy {
                            rows,
                            vocab,
                            pass,
                            dtype: Dtype::Bf16,
                        };
                        timings.add(Key::Op(op), seconds(bytes * (rows * vocab) as f64));
                    }
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn pairs<'a>(rows: &'a [u64], widths: &'a [u64]) -> impl Iterator<Item = (u64, u64)> + 'a {
    let each = |&row| widths.iter().map(move |&width| (row, width));
    rows.iter().flat_map(each)
}

/// Ops whose memory has SimuMax's default class.
fn ordinary() -> Vec<Op> {
    let dtype = Dtype::Bf16;
    let mut ops = Vec::new();
    for pass in [Pass::Forward, Pass::Backward] {
        for (rows, dim) in pairs(&ROWS, &WIDTHS) {
            ops.push(Op::RmsNorm {
                rows,
                dim,
                pass,
                dtype,
            });
            ops.push(Op::Swiglu {
                rows,
                dim,
                pass,
                dtype,
            });
            ops.push(Op::Embedding {
                rows,
                dim,
                pass,
                dtype,
            });
        }
    }
    for len in LENGTHS {
        ops.push(Op::Add { len, dtype });
        let moments = Dtype::F32;
        ops.push(Op::Adamw {
            len,
            dtype,
            moments,
            remainders: false,
        });
        ops.push(Op::GradNorm { len });
        let kind = SweepKind::Copy;
        ops.push(Op::Sweep { kind, len, dtype });
    }
    ops
}

fn permutations(pass: Pass) -> Vec<Op> {
    let dtype = Dtype::Bf16;
    let each = |(rows, dim)| {
        [
            Op::Permute {
                rows,
                dim,
                pass,
                dtype,
            },
            Op::Unpermute {
                rows,
                dim,
                pass,
                dtype,
            },
        ]
    };
    pairs(&ROWS, &WIDTHS).flat_map(each).collect()
}

/// Sizes that fits of collectives are put at, bytes.
const MESSAGES: [u64; 8] = [
    64 * KIB,
    256 * KIB,
    1024 * KIB,
    4096 * KIB,
    16_384 * KIB,
    65_536 * KIB,
    262_144 * KIB,
    1_048_576 * KIB,
];

/// Nodes of eight have a latency for each step of a ring.
const RING_NODE: u32 = 8;

fn collectives(
    file: &File<'_>,
    name: &str,
    network: &Value,
    of_node: u32,
    timings: &mut Timings,
) -> Result<(), ImportError> {
    // The networks of a machine without switch are named by ranks; others hold for any number. Of a
    // slow and a fast network of a node, the fast one is that of a whole group.
    let sizes: Vec<u32> = match name {
        "intra_node_pcie_2x" => vec![2],
        "intra_node_pcie_4x" => vec![4],
        "intra_node_pcie_8x" => vec![8],
        "low_intra_node" => return Ok(()),
        _ => [2, 4, 8]
            .into_iter()
            .filter(|&ranks| ranks <= of_node)
            .collect(),
    };
    let place = format!("networks.{name}");
    let network: Network = serde_json::from_value(network.clone()).map_err(|error| {
        let expected = "bandwidth (efficient_factor, gbps) and op (scale, offset)";
        file.malformed(&place, error.to_string(), expected)
    })?;
    positive(
        file,
        &format!("{place}.bandwidth.gbps"),
        network.bandwidth.gbps,
    )?;
    for (op, fit) in &network.op {
        let kind = match op.as_str() {
            "all_reduce" => CollectiveKind::AllReduce,
            "all_gather" => CollectiveKind::AllGather,
            "reduce_scatter" => CollectiveKind::ReduceScatter,
            "all2all" => CollectiveKind::AllToAll,
            "p2p" => CollectiveKind::SendRecv,
            _ => continue,
        };
        let own = fit
            .efficient_factor
            .unwrap_or(network.bandwidth.efficient_factor);
        let own = positive(file, &format!("{place}.op.{op}.efficient_factor"), own)?;
        let rate = network.bandwidth.gbps * GIB as f64 * own;
        for &ranks in &sizes {
            let pair = kind == CollectiveKind::SendRecv;
            if pair && ranks != sizes[0] {
                continue;
            }
            let n = f64::from(ranks);
            let step = fit.latency_us.unwrap_or(network.bandwidth.latency_us);
            let steps = if of_node == RING_NODE && !pair {
                (n + fit.offset) * fit.scale
            } else {
                1.0
            };
            let by_ranks = fit.fixed_latency_us_by_comm_num.get(&ranks.to_string());
            let fixed = by_ranks.copied().or(fit.fixed_latency_us).unwrap_or(0.0);
            for bytes in MESSAGES {
                let leaving = bytes as f64 * fit.scale * (1.0 + fit.offset / n);
                let key = Collective {
                    kind,
                    bytes: Bytes(bytes),
                    ranks: if pair { 2 } else { ranks },
                    ranks_per_domain: if pair { 2 } else { ranks },
                };
                let seconds = leaving / rate + (step * steps + fixed) * 1e-6;
                timings.add(Key::Collective(key), seconds);
            }
        }
    }
    Ok(())
}
