//! Named GPUs and clusters, cluster files, and the `local` cluster.
//!
//! Presets are two TOML files in `data/`, embedded; a user's cluster file goes through the same
//! reader (see [`load_cluster`] for its keys). Everything here is description: no price is computed.

mod fields;
mod local;
mod read;

use std::path::Path;
use std::sync::LazyLock;

use serde::Serialize;

pub use fields::ClusterError;
pub use local::{Machine, local_on};

use crate::cluster::{Cluster, Gpu};
use crate::nearest::nearest;

/// A preset: name, what it describes, and the USD per hour of one GPU.
struct Named<T> {
    name: String,
    value: T,
}

/// A GPU and its usual price.
#[derive(Clone)]
struct PricedGpu {
    gpu: Gpu,
    usd_per_gpu_hour: Option<f64>,
}

static GPUS: LazyLock<Vec<Named<PricedGpu>>> = LazyLock::new(|| {
    read::gpus(include_str!("../data/gpus.toml")).expect("the embedded GPU presets are valid")
});

static CLUSTERS: LazyLock<Vec<Named<Cluster>>> = LazyLock::new(|| {
    read::clusters(include_str!("../data/clusters.toml"))
        .expect("the embedded cluster presets are valid")
});

/// Names of the GPU presets, in the order of the data file.
pub fn gpu_names() -> Vec<&'static str> {
    GPUS.iter().map(|named| named.name.as_str()).collect()
}

/// Names of the cluster presets, `local` last.
pub fn cluster_names() -> Vec<&'static str> {
    let names = CLUSTERS.iter().map(|named| named.name.as_str());
    names.chain(["local"]).collect()
}

/// A GPU preset by name, in any case.
pub fn gpu(name: &str) -> Result<Gpu, ClusterError> {
    find_gpu(name).map(|found| found.gpu.clone())
}

/// A cluster preset by name, in any case. `local` has as many ranks as cores, but at least four;
/// [`local()`] gives it another number.
pub fn cluster(name: &str) -> Result<Cluster, ClusterError> {
    if name.eq_ignore_ascii_case("local") {
        let machine = Machine::detect();
        return Ok(local_on(machine, machine.cores.max(4)));
    }
    let found = CLUSTERS
        .iter()
        .find(|named| named.name.eq_ignore_ascii_case(name));
    found
        .map(|named| named.value.clone())
        .ok_or_else(|| unknown("cluster", name, &cluster_names()))
}

/// The cluster of `ranks` threads on this machine. See [`local_on`].
pub fn local(ranks: u32) -> Cluster {
    local_on(Machine::detect(), ranks)
}

/// Reads a cluster file.
///
/// ```toml
/// version = 1
/// name = "my-cluster"            # the file's stem by default
/// base = "dgx-h100"              # optional: start from a preset and override
/// gpu = "h100"                   # a preset, or a table with the keys of the GPU presets:
/// # [gpu]
/// # base = "h100"
/// # memory_gb_per_s = 3000.0
/// gpus_per_node = 8
/// gpus_per_domain = 8            # a node by default; 72 in an NVL72 rack
/// nic_gb_per_s = 50.0            # one GPU's share, one direction; a 400 Gb/s NIC is 50
/// oversubscription = [{ nodes = 32, ratio = 2.0 }]
/// host_memory_gib = 2048.0
/// usd_per_gpu_hour = 2.5
/// num_gpus = 1024
/// ```
pub fn load_cluster(path: &Path) -> Result<Cluster, ClusterError> {
    let text = std::fs::read_to_string(path).map_err(|source| ClusterError::Unreadable {
        path: path.to_owned(),
        source,
    })?;
    let stem = path
        .file_stem()
        .map_or_else(String::new, |stem| stem.to_string_lossy().into());
    read::cluster_file(&path.display().to_string(), &stem, &text)
}

/// A cluster by preset name, or from a file where the text is a path to one.
pub fn resolve(name_or_path: impl AsRef<Path>) -> Result<Cluster, ClusterError> {
    let path = name_or_path.as_ref();
    let looks_like_file = path
        .extension()
        .is_some_and(|ext| ext.eq_ignore_ascii_case("toml"));
    match path.to_str() {
        Some(name) if !looks_like_file && !path.is_file() => cluster(name),
        _ => load_cluster(path),
    }
}

/// What `moefold clusters NAME` shows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Description {
    /// The resolved cluster.
    pub cluster: Cluster,
    /// What the shipped tables measured on this GPU, in words, one line a table.
    pub measured: Vec<String>,
}

/// Describes a preset or a cluster file.
pub fn describe(name_or_path: impl AsRef<Path>) -> Result<Description, ClusterError> {
    let cluster = resolve(name_or_path)?;
    let measured = crate::table::summary(&cluster.gpu.name.to_lowercase());
    Ok(Description { cluster, measured })
}

/// The name that presets and profiles have for what its vendor calls `vendor_name`: `h200` for
/// "NVIDIA H200". A GPU that no preset describes keeps its own name, in lower case and with dashes.
pub fn gpu_name(vendor_name: &str) -> String {
    let lower = vendor_name.to_lowercase();
    let words: Vec<&str> = lower
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty())
        .collect();
    let has = |word: &str| words.contains(&word);
    let plain = gpu_names().into_iter().find(|name| has(name));
    // Cards that share a name with a preset and are another thing: other memory, other links.
    let other = has("nvl") || has("40gb") || has("64gb") || has("96gb");
    match plain.filter(|_| !other) {
        Some(name) if has("pcie") => {
            let pcie = format!("{name}-pcie");
            if gpu_names().contains(&pcie.as_str()) {
                pcie
            } else {
                words.join("-")
            }
        }
        Some(name) => name.to_owned(),
        None => words.join("-"),
    }
}

fn find_gpu(name: &str) -> Result<&'static PricedGpu, ClusterError> {
    let found = GPUS
        .iter()
        .find(|named| named.name.eq_ignore_ascii_case(name));
    found
        .map(|named| &named.value)
        .ok_or_else(|| unknown("GPU", name, &gpu_names()))
}

fn unknown(kind: &'static str, name: &str, known: &[&str]) -> ClusterError {
    ClusterError::UnknownPreset {
        kind,
        name: name.to_owned(),
        nearest: nearest(name, known.iter().copied())
            .unwrap_or("none")
            .to_owned(),
        known: known.join(", "),
    }
}

#[cfg(test)]
mod tests;
