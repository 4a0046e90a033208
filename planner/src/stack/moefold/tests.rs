//! Tests of what the executor's memory is declared to be; whether it is so is for the executor's.

use moefold_profiles::units::Bytes;
use moefold_profiles::{Precision, TensorClass as Class, presets as clusters};

use super::{Device, Site};
use crate::local::Local;
use crate::model::{Ffn, Mixer, presets};
use crate::saved::SavedTensor;

/// A rank of a group of `tp`, experts over `ep` and `etp`.
fn local(tp: u64, ep: u64, etp: u64) -> Local {
    Local {
        tokens: 512,
        tokens_local: 512 / tp,
        seq_len: 256,
        mbs: 2,
        tp,
        cp: 1,
        ep,
        etp,
        expert_rows: 4096 / tp,
        received_rows: 4096 / tp / etp,
        row_blocks: if ep * etp > 1 { 4 * ep * etp } else { 0 },
        experts_local: 4,
    }
}

const DEVICES: [Device; 2] = [
    Device::Cpu,
    Device::Cuda {
        wgmma: true,
        shared_per_block: 227 << 10,
    },
];

#[test]
fn law_a_layer_of_any_model_keeps_what_it_lists_and_gives_it_back() {
    for name in presets::names() {
        let model = presets::load(name).expect("a preset");
        for local in [local(1, 1, 1), local(2, 4, 1), local(2, 2, 2)] {
            for device in DEVICES {
                let site = Site::new(&model, &local, Precision::Bf16, device);
                for layer in model.layers.iter().take(8) {
                    let passes = site.layer(layer);
                    let listed: Bytes = site.saved(layer).iter().map(SavedTensor::bytes).sum();
                    assert_eq!(passes.saved.total(), listed.0 as i64, "{name}");
                    assert!(passes.forward.total() >= passes.saved.total(), "{name}");
                }
                let ends = site.embedding().then(site.head());
                let listed: Bytes = site.kept_by_head().iter().map(SavedTensor::bytes).sum();
                assert_eq!(ends.saved.total(), listed.0 as i64, "{name}");
            }
        }
    }
}

/// By hand: one dense layer of Qwen3 on one rank of a CPU.
#[test]
fn golden_a_dense_layer_peaks_where_its_gradients_meet() {
    let model = presets::load("qwen3-30b-a3b").expect("a preset");
    let mut layer = model.layers[0].clone();
    let (Some(Mixer::Gqa(gqa)), Some(Ffn::Moe(moe))) = (&layer.mixer, &layer.ffn) else {
        panic!("a decoder of experts");
    };
    let (h, t, f): (i64, i64, u64) = (2048, 512, 1000);
    assert_eq!((gqa.heads, gqa.kv_heads, gqa.head_dim), (32, 4, 128));
    let mut mlp = moe.expert.clone();
    mlp.width = f;
    layer.ffn = Some(Ffn::Dense(mlp));
    let local = local(1, 1, 1);
    let passes = Site::new(&model, &local, Precision::Fp32, Device::Cpu).layer(&layer);
    let (q, kv) = (4096, 512);
    // Input, its norm's output and statistic; queries and keys before and after their norm, with a
    // statistic for each head; values; output and log-sum-exp.
    let attention = 2 * h + 1 + 2 * (q + kv) + 36 + kv + q + 32;
    let mlp = 2 * h + 1 + 3 * f as i64;
    assert_eq!(passes.saved.total(), 4 * t * (attention + mlp));
    // Forward ends with everything saved.
    assert_eq!(passes.forward, passes.saved);
    // The MLP has let go of what it saved, and the gradients of queries, keys and values meet that of the
    // core's output, which is a product's and so transient. The MLP's own, two widths, take less.
    let core = 2 * q + 2 * kv - mlp;
    assert!(core > 2 * f as i64);
    assert_eq!(passes.backward.total(), 4 * t * core);
    assert_eq!(passes.backward.get(Class::Transient), 4 * t * q);
}

#[test]
fn a_cluster_says_what_runs_its_ops() {
    let of = |name: &str| Device::of(&clusters::cluster(name).expect("a preset").gpu);
    assert_eq!(of("dgx-h100"), Device::cuda(90));
    assert_eq!(of("dgx-a100"), Device::cuda(80));
    assert_ne!(of("dgx-a100"), of("dgx-h100"));
    assert_eq!(Device::of(&clusters::local(2).gpu), Device::Cpu);
}
