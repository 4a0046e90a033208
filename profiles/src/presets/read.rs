//! From TOML to [`Gpu`] and [`Cluster`]: one reader for the embedded presets and for users' files,
//! so that what a search relies on was validated the same way wherever it came from.

use super::fields::{ClusterError, Fields};
use super::{Named, PricedGpu, find_gpu};
use crate::cluster::{Cluster, Gpu, NetworkLevel, PeakTflops};

/// The version of the cluster file this reads.
const VERSION: i64 = 1;

/// A device that calls itself by a preset's name may differ from it in memory by this much: more is
/// another device (a table for it would be wrong) or a slip. An 80 GB B200 in a published planner's
/// device file made it refuse layouts that fit.
const MEMORY_LEAST: f64 = 0.5;
const MEMORY_MOST: f64 = 1.02;

/// The architectures that are known: a slip in the name of one would change prices without a word.
const ARCHES: [&str; 13] = [
    "cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "gfx90a",
    "gfx942", "gfx950", "gfx1250",
];

/// The embedded GPU presets.
pub(super) fn gpus(text: &str) -> Result<Vec<Named<PricedGpu>>, ClusterError> {
    let mut all = presets("gpus.toml", text, |name, fields| {
        gpu(fields, name, None, None)
    })?;
    for named in &mut all {
        spell_out(&mut named.value.gpu.sources);
    }
    Ok(all)
}

/// The embedded cluster presets.
pub(super) fn clusters(text: &str) -> Result<Vec<Named<Cluster>>, ClusterError> {
    let mut all = presets("clusters.toml", text, |name, fields| cluster(fields, name))?;
    for named in &mut all {
        spell_out(&mut named.value.sources);
    }
    Ok(all)
}

/// Replaces the short name that a source is, or ends in after a colon, by what it stands for.
fn spell_out(sources: &mut [String]) {
    let known: toml::Table = toml::from_str(include_str!("../../data/sources.toml"))
        .expect("the embedded sources are valid");
    for source in sources {
        let (what, name) = source
            .rsplit_once(": ")
            .map_or(("", source.as_str()), |(what, name)| (what, name));
        if let Some(full) = known.get(name).and_then(toml::Value::as_str) {
            let colon = if what.is_empty() { "" } else { ": " };
            *source = format!("{what}{colon}{full}");
        }
    }
}

fn presets<T>(
    origin: &str,
    text: &str,
    read: impl Fn(&str, Fields) -> Result<T, ClusterError>,
) -> Result<Vec<Named<T>>, ClusterError> {
    // A table is sorted by name once parsed; the file's order is the one to show.
    let names = text
        .lines()
        .filter_map(|line| line.strip_prefix('[')?.strip_suffix(']'));
    let table: toml::Table = toml::from_str(text).map_err(|error| ClusterError::Syntax {
        origin: origin.to_owned(),
        message: error.to_string(),
    })?;
    let mut all = Vec::new();
    for name in names {
        let toml::Value::Table(entry) = table[name].clone() else {
            unreachable!("a header names a table");
        };
        let value = read(name, Fields::new(origin, name, entry))?;
        all.push(Named {
            name: name.to_owned(),
            value,
        });
    }
    Ok(all)
}

/// A user's cluster file.
pub(super) fn cluster_file(origin: &str, stem: &str, text: &str) -> Result<Cluster, ClusterError> {
    let mut fields = Fields::parse(origin, text)?;
    match fields.take("version") {
        Some(toml::Value::Integer(VERSION)) => {}
        Some(other) => {
            return Err(fields.invalid(
                "version",
                format!("`{other}`"),
                &format!("{VERSION}, the version this program reads"),
            ));
        }
        None => return Err(fields.missing("version", &format!("write `version = {VERSION}`"))),
    }
    let name = fields.string("name")?.unwrap_or_else(|| stem.to_owned());
    cluster(fields, &name)
}

