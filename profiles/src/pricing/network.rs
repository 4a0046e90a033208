//! Prices of collectives and of token exchanges, by where the ranks sit.
//!
//! Inside one NVLink domain: NCCL's measured curves by kind, ranks and size. Across domains: every rank
//! of a domain drives its own NIC, so a ring of `m` ranks a domain has `m` NICs a node edge. Of an
//! all-to-all the remote share `1 - m/n` leaves through the one NIC of its rank (Megatron-Core's MoE
//! paper, arXiv 2603.07685, table 7 shows this shape). Both parts overlap: the slower counts, after a
//! latency. Left out: congestion between groups, NIC sharing, in-network sums, and small-message
//! latencies of particular fabrics except where a cluster was measured.

mod nccl;

use nccl::{Ranked, across, ranked};

use super::curve::Curve;
use super::lender;
use crate::cluster::Cluster;
use crate::collective::{Collective, CollectiveKind, ExchangeKernel};
use crate::cost::Source;
use crate::presets;
use crate::table;

/// Share of the NICs' line rate that rings reach: 192 of 200, 370 of 400 (both NVIDIA GTC24 S62129)
/// and 382 of 400 GB/s (stas00/ml-engineering, 4 x P6-B200).
const RING_EFFICIENCY: f64 = 0.93;

/// Share of the NIC's line rate that the remote part of an all-to-all reaches: the middle of the six
/// H100 figures of table 7 of arXiv 2603.07685 (40.7 to 47.1 of 50 GB/s at EP 16 to 64).
const EXCHANGE_EFFICIENCY: f64 = 0.875;

/// Fixed time of a collective across nodes (SimuMax@4dcaae51 fits 35 to 40 us), and of each further
/// node a ring passes. The latter is an assumption: one network hop a step.
const INTER_LATENCY_S: f64 = 35e-6;
const HOP_LATENCY_S: f64 = 4e-6;

/// Share of a mesh's links that collectives reach where there is no switch and no measurement. An
/// assumption, at the low end of what RCCL reports on eight MI300X.
const MESH_EFFICIENCY: f64 = 0.7;

/// Share of the host link that collectives of PCIe GPUs reach in one node: SimuMax@4dcaae51 fits .69 of
/// 30 GB/s for 2 and 4 GPUs, and for 8 .42 (all-reduce), .45, .37 and .28 (all-to-all).
const PCIE_EFFICIENCY: f64 = 0.66;
const PCIE_EFFICIENCY_8: f64 = 0.38;

/// Fixed time of a collective inside a domain where none was measured.
const INTRA_LATENCY_S: f64 = 12e-6;

/// Share of NVLink that HybridEP reaches, by architecture: its distinct-rank bytes over its time in table 7 of
/// arXiv 2603.07685, means over dispatch and combine. H100 at EP8: 412 and 436 of 450 GB/s. GB200 at EP8 to 64: 596
/// to 771 of 900. The H800's link has no such row; DeepEP V1 reaches 153 and 158 of 200 there.
fn hybridep_efficiency(arch: &str, nvlink_gb_per_s: f64) -> f64 {
    match arch {
        "sm_90" if nvlink_gb_per_s >= 450.0 => 0.94,
        "sm_90" => 0.78,
        "sm_100" | "sm_103" => 0.76,
        _ => 0.7,
    }
}

/// The same of DeepEP V1 on 20 multiprocessors, whose copies are bound by these: distinct-rank bytes over the times of
/// `dispatch.csv`, means over dispatch and combine of 4096 tokens. H100 and H200: 277 to 285 of 450 GB/s. B200 to GB300:
/// 272 to 397 of 900.
fn deepep_efficiency(arch: &str, nvlink_gb_per_s: f64) -> f64 {
    match arch {
        "sm_90" if nvlink_gb_per_s >= 450.0 => 0.62,
        "sm_100" | "sm_103" => 0.36,
        _ => hybridep_efficiency(arch, nvlink_gb_per_s),
    }
}

