//! The `local` cluster: this machine's cores as ranks.
//!
//! What it can do is assumed, not measured, until a profile of the machine says better: the peak is that
//! of the vector instructions at a usual clock, the bandwidth at the low end of server cores of the
//! last ten years.

use crate::cluster::{Cluster, Gpu, PeakTflops};
use crate::units::{Bytes, GIB};

/// Clock assumed of a core with busy vector units, GHz.
const CORE_GHZ: f64 = 3.5;
/// Memory bandwidth assumed of one core, GB/s.
const CORE_GB_PER_S: f64 = 8.0;
/// Share of the machine's memory that ranks may fill; the rest is the system's.
const USABLE_MEMORY: f64 = 0.8;

/// What of this machine matters to a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// Cores this process may use.
    pub cores: u32,
    /// Memory this process may use.
    pub memory: Bytes,
    /// f32 operations a core can finish in a cycle: two multiply-add units of its vector width.
    pub flops_per_cycle: u32,
}

impl Machine {
    /// Asks the system: available parallelism, and the smaller of installed memory and the limit of
    /// the control group. Where the system does not say, 4 GiB a core are assumed.
    pub fn detect() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u32;
        let read = |path: &str| std::fs::read_to_string(path).ok();
        let installed = read("/proc/meminfo").and_then(|text| total_memory(&text));
        let limit = [
            "/sys/fs/cgroup/memory.max",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        ]
        .iter()
        .find_map(|path| read(path))
        .and_then(|text| text.trim().parse().ok());
        let memory = match (installed, limit) {
            (Some(installed), Some(limit)) => Bytes(u64::min(installed, limit)),
            (Some(only), None) | (None, Some(only)) => Bytes(only),
            (None, None) => Bytes(u64::from(cores) * 4 * GIB),
        };
        Self {
            cores,
            memory,
            flops_per_cycle: flops_per_cycle(),
        }
    }
}

/// Lanes of the widest f32 vectors, times two for multiply-add, times two units.
#[cfg(target_arch = "x86_64")]
fn flops_per_cycle() -> u32 {
    if std::arch::is_x86_feature_detected!("avx512f") {
        64
    } else if std::arch::is_x86_feature_detected!("fma") {
        32
    } else {
        8
    }
}

/// 128-bit vectors, as on the 64-bit Arm cores of today.
#[cfg(not(target_arch = "x86_64"))]
fn flops_per_cycle() -> u32 {
    16
}

/// Bytes of the `MemTotal` line of `/proc/meminfo`.
fn total_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// The cluster of `ranks` rank threads of one process on a machine.
///
/// With at least as many cores as ranks, a rank owns `floor(cores / ranks)` of them; with fewer, it
/// owns its fraction of one. Peak and bandwidth are the owned cores' and memory is divided evenly.
pub fn local_on(machine: Machine, ranks: u32) -> Cluster {
    let ranks = ranks.max(1);
    let cores = machine.cores.max(1);
    let owned = if cores >= ranks {
        f64::from(cores / ranks)
    } else {
        f64::from(cores) / f64::from(ranks)
    };
    let memory_gib = machine.memory.gib();
    let rate = CORE_GB_PER_S * owned;
    let core_gflops = CORE_GHZ * f64::from(machine.flops_per_cycle);
    Cluster {
        name: "local".to_owned(),
        gpu: Gpu {
            name: "cpu".to_owned(),
            arch: "cpu".to_owned(),
            num_sms: (cores / ranks).max(1),
            peak_tflops: PeakTflops {
                f32: core_gflops * 1e-3 * owned,
                ..PeakTflops::default()
            },
            memory_gib: memory_gib * USABLE_MEMORY / f64::from(ranks),
            memory_gb_per_s: rate,
            // A message is a copy: read once and written once.
            nvlink_gb_per_s: rate / 2.0,
            mesh_link_gb_per_s: None,
            sustained_share: None,
            host_link_gb_per_s: rate / 2.0,
            sources: vec![format!(
                "assumed: {core_gflops:.0} GFLOP/s (vector units at {CORE_GHZ} GHz) and \
                 {CORE_GB_PER_S:.0} GB/s a core; `moefold profile` measures"
            )],
        },
        gpus_per_node: ranks,
        gpus_per_domain: ranks,
        nic_gb_per_s: 0.0,
        oversubscription: Vec::new(),
        host_memory_gib: memory_gib,
        host_memory_gb_per_s: None,
        gpus_per_host_link: 1,
        gpu_speed_spread: None,
        usd_per_gpu_hour: None,
        num_gpus: Some(ranks),
        sources: vec![format!("{cores} cores, {memory_gib:.1} GiB")],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: Machine = Machine {
        cores: 2,
        memory: Bytes(20 * GIB),
        flops_per_cycle: 32,
    };

    #[test]
    fn law_ranks_share_the_machine() {
        for ranks in 1..=64 {
            let cluster = local_on(MACHINE, ranks);
            let total = |each: f64| each * f64::from(ranks);
            assert!(total(cluster.gpu.peak_tflops.f32) <= 2.0 * 0.112 + 1e-12);
            assert!(total(cluster.gpu.memory_gib) <= 20.0);
            assert!(cluster.gpu.memory_gb_per_s > 0.0 && cluster.gpu.num_sms >= 1);
            assert_eq!(cluster.num_gpus, Some(ranks));
        }
    }

    #[test]
    fn golden_four_ranks_on_two_cores_own_half_a_core_each() {
        let gpu = local_on(MACHINE, 4).gpu;
        assert!((gpu.peak_tflops.f32 - 0.056).abs() < 1e-12);
        assert_eq!(gpu.memory_gib, 4.0);
    }

    #[test]
    fn meminfo_is_read_in_kib() {
        let text = "MemTotal:       24579984 kB\nMemFree:        1 kB\n";
        assert_eq!(total_memory(text), Some(24_579_984 * 1024));
        assert_eq!(total_memory("nothing"), None);
    }

    #[test]
    fn this_machine_has_cores_and_memory() {
        let machine = Machine::detect();
        assert!(machine.cores >= 1 && machine.memory > Bytes::ZERO);
    }
}
