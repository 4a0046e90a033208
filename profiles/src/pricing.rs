//! [`Costs`]: what any op or collective costs on a cluster, and how that is known.

use crate::cluster::Cluster;
use crate::cost::{Cost, Source};
use crate::directory::Profile;
use crate::op::{Collective, CollectiveKind, Op};
use crate::units::{Bytes, Seconds};

/// Share of peak bandwidth that memory-bound kernels reach, and their fixed time: aiconfigurator's
/// constants (ai-dynamo/aiconfigurator@095f58a51c4c).
const MEMORY_EFFICIENCY: f64 = 0.8;
const MEMORY_LATENCY_S: f64 = 3e-6;

/// Prices for one cluster.
#[derive(Debug, Clone)]
pub struct Costs {
    cluster: Cluster,
}

impl Costs {
    /// Collects every table that applies to a cluster.
    pub fn for_cluster(cluster: &Cluster, profiles: &[Profile]) -> Self {
        let _ = profiles;
        Self {
            cluster: cluster.clone(),
        }
    }

    /// The price of an op.
    pub fn op(&self, op: &Op) -> Cost {
        let gpu = &self.cluster.gpu;
        let peak = gpu
            .peak(op.dtype())
            .or(gpu
                .peak_tflops
                .bf16
                .map(crate::units::FlopsPerSecond::from_tflops))
            .unwrap_or(crate::units::FlopsPerSecond::from_tflops(
                gpu.peak_tflops.f32,
            ));
        let compute = op.flops().0 / (peak.0 * 0.7);
        let memory = op.bytes().0 as f64 / (gpu.memory_rate().0 * MEMORY_EFFICIENCY);
        let latency = if gpu.is_cpu() { 0.0 } else { MEMORY_LATENCY_S };
        Cost {
            time: Seconds(compute.max(memory) + latency + 1e-9),
            source: Source::Extrapolated,
        }
    }

    /// The price of a collective.
    pub fn collective(&self, collective: &Collective) -> Cost {
        let n = collective.ranks;
        if n <= 1 {
            return Cost {
                time: Seconds::ZERO,
                source: Source::Measured,
            };
        }
        let m = collective.ranks_per_domain.clamp(1, n);
        let wire = collective.wire_bytes();
        if collective.kind == CollectiveKind::AllToAll {
            let share = wire / f64::from(n - 1);
            let local = share * f64::from(m - 1);
            return self.exchange(Bytes(local as u64), Bytes((wire - local) as u64), n, m);
        }
        let (rate, latency) = if collective.crosses_domains() {
            let rails = if collective.kind == CollectiveKind::SendRecv {
                1
            } else {
                m
            };
            (
                self.cluster.nic_gb_per_s.max(1.0) * f64::from(rails) * 0.85,
                35e-6,
            )
        } else {
            (self.cluster.gpu.nvlink_gb_per_s.max(1.0) * 0.75, 12e-6)
        };
        Cost {
            time: Seconds(wire / (rate * 1e9) + latency),
            source: Source::Extrapolated,
        }
    }

    /// The price of an exchange in which a rank sends `local` bytes to the other ranks of its NVLink
    /// domain and `remote` bytes over its NIC, as a token dispatch that sends one copy a destination
    /// does. `ranks_per_domain` of the `ranks` share a domain.
    pub fn exchange(&self, local: Bytes, remote: Bytes, ranks: u32, ranks_per_domain: u32) -> Cost {
        if ranks <= 1 {
            return Cost {
                time: Seconds::ZERO,
                source: Source::Measured,
            };
        }
        let local_s = local.0 as f64 / (self.cluster.gpu.nvlink_gb_per_s.max(1.0) * 0.7e9);
        let remote_s = remote.0 as f64 / (self.cluster.nic_gb_per_s.max(1.0) * 0.85e9);
        let latency = if ranks > ranks_per_domain {
            35e-6
        } else {
            12e-6
        };
        Cost {
            time: Seconds(local_s.max(remote_s) + latency),
            source: Source::Extrapolated,
        }
    }
}