/// One cluster, with every key optional that a `base` preset can supply.
fn cluster(mut fields: Fields, name: &str) -> Result<Cluster, ClusterError> {
    let base = match fields.string("base")? {
        Some(base) => Some(super::cluster(&base).map_err(|error| fields.of_key("base", error))?),
        None => None,
    };
    let own_gpu = named_or_table(&mut fields)?;
    let (gpu, gpu_price) = match (own_gpu, &base) {
        (Some(priced), _) => (priced.gpu, priced.usd_per_gpu_hour),
        (None, Some(base)) => (base.gpu.clone(), base.usd_per_gpu_hour),
        (None, None) => {
            return Err(fields.missing("gpu", "a preset name such as \"h100\", or a [gpu] table"));
        }
    };
    let base = base.as_ref();
    let gpus_per_node = fields
        .count("gpus_per_node", "GPUs that share a host")?
        .or(base.map(|base| base.gpus_per_node))
        .ok_or_else(|| fields.missing("gpus_per_node", "how many GPUs share a host, such as 8"))?;
    let gpus_per_domain = fields
        .count("gpus_per_domain", "GPUs that share an NVLink domain")?
        .or(base.map(|base| base.gpus_per_domain))
        .unwrap_or(gpus_per_node);
    let num_gpus = fields
        .count("num_gpus", "GPUs there are")?
        .or(base.and_then(|base| base.num_gpus));
    // Up to 250 GB/s: 400 in this key is a 400 Gb/s NIC written in the wrong unit.
    let nic_unit = "GB/s of one GPU in one direction (a 400 Gb/s NIC is 50)";
    let nic_gb_per_s = fields
        .rate_or_none("nic_gb_per_s", 250.0, nic_unit)?
        .or(base.map(|base| base.nic_gb_per_s))
        .ok_or_else(|| fields.missing("nic_gb_per_s", nic_unit))?;
    let host_memory_gib = fields
        .number("host_memory_gib", 1.0, 65536.0, "GiB of one node")?
        .or(base.map(|base| base.host_memory_gib))
        .ok_or_else(|| fields.missing("host_memory_gib", "GiB of one node, such as 2048"))?;
    let (host_memory_gb_per_s, gpus_per_host_link) = way_to_host(&mut fields, base, gpus_per_node)?;
    let spread = "a standard deviation over the mean, such as 0.01";
    let gpu_speed_spread = fields
        .number("gpu_speed_spread", 0.0, 0.3, spread)?
        .or(base.and_then(|base| base.gpu_speed_spread));
    let usd_per_gpu_hour = fields
        .number("usd_per_gpu_hour", 0.01, 1000.0, "USD for one GPU-hour")?
        .or(gpu_price);
    let oversubscription = levels(&mut fields)?
        .or(base.map(|base| base.oversubscription.clone()))
        .unwrap_or_default();
    let sources = fields
        .strings("sources")?
        .or(base.map(|base| base.sources.clone()))
        .unwrap_or_default();

    if gpus_per_domain % gpus_per_node != 0 && gpus_per_node % gpus_per_domain != 0 {
        return Err(fields.invalid(
            "gpus_per_domain",
            gpus_per_domain,
            &format!("a multiple or a divisor of gpus_per_node = {gpus_per_node}"),
        ));
    }
    if let Some(num_gpus) = num_gpus
        && num_gpus > gpus_per_node
        && num_gpus % gpus_per_node != 0
    {
        return Err(fields.invalid(
            "num_gpus",
            num_gpus,
            &format!("whole nodes: a multiple of gpus_per_node = {gpus_per_node}"),
        ));
    }
    let alone = num_gpus.is_some_and(|num_gpus| num_gpus <= gpus_per_domain.max(gpus_per_node));
    if nic_gb_per_s == 0.0 && !alone {
        return Err(fields.invalid(
            "nic_gb_per_s",
            0,
            "above 0 where the cluster is larger than one NVLink domain (or set num_gpus)",
        ));
    }
    fields.finish()?;
    Ok(Cluster {
        name: name.to_owned(),
        gpu,
        gpus_per_node,
        gpus_per_domain,
        nic_gb_per_s,
        oversubscription,
        host_memory_gib,
        host_memory_gb_per_s,
        gpus_per_host_link,
        gpu_speed_spread,
        usd_per_gpu_hour,
        num_gpus,
        sources,
    })
}

/// What the GPUs of a node share on their way to its host: what its memory gives, and how many are behind one link.
fn way_to_host(
    fields: &mut Fields,
    base: Option<&Cluster>,
    gpus_per_node: u32,
) -> Result<(Option<f64>, u32), ClusterError> {
    let memory_gb_per_s = fields
        .number("host_memory_gb_per_s", 1.0, 100_000.0, "GB/s of one node")?
        .or(base.and_then(|base| base.host_memory_gb_per_s));
    let gpus_per_link = fields
        .count("gpus_per_host_link", "GPUs behind one link to the host")?
        .or(base.map(|base| base.gpus_per_host_link.min(gpus_per_node)))
        .unwrap_or(1);
    if gpus_per_link > gpus_per_node {
        return Err(fields.invalid(
            "gpus_per_host_link",
            gpus_per_link,
            &format!("at most gpus_per_node = {gpus_per_node}"),
        ));
    }
    Ok((memory_gb_per_s, gpus_per_link))
}

