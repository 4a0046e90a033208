//! The `local` cluster: this machine's cores as ranks.
//!
//! What it can do is assumed, not measured, until a profile of the machine says better: the two
//! rates below are at the low end of server cores of the last ten years, so that a plan made from
//! them promises too little rather than too much.

use crate::cluster::{Cluster, Gpu, PeakTflops};
use crate::units::{Bytes, GIB};

/// f32 rate assumed of one core, TFLOP/s: AVX2 at 2.5 GHz has a peak of 80 GFLOP/s, half of it kept.
const CORE_TFLOPS: f64 = 0.040;
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
        Self { cores, memory }
    }
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
    Cluster {
        name: "local".to_owned(),
        gpu: Gpu {
            name: "cpu".to_owned(),
            arch: "cpu".to_owned(),
            num_sms: (cores / ranks).max(1),
            peak_tflops: PeakTflops {
                f32: CORE_TFLOPS * owned,
                ..PeakTflops::default()
            },
            memory_gib: memory_gib * USABLE_MEMORY / f64::from(ranks),
            memory_gb_per_s: rate,
            // A message is a copy: read once and written once.
            nvlink_gb_per_s: rate / 2.0,
            mesh_link_gb_per_s: None,
            host_link_gb_per_s: rate / 2.0,
            sources: vec![
                "assumed: 40 GFLOP/s and 8 GB/s a core; `moefold profile` measures".to_owned(),
            ],
        },
        gpus_per_node: ranks,
        gpus_per_domain: ranks,
        nic_gb_per_s: 0.0,
        oversubscription: Vec::new(),
        host_memory_gib: memory_gib,
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
    };

    #[test]
    fn law_ranks_share_the_machine() {
        for ranks in 1..=64 {
            let cluster = local_on(MACHINE, ranks);
            let total = |each: f64| each * f64::from(ranks);
            assert!(total(cluster.gpu.peak_tflops.f32) <= 2.0 * CORE_TFLOPS + 1e-12);
            assert!(total(cluster.gpu.memory_gib) <= 20.0);
            assert!(cluster.gpu.memory_gb_per_s > 0.0 && cluster.gpu.num_sms >= 1);
            assert_eq!(cluster.num_gpus, Some(ranks));
        }
    }

    #[test]
    fn golden_four_ranks_on_two_cores_own_half_a_core_each() {
        let gpu = local_on(MACHINE, 4).gpu;
        assert_eq!(gpu.peak_tflops.f32, CORE_TFLOPS / 2.0);
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
