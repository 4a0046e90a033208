//! The host's half of `moefold doctor`: processor, memory, compiler.

use std::fs;
use std::path::Path;
use std::process::Command;

use moefold_executor::device::DeviceSpec;
use moefold_executor::environment::Environment;
use moefold_profiles::units::KIB;
use serde::Serialize;

/// The machine without its GPUs. What the system does not say is left out.
#[derive(Debug, Serialize)]
pub(super) struct Host {
    pub(super) system: String,
    pub(super) processor: Option<String>,
    /// Cores this process may use.
    pub(super) cores: u32,
    /// Vector instructions that CPU ops can use.
    pub(super) features: Vec<&'static str>,
    /// Memory this process may use.
    pub(super) memory_bytes: u64,
    /// Memory that is free, or can be freed at once.
    pub(super) memory_available_bytes: Option<u64>,
    /// Reserved huge pages.
    pub(super) huge_pages: Option<u64>,
    /// Whether the kernel makes huge pages by itself: `always`, `madvise` or `never`.
    pub(super) transparent_huge_pages: Option<String>,
    pub(super) locked_memory: Option<LockedMemory>,
    /// The C++ compiler, which only tests of CUDA kernels on the CPU need.
    pub(super) compiler: Option<String>,
}

/// How much memory this process may lock; network cards lock what they read and write.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LockedMemory {
    Unlimited,
    UpToBytes(u64),
}

impl Host {
    pub(super) fn detect() -> Self {
        let environment = Environment::detect(1, &DeviceSpec::CPU);
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let available = available();
        Self {
            system: environment.system,
            processor: environment.processor,
            cores: environment.cores,
            features: environment.features,
            memory_bytes: environment.memory_bytes,
            memory_available_bytes: available,
            huge_pages: field(&read("/proc/meminfo"), "HugePages_Total:"),
            transparent_huge_pages: chosen(&read("/sys/kernel/mm/transparent_hugepage/enabled")),
            locked_memory: locked_memory(&read("/proc/self/limits")),
            compiler: compiler(),
        }
    }
}

/// Bytes of memory that are free, or can be freed at once: of the machine, of the control groups that this process is
/// in, and of its own limits.
pub(super) fn available() -> Option<u64> {
    let memory = fs::read_to_string("/proc/meminfo").ok()?;
    let machine = field(&memory, "MemAvailable:").map(|kib| kib * KIB)?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let left = left_by_groups(Path::new("/sys/fs/cgroup"), &groups);
    let read = |name: &str| fs::read_to_string(format!("/proc/self/{name}")).unwrap_or_default();
    let own = left_by_limits(&read("limits"), &read("status"));
    left.into_iter().chain(own).chain([machine]).min()
}

/// What the limits of this process leave of its address space and its data (setrlimit(2)). Given are
/// `/proc/self/limits` and `/proc/self/status`.
fn left_by_limits(limits: &str, status: &str) -> Option<u64> {
    let left = [
        ("Max address space", "VmSize:"),
        ("Max data size", "VmData:"),
    ]
    .into_iter()
    .filter_map(|(limit, used)| {
        let limit = soft_limit(limits, limit)?.parse::<u64>().ok()?;
        let used = field(status, used).map_or(0, |kib| kib * KIB);
        Some(limit.saturating_sub(used))
    });
    left.min()
}

/// What control groups leave of their limits, the least of this process's and of those around it (cgroups(7)). What
/// files of them are cached and not in use can be freed. `groups` is `/proc/self/cgroup`.
fn left_by_groups(root: &Path, groups: &str) -> Option<u64> {
    let left = groups.lines().flat_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next().unwrap_or(""), parts.next().unwrap_or(""));
        let (base, names) = match controllers {
            "" => (root.to_owned(), ["max", "current", "inactive_file"]),
            list if list.split(',').any(|name| name == "memory") => (
                root.join("memory"),
                ["limit_in_bytes", "usage_in_bytes", "total_inactive_file"],
            ),
            _ => return Vec::new(),
        };
        let own = base.join(path.trim_start_matches('/'));
        let around = own.ancestors().take_while(|group| group.starts_with(&base));
        around
            .filter_map(|group| left_by_group(group, names))
            .collect()
    });
    left.min()
}