/// `gpu = "name"`, or a `[gpu]` table that may start from a preset.
fn named_or_table(fields: &mut Fields) -> Result<Option<PricedGpu>, ClusterError> {
    match fields.take("gpu") {
        None => Ok(None),
        Some(toml::Value::String(name)) => find_gpu(&name)
            .cloned()
            .map(Some)
            .map_err(|error| fields.of_key("gpu", error)),
        Some(table @ toml::Value::Table(_)) => {
            fields.put_back("gpu", table);
            let mut own = fields.table("gpu")?.expect("the table was just put back");
            let base = match own.string("base")? {
                Some(base) => Some(
                    find_gpu(&base)
                        .map_err(|error| own.of_key("base", error))?
                        .clone(),
                ),
                None => None,
            };
            let name = match (own.string("name")?, &base) {
                (Some(name), _) => name,
                (None, Some(base)) => base.gpu.name.clone(),
                (None, None) => {
                    return Err(own.missing("name", "a name, or `base` with the name of a preset"));
                }
            };
            let known = find_gpu(&name).ok().map(|known| &known.gpu);
            gpu(own, &name, base, known).map(Some)
        }
        Some(other) => Err(fields.invalid("gpu", format!("`{other}`"), "a preset name or a table")),
    }
}

/// One GPU, with every key optional that `base` supplies. Measured tables go by the name, so `known`, the preset of that name,
/// is to be the same device.
fn gpu(
    mut fields: Fields,
    name: &str,
    base: Option<PricedGpu>,
    known: Option<&Gpu>,
) -> Result<PricedGpu, ClusterError> {
    let price = base.as_ref().and_then(|base| base.usd_per_gpu_hour);
    let base = base.map(|base| base.gpu);
    let base = base.as_ref();
    let need = |fields: &Fields, key: &'static str, value: Option<f64>, hint: &str| {
        value.ok_or_else(|| fields.missing(key, hint))
    };
    let arch = fields
        .string("arch")?
        .or(base.map(|base| base.arch.clone()))
        .ok_or_else(|| fields.missing("arch", "the architecture, such as \"sm_90\""))?;
    if !ARCHES.contains(&arch.as_str()) {
        let expected = format!("one of {}", ARCHES.join(", "));
        return Err(fields.invalid("arch", format!("{arch:?}"), &expected));
    }
    let num_sms = fields
        .count("num_sms", "streaming multiprocessors")?
        .or(base.map(|base| base.num_sms))
        .ok_or_else(|| fields.missing("num_sms", "streaming multiprocessors, such as 132"))?;
    let peak_tflops = peaks(&mut fields, base)?;
    let sustained_share = fields
        .number(
            "sustained_share",
            0.05,
            1.0,
            "the share of the peaks that products keep up in training",
        )?
        .or(base.and_then(|base| base.sustained_share));
    let unit = "GiB a program can allocate";
    let memory_gib = fields
        .number("memory_gib", 0.1, 4096.0, unit)?
        .or(base.map(|base| base.memory_gib));
    let memory_gib = need(&fields, "memory_gib", memory_gib, unit)?;
    let unit = "GB/s of memory bandwidth";
    let memory_gb_per_s = fields
        .number("memory_gb_per_s", 0.1, 100_000.0, unit)?
        .or(base.map(|base| base.memory_gb_per_s));
    let memory_gb_per_s = need(&fields, "memory_gb_per_s", memory_gb_per_s, unit)?;
    let unit = "GB/s to the other GPUs of the domain in one direction, 0 without NVLink";
    let nvlink_gb_per_s = fields
        .rate_or_none("nvlink_gb_per_s", 10_000.0, unit)?
        .or(base.map(|base| base.nvlink_gb_per_s));
    let nvlink_gb_per_s = need(&fields, "nvlink_gb_per_s", nvlink_gb_per_s, unit)?;
    let mesh_link_gb_per_s = fields
        .number(
            "mesh_link_gb_per_s",
            0.1,
            10_000.0,
            "GB/s of one link of a full mesh",
        )?
        .or(base.and_then(|base| base.mesh_link_gb_per_s));
    let unit = "GB/s to the host in one direction";
    let host_link_gb_per_s = fields
        .number("host_link_gb_per_s", 0.1, 10_000.0, unit)?
        .or(base.map(|base| base.host_link_gb_per_s));
    let host_link_gb_per_s = need(&fields, "host_link_gb_per_s", host_link_gb_per_s, unit)?;
    let usd_per_gpu_hour = fields
        .number("usd_per_gpu_hour", 0.01, 1000.0, "USD for one GPU-hour")?
        .or(price);
    let sources = fields
        .strings("sources")?
        .or(base.map(|base| base.sources.clone()))
        .unwrap_or_default();

    if mesh_link_gb_per_s.is_some_and(|link| link > nvlink_gb_per_s) {
        return Err(fields.invalid(
            "mesh_link_gb_per_s",
            mesh_link_gb_per_s.unwrap_or_default(),
            &format!("at most nvlink_gb_per_s = {nvlink_gb_per_s}, the sum over all links"),
        ));
    }
    if let Some(known) = known {
        same_device(&fields, base, known, (&arch, memory_gib))?;
    }
    fields.finish()?;
    Ok(PricedGpu {
        gpu: Gpu {
            name: name.to_owned(),
            arch,
            num_sms,
            peak_tflops,
            sustained_share,
            memory_gib,
            memory_gb_per_s,
            nvlink_gb_per_s,
            mesh_link_gb_per_s,
            host_link_gb_per_s,
            sources,
        },
        usd_per_gpu_hour,
    })
}

