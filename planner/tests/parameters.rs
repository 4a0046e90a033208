//! Parameter counts of every preset against sums over real module trees.
//!
//! `fixtures/parameters.csv` is written by `tests/oracles/count_parameters.py`, which builds each
//! model with transformers 5.23 on the meta device and adds up its tensors. What the vendors
//! announce is compared besides, in billions.

use moefold_planner::model::count::{Params, params};
use moefold_planner::model::presets;

fn counts(name: &str) -> Params {
    params(&presets::load(name).expect(name))
}

#[test]
fn oracle_counts_equal_the_sums_of_real_module_trees() {
    let table = include_str!("fixtures/parameters.csv");
    let mut checked = Vec::new();
    for line in table.lines().skip(1) {
        let mut cells = line.split(',');
        let name = cells.next().expect("a name");
        let expected: Vec<u64> = cells.map(|cell| cell.parse().expect(line)).collect();
        let found = counts(name);
        let found = vec![
            found.total(),
            found.active(),
            found.active_without_embedding(),
            found.active_body(),
            found.mtp(),
        ];
        assert_eq!(found, expected, "{name}");
        checked.push(name);
    }
    checked.sort_unstable();
    let mut all: Vec<&str> = presets::names().collect();
    all.sort_unstable();
    assert_eq!(
        checked, all,
        "a preset without a row, or a row without a preset"
    );
}

/// Totals that model cards announce, in billions, and how far ours may be: 1% unless the
/// announcement is a round number.
#[test]
fn golden_totals_agree_with_what_vendors_announce() {
    let table: &[(&str, f64, f64)] = &[
        ("DeepSeek-V2", 236.0, 1.0),
        ("DeepSeek-V2-Lite", 15.7, 1.0),
        ("DeepSeek-V3", 671.0, 0.01),
        ("DeepSeek-V3.2", 671.0, 1.0),
        ("DeepSeek-V4-Flash", 284.0, 1.0),
        ("DeepSeek-V4-Pro", 1600.0, 1.7),
        ("GLM-4.5", 355.0, 1.0),
        ("GLM-4.5-Air", 106.0, 1.0),
        ("GLM-5", 744.0, 0.02),
        ("Kimi-K2-Instruct", 1000.0, 2.7),
        ("Ling-1T", 1000.0, 0.05),
        ("Ling-mini-2.0", 16.26, 0.05),
        ("Llama-3.1-405B", 405.9, 0.02),
        ("Llama-3.1-70B", 70.6, 0.1),
        ("Llama-3.1-8B", 8.03, 0.01),
        ("Llama-4-Maverick-17B-128E", 400.0, 0.2),
        // The announced 109 has 0.87 of vision tower and projector.
        ("Llama-4-Scout-17B-16E", 109.0 - 0.87, 1.0),
        ("MiniMax-M2", 230.0, 1.0),
        ("MiniMax-Text-01", 456.0, 0.03),
        ("Mixtral-8x22B-v0.1", 141.0, 1.0),
        ("Mixtral-8x7B-v0.1", 46.7, 0.02),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6, 0.1),
        ("OLMoE-1B-7B-0924", 6.9, 0.5),
        ("Phi-3.5-MoE-instruct", 41.9, 0.1),
        ("Qwen1.5-MoE-A2.7B", 14.3, 0.2),
        ("Qwen2-57B-A14B", 57.4, 0.05),
        ("Qwen3-235B-A22B", 235.0, 0.05),
        ("Qwen3-30B-A3B", 30.5, 0.2),
        ("Qwen3-32B", 32.8, 0.2),
        ("Qwen3-8B", 8.2, 0.2),
        ("Qwen3-Coder-480B-A35B-Instruct", 480.0, 0.05),
        ("Qwen3-Next-80B-A3B-Instruct", 80.0, 0.5),
        ("dbrx-base", 132.0, 0.4),
        ("gpt-oss-120b", 116.8, 0.03),
        ("gpt-oss-20b", 20.9, 0.1),
        ("granite-3.1-1b-a400m-instruct", 1.3, 2.7),
        ("granite-3.1-3b-a800m-instruct", 3.3, 0.1),
    ];
    for (name, billions, percent) in table {
        let total = counts(name).total() as f64 / 1e9;
        let off = (total / billions - 1.0).abs() * 100.0;
        assert!(
            off <= *percent,
            "{name}: {total:.3} B, announced {billions} B"
        );
    }
}

/// Active counts that vendors announce, each in the convention it turns out to use.
#[test]
fn golden_active_counts_agree_with_what_vendors_announce() {
    let check = |name: &str, count: fn(&Params) -> u64, billions: f64| {
        let found = count(&counts(name)) as f64 / 1e9;
        let unit = if billions.fract() == 0.0 { 1.0 } else { 0.1 };
        assert!(
            (found - billions).abs() < unit,
            "{name}: {found:.2}, announced {billions}"
        );
    };
    let no_embedding = Params::active_without_embedding;
    check("DeepSeek-V3", no_embedding, 37.0);
    check("DeepSeek-V2", no_embedding, 21.0);
    check("gpt-oss-120b", no_embedding, 5.1);
    check("gpt-oss-20b", no_embedding, 3.6);
    check("DeepSeek-V4-Flash", no_embedding, 13.0);
    check("MiniMax-Text-01", Params::active_body, 45.9);
    check("MiniMax-M2", Params::active_body, 10.0);
    check("GLM-4.5", Params::active_body, 32.0);
    check("Mixtral-8x7B-v0.1", Params::active, 12.9);
    check("Qwen3-235B-A22B", Params::active, 22.0);
    check("Qwen3-30B-A3B", Params::active, 3.3);
    check("OLMoE-1B-7B-0924", Params::active, 1.3);
    check("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", Params::active, 3.6);
    check("Ling-1T", Params::active, 51.0);
}

/// The division by sharding of DeepSeek-V3, whose parts its technical report's memory accounts use
/// (arXiv 2603.07685, table 3: 187.11 M of attention, 44.04 M an expert).
#[test]
fn golden_parts_of_a_deepseek_v3_layer() {
    let count = counts("DeepSeek-V3");
    let dense = count.layers[0];
    let sparse = count.layers[60];
    assert_eq!(sparse.mixer + sparse.mixer_replicated, 187_107_328);
    assert_eq!(sparse.shared, 44_040_192);
    assert_eq!(sparse.experts, 256 * 44_040_192);
    assert_eq!(sparse.experts_active, 8 * 44_040_192);
    assert_eq!(sparse.router, 256 * 7168);
    assert_eq!(sparse.norms, 2 * 7168);
    assert_eq!(dense.dense, 3 * 7168 * 18432);
    assert_eq!(dense.experts + dense.shared + dense.router, 0);
    assert_eq!(count.embedding, 129_280 * 7168);
    assert_eq!(count.head, count.embedding);
}

#[test]
fn law_parts_add_up_to_the_whole() {
    for name in presets::names() {
        let count = counts(name);
        let parts: u64 = count
            .layers
            .iter()
            .map(|layer| layer.sharded() + layer.replicated() + layer.experts)
            .sum();
        let whole = parts + count.embedding + count.head + count.last_norm;
        assert_eq!(whole, count.total(), "{name}");
        assert!(count.active() <= count.total(), "{name}");
        assert!(
            count.active_body() < count.active_without_embedding(),
            "{name}"
        );
    }
}
