//! Tests of presets and cluster files: what is read, what is refused.

use super::*;

fn file(text: &str) -> Result<Cluster, ClusterError> {
    read::cluster_file("my.toml", "my", text)
}

/// The message of a refusal must contain all of `parts`.
fn check_refused(text: &str, parts: &[&str]) {
    let error = file(text).expect_err("this file is refused").to_string();
    for part in parts {
        assert!(error.contains(part), "`{error}` does not say `{part}`");
    }
}

const SMALL: &str =
    "version = 1\ngpu = \"h100\"\ngpus_per_node = 8\nnic_gb_per_s = 50.0\nhost_memory_gib = 1024\n";

#[test]
fn golden_presets_of_the_issue_are_there() {
    for name in [
        "a100", "a800", "h100", "h800", "h200", "h20", "b200", "b300", "gb200", "gb300", "mi300x",
        "mi355x",
    ] {
        let gpu = gpu(name).expect("a preset");
        assert!(!gpu.sources.is_empty(), "{name} names no source");
        assert!(gpu.peak_tflops.bf16.is_some());
    }
    for name in cluster_names() {
        let cluster = cluster(name).expect("a preset");
        assert_eq!(cluster.name, name);
        assert!(!cluster.sources.is_empty(), "{name} names no source");
    }
}

#[test]
fn sources_are_spelled_out() {
    for name in cluster_names() {
        let cluster = cluster(name).expect("a preset");
        for source in cluster.sources.iter().chain(&cluster.gpu.sources) {
            assert!(
                source.contains(['.', '/', ',', ' ']),
                "{name}: `{source}` says little"
            );
        }
    }
    let h100 = gpu("h100").expect("a preset").sources;
    assert!(h100[0].starts_with("ai-dynamo/aiconfigurator@"), "{h100:?}");
    assert!(
        h100.iter()
            .any(|source| source.starts_with("memory as CUDA reports it: "))
    );
}

#[test]
fn golden_figures() {
    let h100 = cluster("DGX-H100").expect("names ignore case");
    assert_eq!(h100.gpu.peak_tflops.bf16, Some(989.0));
    assert_eq!(h100.gpu.memory_gb_per_s, 3350.0);
    assert_eq!(h100.nic_gb_per_s, 50.0);
    assert_eq!(h100.usd_per_gpu_hour, Some(2.95));
    let rack = cluster("gb200-nvl72").expect("a preset");
    assert_eq!((rack.gpus_per_node, rack.gpus_per_domain), (4, 72));
    let p5 = cluster("aws-p5").expect("a preset");
    assert_eq!(p5.usd_per_gpu_hour, Some(6.88));
    assert_eq!(
        gpu("mi300x").expect("a preset").mesh_link_gb_per_s,
        Some(64.0)
    );
}

#[test]
fn an_unknown_preset_names_the_nearest() {
    let error = cluster("dgx-h10").expect_err("unknown").to_string();
    assert!(error.contains("`dgx-h100`"), "{error}");
    let error = gpu("H101").expect_err("unknown").to_string();
    assert!(error.contains("`h100`"), "{error}");
}

#[test]
fn a_short_file_is_enough() {
    let cluster = file(SMALL).expect("valid");
    assert_eq!(cluster.name, "my");
    assert_eq!(cluster.gpus_per_domain, 8);
    assert_eq!(cluster.usd_per_gpu_hour, Some(2.95));
    let based = file("version = 1\nbase = \"dgx-h100\"\nnum_gpus = 64\n[gpu]\nbase = \"h100\"\nmemory_gb_per_s = 3000\n")
        .expect("valid");
    assert_eq!(based.gpu.memory_gb_per_s, 3000.0);
    assert_eq!(based.gpu.num_sms, 132);
    assert_eq!(based.num_gpus, Some(64));
}