/// Ranks of an NVLink domain that DeepEP V1 was made for, and the share of NVLink that it reaches in larger ones: at
/// EP32 on GB200 400 GB/s to experts and 190 back, own rank included (NVIDIA, "Optimizing DeepSeek-V3 Training
/// Performance on NVIDIA GB200 NVL72", Megatron-LM docs/discussions, section 2.2.1).
const DEEPEP_DOMAIN: f64 = 8.0;
const DEEPEP_BEYOND: f64 = 0.277;

/// Multiprocessors that a collective of NCCL holds while it runs, one for each of its channels, which it shares with no
/// other kernel (NVIDIA/nccl#689): what it says of itself among eight A100 or H100 of a node (`24 coll channels`), two
/// for each of eight NICs across nodes (`16 coll channels`, and #1453), and in a domain of several nodes
/// `NVLS_NCHANNELS_SM100` of its `src/transport/nvls.cc`. Megatron-FSDP's README says 16 to 32 of them (Megatron-LM at
/// d85aa69b). Of AMD's library nothing is known, and it is taken to hold as many. Registered buffers
/// (`--use-nccl-ub`), which need fewer, are not planned.
const CHANNELS_OF_A_NODE: f64 = 24.0;
const CHANNELS_ACROSS: f64 = 16.0;
const CHANNELS_OF_NODES: f64 = 32.0;

/// The links of a cluster.
#[derive(Debug, Clone)]
pub(super) struct Network {
    /// Measured curves by kind (all-reduce, all-gather, reduce-scatter, all-to-all), ranks ascending.
    measured: [Vec<Ranked>; 4],
    /// Whether they were measured on this GPU.
    own: bool,
    /// Measured across nodes on this cluster: kind, ranks, ranks a domain, seconds by wire bytes.
    across: Vec<(CollectiveKind, [u32; 2], Curve)>,
    link: Link,
    /// NIC of a rank, bytes a second.
    nic: f64,
    /// Domains below a switch, and how much slower what leaves it is, innermost first.
    levels: Vec<(f64, f64)>,
    /// NVLink rate of exchanges that send one copy a destination, bytes a second: of DeepEP, of it in large domains, and
    /// of HybridEP.
    fused: [f64; 3],
    gpus_per_node: u32,
    /// Multiprocessors of a GPU.
    sms: f64,
    cpu: bool,
}

/// How ranks of a domain reach each other where NCCL was not measured.
#[derive(Debug, Clone, Copy)]
enum Link {
    /// A switch: everyone has the whole rate, bytes a second.
    Switch(f64),
    /// One link to each peer, bytes a second.
    Mesh(f64),
    /// The host.
    Pcie(f64),
}

impl Link {
    /// Bytes a second of one rank in a group of `n`.
    fn rate(self, n: f64) -> f64 {
        match self {
            Self::Switch(rate) => rate,
            Self::Mesh(link) => link * (n - 1.0) * MESH_EFFICIENCY,
            Self::Pcie(link) if n <= 4.0 => link * PCIE_EFFICIENCY,
            Self::Pcie(link) => link * PCIE_EFFICIENCY_8,
        }
    }
}

fn kind_index(kind: CollectiveKind) -> usize {
    match kind {
        CollectiveKind::AllReduce => 0,
        CollectiveKind::AllGather | CollectiveKind::Broadcast | CollectiveKind::SendRecv => 1,
        CollectiveKind::ReduceScatter => 2,
        CollectiveKind::AllToAll => 3,
    }
}

/// Wire bytes of a collective of one byte.
fn wire_factor(kind: CollectiveKind, ranks: f64) -> f64 {
    match kind {
        CollectiveKind::AllReduce => 2.0 * (ranks - 1.0) / ranks,
        CollectiveKind::AllGather | CollectiveKind::ReduceScatter | CollectiveKind::AllToAll => {
            (ranks - 1.0) / ranks
        }
        CollectiveKind::SendRecv | CollectiveKind::Broadcast => 1.0,
    }
}

