//! [`Gpu`] and [`Cluster`]: what a machine is made of and how its parts are joined.
//!
//! A cluster is described, not measured, here: peaks and link rates with their sources. What those
//! parts were measured to achieve is in the cost tables. Presets and the TOML reader are in
//! [`crate::presets`].

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::units::{Bytes, BytesPerSecond, FlopsPerSecond, GIB};

/// One accelerator, or the share of a CPU that one rank gets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// Name, which also names its measured tables.
    pub name: String,
    /// Architecture (`sm_90`, `gfx942`, `cpu`).
    pub arch: String,
    /// Streaming multiprocessors or compute units; cores of a CPU.
    pub num_sms: u32,
    /// Dense peak in TFLOP/s by dtype; a dtype that is absent is not computed in.
    pub peak_tflops: PeakTflops,
    /// Share of the peaks that products keep up in training, where power or heat holds them below what
    /// a benchmark of one kernel reaches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sustained_share: Option<f64>,
    /// Memory a program can allocate, GiB.
    pub memory_gib: f64,
    /// Memory bandwidth, GB/s.
    pub memory_gb_per_s: f64,
    /// Link to the other GPUs of its domain, GB/s in one direction; 0 without one.
    pub nvlink_gb_per_s: f64,
    /// Where the domain is a full mesh without a switch: one link's rate, GB/s in one direction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mesh_link_gb_per_s: Option<f64>,
    /// Link to the host, GB/s in one direction.
    pub host_link_gb_per_s: f64,
    /// Where the figures come from.
    pub sources: Vec<String>,
}

/// Dense peaks in TFLOP/s.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeakTflops {
    /// f32 (on vector units).
    pub f32: f64,
    /// bf16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bf16: Option<f64>,
    /// fp8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp8: Option<f64>,
    /// fp4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fp4: Option<f64>,
}

impl Gpu {
    /// Dense peak for a dtype, where the device computes in it.
    pub fn peak(&self, dtype: Dtype) -> Option<FlopsPerSecond> {
        let peak = match dtype {
            Dtype::F32 | Dtype::I32 => Some(self.peak_tflops.f32),
            Dtype::Bf16 => self.peak_tflops.bf16,
            Dtype::Fp8 => self.peak_tflops.fp8,
            Dtype::Fp4 => self.peak_tflops.fp4,
        };
        peak.map(FlopsPerSecond::from_tflops)
    }

    /// Memory a program can allocate.
    pub fn memory(&self) -> Bytes {
        Bytes((self.memory_gib * GIB as f64) as u64)
    }

    /// Memory bandwidth.
    pub fn memory_rate(&self) -> BytesPerSecond {
        BytesPerSecond::from_gb_per_s(self.memory_gb_per_s)
    }

    /// Whether this is a share of a CPU.
    pub fn is_cpu(&self) -> bool {
        self.arch == "cpu"
    }
}

/// GPUs joined in NVLink domains, nodes and a network.
///
/// Ranks are numbered node by node: rank `r` is GPU `r % gpus_per_node` of node
/// `r / gpus_per_node`, and NVLink domain `r / gpus_per_domain`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    /// Preset name, or the name in the file.
    pub name: String,
    /// The accelerator.
    pub gpu: Gpu,
    /// GPUs that share a host.
    pub gpus_per_node: u32,
    /// GPUs that reach each other without the network: an NVLink domain (8 in a DGX, 72 in an NVL72
    /// rack), or the GPUs of a node where only PCIe joins them.
    pub gpus_per_domain: u32,
    /// Network bandwidth of one GPU, GB/s in one direction; 0 for a single machine.
    pub nic_gb_per_s: f64,
    /// Network levels above the node, innermost first; empty for a non-blocking network.
    #[serde(default)]
    pub oversubscription: Vec<NetworkLevel>,
    /// Host memory of a node, GiB.
    pub host_memory_gib: f64,
    /// What host memory of a node gives or takes, GB/s, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_memory_gb_per_s: Option<f64>,
    /// GPUs behind one link to the host.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub gpus_per_host_link: u32,
    /// Standard deviation of the speeds of its GPUs over their mean, where known: ranks wait for the slowest of a job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_speed_spread: Option<f64>,
    /// Price of a GPU, USD an hour, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usd_per_gpu_hour: Option<f64>,
    /// GPUs there are, where the cluster has a fixed size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_gpus: Option<u32>,
    /// Where the figures come from.
    #[serde(default)]
    pub sources: Vec<String>,
}

fn one() -> u32 {
    1
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands fields over by reference"
)]
fn is_one(count: &u32) -> bool {
    *count == 1
}

/// A level of the network beyond which bandwidth is shared.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkLevel {
    /// Nodes below one switch of this level.
    pub nodes: u32,
    /// Bandwidth below over bandwidth above: 1 is non-blocking, 2 halves what leaves the level.
    pub ratio: f64,
}

impl Cluster {
    /// What a GPU copies to its host or from it while all of its node do, GB/s in one direction: its share of its link, or
    /// of the host's memory where that is less.
    pub fn host_gb_per_s(&self) -> f64 {
        let link = self.gpu.host_link_gb_per_s / f64::from(self.gpus_per_host_link.max(1));
        let copying = (self.num_gpus).map_or(self.gpus_per_node, |all| all.min(self.gpus_per_node));
        let memory = self.host_memory_gb_per_s.unwrap_or(f64::INFINITY);
        link.min(memory / f64::from(copying.max(1)))
    }

    /// How much longer the slowest of so many GPUs takes for an op than their mean, where their speeds lie about it as a
    /// normal distribution. The mean of the largest of `n` is from Cramer, *Mathematical Methods of Statistics* (1946),
    /// section 28.6: a fifth of a standard deviation too much for two, a tenth for eight, and less for more.
    pub fn slowest_of(&self, gpus: u32) -> f64 {
        let Some(spread) = self.gpu_speed_spread.filter(|_| gpus > 1) else {
            return 1.0;
        };
        let n = f64::from(gpus);
        let far = (2.0 * n.ln()).sqrt();
        let half = f64::midpoint(n.ln().ln(), (4.0 * std::f64::consts::PI).ln());
        let largest = far - (half - std::f64::consts::EULER_GAMMA) / far;
        1.0 + spread * largest
    }

    /// The NVLink domain a rank sits in.
    pub fn domain_of(&self, rank: u32) -> u32 {
        rank / self.gpus_per_domain.max(1)
    }

    /// The most ranks of a sorted group that share one NVLink domain.
    pub fn ranks_per_domain(&self, group: &[u32]) -> u32 {
        let mut best = 0;
        let mut run = 0;
        let mut last = None;
        for &rank in group {
            let domain = Some(self.domain_of(rank));
            run = if domain == last { run + 1 } else { 1 };
            last = domain;
            best = best.max(run);
        }
        best
    }
}