#[test]
fn refusals_name_file_key_and_what_would_work() {
    check_refused("gpu = \"h100\"", &["my.toml", "version", "version = 1"]);
    check_refused("version = 2", &["`version` is `2`"]);
    check_refused("version = 1\ngpu = 3", &["`gpu`"]);
    check_refused("version = 1\ngpu = \"h1000\"", &["h100"]);
    check_refused(
        &format!("{SMALL}nic_gbps = 3"),
        &["`nic_gbps`", "`nic_gb_per_s`"],
    );
    check_refused(
        &SMALL.replace("50.0", "400"),
        &["nic_gb_per_s", "400 Gb/s NIC is 50"],
    );
    check_refused(&SMALL.replace("50.0", "-1"), &["nic_gb_per_s", "-1"]);
    check_refused(&SMALL.replace("50.0", "nan"), &["nic_gb_per_s", "NaN"]);
    check_refused(
        &SMALL.replace("50.0", "1e-300"),
        &["nic_gb_per_s", "0 for none, or from 0.001"],
    );
    check_refused(
        &SMALL.replace("= 8", "= 0"),
        &["gpus_per_node", "at least 1"],
    );
    check_refused(&SMALL.replace("= 8", "= \"8\""), &["gpus_per_node"]);
    check_refused(
        &format!("{SMALL}gpus_per_domain = 12"),
        &["multiple or a divisor"],
    );
    check_refused(
        &format!("{SMALL}gpus_per_host_link = 16"),
        &["gpus_per_host_link", "at most gpus_per_node = 8"],
    );
    check_refused(
        &format!("{SMALL}num_gpus = 12"),
        &["num_gpus", "whole nodes"],
    );
    check_refused(&SMALL.replace("50.0", "0"), &["nic_gb_per_s", "above 0"]);
    check_refused("version = 1\ngpu = [", &["not valid TOML"]);
    check_refused(
        &format!("{SMALL}oversubscription = [{{ nodes = 4, ratio = 0.5 }}]"),
        &["oversubscription[0].ratio", "0.5"],
    );
}

#[test]
fn a_device_whose_memory_contradicts_its_name_is_refused() {
    let with =
        |gpu: &str| format!("version = 1\nbase = \"dgx-b200\"\n[gpu]\nbase = \"b200\"\n{gpu}\n");
    check_refused(
        &with("memory_gib = 80"),
        &["gpu.memory_gib", "178.35", "b200"],
    );
    check_refused(&with("memory_gib = 192"), &["gpu.memory_gib"]);
    assert!(
        file(&with("memory_gib = 170")).is_ok(),
        "a reserve is not a contradiction"
    );
    assert!(file(&with("memory_gib = 80\nname = \"b200-slice\"")).is_ok());
    // Nor another architecture, or another preset's name, by which its tables would be taken.
    check_refused(&with("arch = \"sm_90\""), &["gpu.arch", "sm_100", "b200"]);
    check_refused(&with("name = \"b300\""), &["gpu.name", "b300", "\"b200\""]);
    let other = "name = \"mine\"\narch = \"sm_999\"";
    check_refused(&with(other), &["gpu.arch", "sm_999", "sm_90, sm_100"]);
}

#[test]
fn a_description_says_what_was_measured() {
    let described = describe("dgx-h100").expect("a preset");
    assert!(
        described
            .measured
            .iter()
            .any(|line| line.contains("bf16 matrix products"))
    );
    assert!(describe("mi355x").expect("a preset").measured.is_empty());
    let error = describe("no/such.toml").expect_err("no file").to_string();
    assert!(error.contains("no/such.toml"), "{error}");
    let json = serde_json::to_value(&described).expect("serializes");
    assert_eq!(json["cluster"]["gpu"]["name"], "h100");
}

#[test]
fn golden_names_that_vendors_give() {
    for (vendor, name) in [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-sxm4-40gb"),
        ("NVIDIA H200 NVL", "nvidia-h200-nvl"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GH200 480GB", "nvidia-gh200-480gb"),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090"),
    ] {
        assert_eq!(gpu_name(vendor), name, "{vendor}");
    }
}
