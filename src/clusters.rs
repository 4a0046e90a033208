//! `moefold clusters`: the cluster presets, or one cluster in full.

use moefold_profiles::Cluster;
use moefold_profiles::presets;
use moefold_reports::tables::Table;
use serde::Serialize;

use crate::cli::ClustersArgs;
use crate::failure::Failure;
use crate::output::Output;

/// One line of the list.
#[derive(Serialize)]
struct Row {
    name: String,
    gpu: String,
    gpus_per_node: u32,
    gpus_per_domain: u32,
    memory_gib: f64,
    bf16_tflops: Option<f64>,
    nvlink_gb_per_s: f64,
    nic_gb_per_s: f64,
    usd_per_gpu_hour: Option<f64>,
}

impl From<Cluster> for Row {
    fn from(cluster: Cluster) -> Self {
        Self {
            name: cluster.name,
            gpu: cluster.gpu.name,
            gpus_per_node: cluster.gpus_per_node,
            gpus_per_domain: cluster.gpus_per_domain,
            memory_gib: cluster.gpu.memory_gib,
            bf16_tflops: cluster.gpu.peak_tflops.bf16,
            nvlink_gb_per_s: cluster.gpu.nvlink_gb_per_s,
            nic_gb_per_s: cluster.nic_gb_per_s,
            usd_per_gpu_hour: cluster.usd_per_gpu_hour,
        }
    }
}

pub(crate) fn run(args: &ClustersArgs, output: Output) -> Result<(), Failure> {
    let Some(cluster) = &args.cluster else {
        let rows: Vec<Row> = presets::cluster_names()
            .into_iter()
            .map(|name| presets::cluster(name).map(Row::from))
            .collect::<Result<_, _>>()
            .map_err(Failure::runtime)?;
        return output.answer(&rows, || table(&rows));
    };
    let description = presets::describe(cluster).map_err(Failure::request)?;
    output.answer(&description, || describe(&description))
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new([
        "cluster",
        "gpu",
        ">GPUs/node",
        ">GPUs/domain",
        ">memory GiB",
        ">bf16 TFLOP/s",
        ">NVLink GB/s",
        ">NIC GB/s",
        ">USD/GPU-h",
    ]);
    let optional = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |v| v.to_string());
    for row in rows {
        table.row([
            row.name.clone(),
            row.gpu.clone(),
            row.gpus_per_node.to_string(),
            row.gpus_per_domain.to_string(),
            format!("{:.1}", row.memory_gib),
            optional(row.bf16_tflops),
            row.nvlink_gb_per_s.to_string(),
            row.nic_gb_per_s.to_string(),
            optional(row.usd_per_gpu_hour),
        ]);
    }
    table.text()
}

fn describe(description: &presets::Description) -> String {
    let cluster = &description.cluster;
    let gpu = &cluster.gpu;
    let mut table = Table::new(["key", "value"]);
    let mut line = |key: &str, value: String| table.row([key.to_owned(), value]);
    line("cluster", cluster.name.clone());
    line(
        "gpu",
        format!("{} ({}, {} SMs)", gpu.name, gpu.arch, gpu.num_sms),
    );
    let peaks = [
        ("f32", Some(gpu.peak_tflops.f32)),
        ("bf16", gpu.peak_tflops.bf16),
        ("fp8", gpu.peak_tflops.fp8),
        ("fp4", gpu.peak_tflops.fp4),
    ];
    let peaks: Vec<String> = peaks
        .iter()
        .filter_map(|(name, peak)| peak.map(|peak| format!("{name} {peak}")))
        .collect();
    line("dense peak, TFLOP/s", peaks.join(", "));
    line("memory, GiB", format!("{:.1}", gpu.memory_gib));
    line("memory bandwidth, GB/s", gpu.memory_gb_per_s.to_string());
    line("NVLink, GB/s one way", gpu.nvlink_gb_per_s.to_string());
    line(
        "host link, GB/s one way",
        gpu.host_link_gb_per_s.to_string(),
    );
    line("GPUs a node", cluster.gpus_per_node.to_string());
    line("GPUs an NVLink domain", cluster.gpus_per_domain.to_string());
    line("NIC, GB/s a GPU one way", cluster.nic_gb_per_s.to_string());
    for level in &cluster.oversubscription {
        line(
            "oversubscription",
            format!("{}:1 above {} nodes", level.ratio, level.nodes),
        );
    }
    line(
        "host memory, GiB a node",
        format!("{:.0}", cluster.host_memory_gib),
    );
    if let Some(rate) = cluster.host_memory_gb_per_s {
        line("host memory bandwidth, GB/s a node", rate.to_string());
    }
    if cluster.gpus_per_host_link > 1 {
        line("GPUs a host link", cluster.gpus_per_host_link.to_string());
    }
    if let Some(spread) = cluster.gpu_speed_spread {
        line("spread of the speeds of GPUs", spread.to_string());
    }
    if let Some(price) = cluster.usd_per_gpu_hour {
        line("price, USD a GPU-hour", price.to_string());
    }
    for measured in &description.measured {
        line("measured", measured.clone());
    }
    for source in gpu.sources.iter().chain(&cluster.sources) {
        line("source", source.clone());
    }
    table.text()
}