impl Network {
    pub(super) fn new(cluster: &Cluster) -> Self {
        let gpu = &cluster.gpu;
        let name = gpu.name.to_lowercase();
        let own = table::collectives().iter().any(|row| row.gpu == name);
        let lender = if own {
            Some(name.as_str())
        } else {
            lender::of_links(&name, &gpu.arch)
        };
        // A mesh and a host link behave unlike a switch: nothing is lent to them.
        let switched = gpu.nvlink_gb_per_s > 0.0 && gpu.mesh_link_gb_per_s.is_none();
        let lender = lender.filter(|_| switched);
        let slower = lender.map_or(1.0, |lender| {
            let preset = presets::gpu(lender).expect("tables are of presets");
            preset.nvlink_gb_per_s / gpu.nvlink_gb_per_s
        });
        let measured = [
            CollectiveKind::AllReduce,
            CollectiveKind::AllGather,
            CollectiveKind::ReduceScatter,
            CollectiveKind::AllToAll,
        ]
        .map(|kind| lender.map_or_else(Vec::new, |lender| ranked(lender, kind, slower)));
        let link = match (gpu.mesh_link_gb_per_s, switched) {
            (Some(link), _) => Link::Mesh(link * 1e9),
            (None, true) => Link::Switch(gpu.nvlink_gb_per_s * 0.7e9),
            (None, false) => Link::Pcie(gpu.host_link_gb_per_s * 1e9),
        };
        let nodes_per_domain =
            (f64::from(cluster.gpus_per_domain) / f64::from(cluster.gpus_per_node)).max(1.0);
        let mut slowdown = 1.0;
        let levels = cluster.oversubscription.iter().map(|level| {
            slowdown *= level.ratio;
            (
                (f64::from(level.nodes) / nodes_per_domain).max(1.0),
                slowdown,
            )
        });
        let deepep = deepep_efficiency(&gpu.arch, gpu.nvlink_gb_per_s);
        let hybridep = hybridep_efficiency(&gpu.arch, gpu.nvlink_gb_per_s);
        let shares = [deepep, deepep.min(DEEPEP_BEYOND), hybridep];
        Self {
            measured,
            own: own && slower == 1.0,
            across: across(&cluster.name.to_lowercase(), cluster.nic_gb_per_s),
            link,
            // A single machine has no NIC and no group that needs one; the host link stands in.
            nic: if cluster.nic_gb_per_s > 0.0 {
                cluster.nic_gb_per_s * 1e9
            } else {
                gpu.host_link_gb_per_s * 1e9
            },
            levels: levels.collect(),
            fused: shares.map(|share| {
                if switched {
                    gpu.nvlink_gb_per_s * 1e9 * share
                } else {
                    link.rate(8.0)
                }
            }),
            gpus_per_node: cluster.gpus_per_node,
            sms: f64::from(gpu.num_sms),
            cpu: gpu.is_cpu(),
        }
    }

    /// The share of a device's multiprocessors that a collective holds while it runs.
    pub(super) fn taken(&self, collective: &Collective) -> f64 {
        let Collective {
            ranks,
            ranks_per_domain,
            ..
        } = *collective;
        let channels = if ranks > ranks_per_domain {
            CHANNELS_ACROSS
        } else if ranks > self.gpus_per_node {
            CHANNELS_OF_NODES
        } else {
            CHANNELS_OF_A_NODE
        };
        self.share(channels)
    }

    /// The share of a device that so many multiprocessors are.
    pub(super) fn share(&self, sms: f64) -> f64 {
        (sms / self.sms).min(1.0)
    }