/// Refuses another device than the preset of its name.
fn same_device(
    fields: &Fields,
    base: Option<&Gpu>,
    known: &Gpu,
    (arch, memory_gib): (&str, f64),
) -> Result<(), ClusterError> {
    let own = "give another device a `name` of its own";
    if let Some(base) = base.filter(|base| base.name != known.name) {
        let expected = format!(
            "{:?}, the name of its base, or one that no preset has",
            base.name
        );
        return Err(fields.invalid("name", format!("{:?}", known.name), &expected));
    }
    let ratio = memory_gib / known.memory_gib;
    if !(MEMORY_LEAST..=MEMORY_MOST).contains(&ratio) {
        let expected = format!(
            "about {} as the {} has; {own}",
            known.memory_gib, known.name
        );
        return Err(fields.invalid("memory_gib", memory_gib, &expected));
    }
    if arch != known.arch {
        let expected = format!("{:?} as the {} has; {own}", known.arch, known.name);
        return Err(fields.invalid("arch", format!("{arch:?}"), &expected));
    }
    Ok(())
}

fn peaks(fields: &mut Fields, base: Option<&Gpu>) -> Result<PeakTflops, ClusterError> {
    let base = base.map(|base| base.peak_tflops);
    let Some(mut own) = fields.table("peak_tflops")? else {
        return base.ok_or_else(|| {
            fields.missing(
                "peak_tflops",
                "dense peaks, such as { f32 = 67.0, bf16 = 989.0 }",
            )
        });
    };
    let unit = "dense TFLOP/s";
    let base = base.unwrap_or_default();
    let mut read =
        |key, base: Option<f64>| Ok::<_, ClusterError>(own.number(key, 0.001, 1e6, unit)?.or(base));
    let f32 = read("f32", Some(base.f32).filter(|&peak| peak > 0.0))?;
    let bf16 = read("bf16", base.bf16)?;
    let fp8 = read("fp8", base.fp8)?;
    let fp4 = read("fp4", base.fp4)?;
    let f32 = f32.ok_or_else(|| own.missing("f32", "dense f32 TFLOP/s"))?;
    own.finish()?;
    Ok(PeakTflops {
        f32,
        bf16,
        fp8,
        fp4,
    })
}

fn levels(fields: &mut Fields) -> Result<Option<Vec<NetworkLevel>>, ClusterError> {
    let Some(tables) = fields.tables("oversubscription")? else {
        return Ok(None);
    };
    let mut all: Vec<NetworkLevel> = Vec::new();
    for mut level in tables {
        let nodes = level
            .count("nodes", "nodes below one switch")?
            .ok_or_else(|| level.missing("nodes", "nodes below one switch of this level"))?;
        let unit = "bandwidth below over bandwidth above";
        let ratio = level
            .number("ratio", 1.0, 1000.0, unit)?
            .ok_or_else(|| level.missing("ratio", unit))?;
        if all.last().is_some_and(|inner| inner.nodes >= nodes) {
            return Err(level.invalid(
                "nodes",
                nodes,
                "more nodes than the level before: levels are listed innermost first",
            ));
        }
        level.finish()?;
        all.push(NetworkLevel { nodes, ratio });
    }
    Ok(Some(all))
}