fn left_by_group(group: &Path, [limit, used, cached]: [&str; 3]) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(group.join(format!("memory.{name}"))).ok();
    let number = |name| read(name)?.trim().parse::<u64>().ok();
    let cached = read("stat").and_then(|stat| field(&stat, &format!("{cached} ")));
    let used = number(used)?.saturating_sub(cached.unwrap_or(0));
    Some(number(limit)?.saturating_sub(used))
}

/// The number after a name at the start of a line of `/proc/meminfo`.
fn field(memory: &str, name: &str) -> Option<u64> {
    let rest = memory.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// The choice that the kernel marks: `always [madvise] never`.
fn chosen(choices: &str) -> Option<String> {
    let (_, rest) = choices.split_once('[')?;
    let (chosen, _) = rest.split_once(']')?;
    Some(chosen.to_owned())
}

/// The soft limit of a resource in `/proc/self/limits`: bytes, or `unlimited`.
fn soft_limit<'a>(limits: &'a str, name: &str) -> Option<&'a str> {
    let rest = limits.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()
}

fn locked_memory(limits: &str) -> Option<LockedMemory> {
    match soft_limit(limits, "Max locked memory")? {
        "unlimited" => Some(LockedMemory::Unlimited),
        bytes => Some(LockedMemory::UpToBytes(bytes.parse().ok()?)),
    }
}

/// What `CXX`, else `c++`, says it is.
fn compiler() -> Option<String> {
    let command = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let output = Command::new(command).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let first = text.lines().next()?.trim();
    (output.status.success() && !first.is_empty()).then(|| first.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_the_least_that_any_control_group_leaves_counts() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().expect("below the root")).expect("writable");
            fs::write(path, text).expect("writable");
        };
        let left = |groups: &str| left_by_groups(root.path(), groups);
        assert_eq!(left("0::/job/task\n"), None);
        write("job/memory.max", "1000\n");
        write("job/memory.current", "700\n");
        write(
            "job/memory.stat",
            "anon 300\ninactive_file 150\nactive_file 250\n",
        );
        write("job/task/memory.max", "max\n");
        write("job/task/memory.current", "600\n");
        assert_eq!(left("0::/job/task\n"), Some(450));
        write("job/task/memory.max", "650\n");
        assert_eq!(left("0::/job/task\n"), Some(50));
        // The first version, with a tree for each controller.
        write("memory/job/memory.limit_in_bytes", "500\n");
        write("memory/job/memory.usage_in_bytes", "490\n");
        write(
            "memory/job/memory.stat",
            "inactive_file 1\ntotal_inactive_file 20\n",
        );
        assert_eq!(left("5:cpu,memory:/job\n4:pids:/job\n"), Some(30));
    }

    #[test]
    fn golden_the_limits_of_a_process_count_what_it_has_taken() {
        let status = "VmSize:\t     600 kB\nVmData:\t     100 kB\n";
        let limits = |data: &str, all: &str| {
            format!(
                "Max data size  {data}  unlimited  bytes\nMax address space  {all}  unlimited  bytes\n"
            )
        };
        let left = |data, all| left_by_limits(&limits(data, all), status);
        assert_eq!(left("unlimited", "unlimited"), None);
        assert_eq!(left("unlimited", "1048576"), Some(424 << 10));
        assert_eq!(left("204800", "1048576"), Some(100 << 10));
        assert_eq!(left("unlimited", "1024"), Some(0));
    }

    #[test]
    fn what_the_kernel_says_is_read() {
        let memory = "MemTotal:  100 kB\nMemAvailable:   42 kB\nHugePages_Total:       3\n";
        assert_eq!(field(memory, "MemAvailable:"), Some(42));
        assert_eq!(field(memory, "HugePages_Total:"), Some(3));
        assert_eq!(field(memory, "HugePages_Free:"), None);
        assert_eq!(
            chosen("always [madvise] never\n").as_deref(),
            Some("madvise")
        );
        assert_eq!(chosen(""), None);
        let limits = |value: &str| format!("Max locked memory   {value}   8388608   bytes\n");
        let some = LockedMemory::UpToBytes(65536);
        assert_eq!(locked_memory(&limits("65536")), Some(some));
        let all = LockedMemory::Unlimited;
        assert_eq!(locked_memory(&limits("unlimited")), Some(all));
    }
}