    /// Seconds of a collective of more than one rank.
    pub(super) fn price(&self, collective: &Collective) -> (f64, Source) {
        let Collective {
            kind,
            ranks,
            ranks_per_domain,
            ..
        } = *collective;
        let bytes = collective.bytes.0.max(1) as f64;
        let n = f64::from(ranks.max(2));
        let m = f64::from(ranks_per_domain.clamp(1, ranks.max(2)));
        if kind == CollectiveKind::SendRecv {
            return if ranks_per_domain >= 2 {
                // Half of a gather of two: one rank's buffer crosses the link.
                self.inside(
                    CollectiveKind::AllGather,
                    2.0 * bytes,
                    2.0,
                    Source::Interpolated,
                )
            } else {
                (INTER_LATENCY_S + self.sent(bytes), Source::Extrapolated)
            };
        }
        if n <= m {
            let worst = if kind == CollectiveKind::Broadcast {
                Source::Interpolated
            } else {
                Source::Measured
            };
            return self.inside(kind, bytes, n, worst);
        }
        let wire = bytes * wire_factor(kind, n);
        if kind == CollectiveKind::AllToAll {
            // Equal parts to every rank; those of the own domain stay inside it.
            let part = bytes / n;
            let local = if m > 1.0 {
                self.inside(kind, part * m, m, Source::Extrapolated).0
            } else {
                0.0
            };
            let time = local.max(self.leaving(part, n, m)) + latency(n / m);
            return (time, Source::Extrapolated);
        }
        let same = |(k, ranks, _): &&(CollectiveKind, [u32; 2], Curve)| {
            *k == kind && f64::from(ranks[1]) == m
        };
        let ring = self.ring(wire, n, m);
        if let Some((_, at, curve)) = self.across.iter().find(same) {
            let exact = at[0] == ranks && curve.is_point(wire) && self.levels.is_empty();
            let near = curve.covers(wire) && ranks <= 2 * at[0] && self.levels.is_empty();
            let source = match (exact, near) {
                (true, _) => Source::Measured,
                (_, true) => Source::Interpolated,
                _ => Source::Extrapolated,
            };
            let extra_hops = (n - f64::from(at[0])).max(0.0) / m * HOP_LATENCY_S;
            return (curve.at(wire) * self.slowdown(n / m) + extra_hops, source);
        }
        // The ring also runs through the links inside each domain.
        let inside = if m > 1.0 {
            wire / self.busbw(kind, m)
        } else {
            0.0
        };
        (
            ring.max(inside) + ring_latency(kind, n / m),
            Source::Extrapolated,
        )
    }

    /// Seconds of an exchange of which each rank sends `local` bytes inside its domain and `remote`
    /// bytes through its NIC, with kernels that overlap both.
    pub(super) fn exchange(
        &self,
        kernel: ExchangeKernel,
        [local, remote]: [f64; 2],
        [n, m]: [f64; 2],
    ) -> (f64, Source) {
        let rate = match kernel {
            ExchangeKernel::Deepep if m <= DEEPEP_DOMAIN => self.fused[0],
            ExchangeKernel::Deepep => self.fused[1],
            ExchangeKernel::Hybridep => self.fused[2],
        };
        let inside = local / rate;
        let crosses = n > m;
        let outside = if crosses {
            // Spread evenly over the ranks outside the domain, as far as levels go.
            self.leaving(remote / (n - m), n, m)
        } else {
            remote / (self.nic * EXCHANGE_EFFICIENCY)
        };
        let latency = if crosses {
            latency(n / m)
        } else {
            self.intra_latency()
        };
        (inside.max(outside) + latency, Source::Extrapolated)
    }

    /// Seconds of a collective of `n` ranks in one domain.
    fn inside(&self, kind: CollectiveKind, bytes: f64, n: f64, best: Source) -> (f64, Source) {
        let index = kind_index(kind);
        let curves = &self.measured[index];
        if curves.is_empty() {
            let wire = bytes * wire_factor(kind, n);
            return (
                self.intra_latency() + wire / self.link.rate(n),
                Source::Extrapolated,
            );
        }
        // A broadcast moves what a gather of the same wire bytes moves.
        let bytes = match kind {
            CollectiveKind::Broadcast => bytes * n / (n - 1.0),
            _ => bytes,
        };
        let above = curves.partition_point(|curve| f64::from(curve.ranks) < n);
        let (time, inside) = if above == curves.len() {
            // More ranks than measured: the same bus bandwidth, and a latency that grows as it grew.
            let last = &curves[above - 1];
            let ranks = f64::from(last.ranks);
            let kind = measured_kind(index);
            let moved = last.time.at(bytes) * wire_factor(kind, n) / wire_factor(kind, ranks);
            (moved + last.latency * ((n / ranks).powf(0.75) - 1.0), false)
        } else if f64::from(curves[above].ranks) == n || above == 0 {
            (
                curves[above].time.at(bytes),
                curves[above].time.covers(bytes),
            )
        } else {
            let (a, b) = (&curves[above - 1], &curves[above]);
            let (low, high) = (f64::from(a.ranks).ln(), f64::from(b.ranks).ln());
            let part = (n.ln() - low) / (high - low);
            let time = a.time.at(bytes).powf(1.0 - part) * b.time.at(bytes).powf(part);
            (time, a.time.covers(bytes) && b.time.covers(bytes))
        };
        let exact = curves
            .get(above)
            .is_some_and(|curve| f64::from(curve.ranks) == n && curve.time.is_point(bytes));
        let source = match (self.own, exact, inside) {
            (true, true, _) => best,
            (true, false, true) => Source::Interpolated.max(best),
            _ => Source::Extrapolated,
        };
        (time, source)
    }

    /// Bus bandwidth inside a domain at the largest measured size, bytes a second.
    fn busbw(&self, kind: CollectiveKind, m: f64) -> f64 {
        let bytes = f64::from(1_u32 << 29);
        bytes * wire_factor(kind, m) / self.inside(kind, bytes, m, Source::Measured).0
    }

    /// Seconds of a ring's bytes over the NICs of `m` ranks a domain.
    fn ring(&self, wire: f64, n: f64, m: f64) -> f64 {
        wire / (m * self.nic * RING_EFFICIENCY) * self.slowdown(n / m)
    }

    /// Seconds of a message's bytes through the NIC of a rank.
    fn sent(&self, bytes: f64) -> f64 {
        bytes / (self.nic * RING_EFFICIENCY)
    }

    /// How many times as long a message takes in a group that reaches over so many domains: one of its ranks lies behind the
    /// outermost switch.
    pub(super) fn farther(&self, message: &Collective, domains: u32) -> f64 {
        if message.ranks_per_domain >= 2 {
            return 1.0;
        }
        let sent = self.sent(message.bytes.0.max(1) as f64);
        let slowed = sent * self.slowdown(f64::from(domains));
        (INTER_LATENCY_S + slowed) / (INTER_LATENCY_S + sent)
    }

    /// How much slower what passes the outermost switch is, for a group of so many domains. A ring may
    /// pass it at every step, for how the group lies in the network is not known.
    fn slowdown(&self, domains: f64) -> f64 {
        let passed = self.levels.iter().rev().find(|(below, _)| domains > *below);
        passed.map_or(1.0, |(_, slowdown)| *slowdown)
    }

    /// Seconds for a rank's `part` bytes to each rank outside its domain: the NIC carries all of them,
    /// and each level's uplinks the share that leaves it.
    fn leaving(&self, part: f64, n: f64, m: f64) -> f64 {
        let nic = self.nic * EXCHANGE_EFFICIENCY;
        let all = part * (n - m) / nic;
        self.levels
            .iter()
            .map(|(below, slowdown)| part * (n - below * m).max(0.0) / nic * slowdown)
            .fold(all, f64::max)
    }

    fn intra_latency(&self) -> f64 {
        if self.cpu { 5e-6 } else { INTRA_LATENCY_S }
    }
}

/// The kind whose curves are at an index.
fn measured_kind(index: usize) -> CollectiveKind {
    [
        CollectiveKind::AllReduce,
        CollectiveKind::AllGather,
        CollectiveKind::ReduceScatter,
        CollectiveKind::AllToAll,
    ][index]
}

/// Fixed time of an exchange or a tree over so many domains.
fn latency(domains: f64) -> f64 {
    INTER_LATENCY_S + HOP_LATENCY_S * domains.max(2.0).log2()
}

/// Fixed time of a ring (a tree for the sum) over so many domains.
fn ring_latency(kind: CollectiveKind, domains: f64) -> f64 {
    match kind {
        CollectiveKind::AllReduce | CollectiveKind::Broadcast => latency(domains * domains),
        _ => INTER_LATENCY_S + HOP_LATENCY_S * (domains - 1.0),
    }
}
