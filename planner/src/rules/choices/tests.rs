//! Every rule that options bring, by itself and together with those of degrees.

use super::super::Rules;
use super::*;
use crate::layout::{Batch, PartialDegrees};
use crate::model::presets;
use crate::options::Flags;

const BATCH: Batch = Batch {
    seq_len: 4096,
    global_batch: 256,
};

/// Flags as they are typed, `--overlap none --stack moefold`.
fn options(words: &str) -> SearchOptions {
    let mut flags = Flags::default();
    let words: Vec<&str> = words.split_whitespace().collect();
    for pair in words.chunks(2) {
        let value = Some(pair[1].to_owned());
        match pair[0] {
            "--overlap" => flags.overlap = value,
            "--stack" => flags.stack = value,
            "--precision" => flags.precision = value,
            "--recompute" => flags.recompute = value,
            "--dispatcher" => flags.dispatcher = value,
            "--pipeline-layout" => flags.pipeline_layout = value,
            "--zero" => flags.zero = value,
            other => panic!("{other}"),
        }
    }
    SearchOptions::parse(BATCH, &flags).expect("known words")
}

fn broken(model: &str, degrees: &str, words: &str) -> Vec<Illegal> {
    let model = presets::load(model).expect("a preset");
    let pins: PartialDegrees = degrees.parse().expect("degrees");
    let rules = Rules::of(&model, &options(words));
    rules.layout(&pins.or_one(128)).err().unwrap_or_default()
}

/// One rule is broken, and its message holds these words.
fn check(degrees: &str, words: &str, reason: &str, expected: &[&str]) {
    let broken = broken("mixtral-8x22b", degrees, words);
    assert_eq!(broken.len(), 1, "{degrees} {words}: {broken:?}");
    assert_eq!(broken[0].reason(), reason);
    let message = broken[0].to_string();
    for expected in expected {
        assert!(message.contains(expected), "`{message}` lacks `{expected}`");
    }
}

/// Rules of choices that this release prices.
#[test]
fn each_rule_of_a_choice_has_its_message() {
    check(
        "cp=2",
        "--stack moefold",
        "stack_cp",
        &["moefold", "cp up to 1, not 2", "cp = 1"],
    );
    check(
        "pp=8",
        "--stack moefold",
        "stack_pp",
        &["pp up to 1, not 8"],
    );
    check(
        "",
        "--stack moefold --precision fp8",
        "stack_precision",
        &["--precision fp8", "it runs fp32, bf16"],
    );
    check(
        "",
        "--stack moefold --dispatcher deepep",
        "stack_dispatcher",
        &["deepep", "it has alltoall"],
    );
    check(
        "",
        "--stack moefold --recompute full",
        "stack_recompute",
        &["--recompute none"],
    );
    check(
        "",
        "--recompute mla_up_proj,shared_experts,moe_act",
        "recompute_absent",
        &[
            "mla_up_proj, shared_experts",
            "core_attn, layernorm, moe_act, moe",
        ],
    );
    check(
        "",
        "--precision fp8-delayed --recompute moe_act",
        "moe_act_under_delayed_fp8",
        &["moe_act", "--precision fp8,"],
    );
    check(
        "",
        "--overlap param-gather",
        "param_gather_alone",
        &["grad-reduce,param-gather"],
    );
    check(
        "pp=2,vpp=7",
        "--overlap none",
        "vpp_pair_without_p2p",
        &["vpp = 7", "pp = 2", "vpp = 1"],
    );
    check(
        "pp=8,vpp=7",
        "--pipeline-layout E(tt|)*27ttL",
        "pipeline_layout",
        &[
            "layout are 28",
            "8 x 7 = 56",
            "pp = 7 and vpp = 4, or pp = 14 and vpp = 2",
        ],
    );
    check(
        "",
        "--pipeline-layout Et*57L",
        "pipeline_layout_layers",
        &["57 decoder layers", "has 56"],
    );
    check(
        "",
        "--pipeline-layout Et*56mL",
        "pipeline_layout_depths",
        &["1 MTP", "has 0", "no m"],
    );
    check(
        "",
        "--zero fsdp",
        "not_supported_yet",
        &["--zero fsdp", "supports 1"],
    );
}

#[test]
fn choices_that_go_together_break_nothing() {
    for (degrees, words) in [
        ("pp=2,vpp=7", "--overlap p2p"),
        ("pp=2", "--overlap none"),
        ("pp=8,vpp=7", "--overlap none"),
        ("", "--precision fp8 --recompute moe_act"),
        ("", "--precision fp8-delayed --recompute full"),
        ("", "--precision fp8-delayed --recompute moe,layernorm"),
        ("", "--overlap grad-reduce,param-gather"),
        ("pp=4,vpp=7", "--pipeline-layout E(tt|)*27ttL"),
        ("tp=8", "--stack moefold"),
        ("tp=8", "--stack moefold --precision bf16"),
    ] {
        let broken = broken("mixtral-8x22b", degrees, words);
        assert!(broken.is_empty(), "{degrees} {words}: {broken:?}");
    }
    for stages in ["Et*61mL", "Et*61L"] {
        let broken = broken("deepseek-v3", "", &format!("--pipeline-layout {stages}"));
        assert!(broken.is_empty(), "{stages}: {broken:?}");
    }
}

/// Overlap that is not priced is refused, and held to its rules all the same.
#[test]
fn rules_of_overlap_that_comes_later_are_said_with_it() {
    let reasons = |degrees: &str, words: &str| -> Vec<String> {
        let broken = broken("mixtral-8x22b", degrees, words);
        let rest: Vec<String> = broken
            .iter()
            .filter(|rule| rule.reason() != "not_supported_yet")
            .map(ToString::to_string)
            .collect();
        assert!(rest.len() < broken.len(), "{words} is not priced");
        rest
    };
    let check = |degrees, words, expected: &[&str]| {
        let found = reasons(degrees, words);
        assert_eq!(found.len(), expected.len(), "{words}: {found:?}");
        for (found, expected) in found.iter().zip(expected) {
            assert!(found.contains(expected), "{words}: {found}");
        }
    };
    check("ep=8", "--overlap expert-alltoall", &[]);
    check("ep=8,pp=8,vpp=7", "--overlap expert-alltoall", &[]);
    check("", "--overlap expert-alltoall", &["ep = 1 never sends"]);
    check(
        "ep=8,pp=8",
        "--overlap expert-alltoall",
        &["pp = 8 needs virtual stages"],
    );
    check("", "--overlap tp", &["tp = 1 never sends"]);
    check("tp=2", "--overlap tp", &[]);
    for (words, other) in [
        (
            "--overlap expert-alltoall --dispatcher allgather",
            "--dispatcher allgather",
        ),
        (
            "--overlap expert-alltoall --recompute full",
            "--recompute full",
        ),
        (
            "--overlap expert-alltoall --recompute moe",
            "--recompute moe",
        ),
        ("--overlap expert-alltoall,shared-expert", "shared-expert"),
        (
            "--overlap shared-expert --dispatcher allgather",
            "--dispatcher allgather",
        ),
    ] {
        check("ep=8", words, &[&format!("excludes {other}")]);
    }
    check("ep=8", "--overlap expert-alltoall --recompute moe_act", &[]);
    let deepseek = broken(
        "deepseek-v3",
        "ep=8",
        "--overlap shared-expert --recompute shared_experts",
    );
    let deepseek: Vec<&str> = deepseek.iter().map(Illegal::reason).collect();
    assert_eq!(deepseek, ["not_supported_yet", "overlap_excludes"]);
    let mut model = presets::load("deepseek-v3").expect("a preset");
    model.mtp.extend(model.mtp.clone());
    let rules = Rules::of(&model, &options("--overlap expert-alltoall"));
    let pins: PartialDegrees = "ep=8".parse().expect("degrees");
    let found = rules.layout(&pins.or_one(128)).expect_err("two depths");
    let found: Vec<&str> = found.iter().map(Illegal::reason).collect();
    assert_eq!(found, ["not_supported_yet", "expert_overlap_mtp"]);
}

#[test]
fn rules_of_degrees_and_of_choices_are_reported_together() {
    let broken = broken(
        "mixtral-8x22b",
        "tp=5,ep=3,pp=2,vpp=2",
        "--stack moefold --precision fp8-delayed --recompute moe_act --zero partial",
    );
    let reasons: Vec<&str> = broken.iter().map(Illegal::reason).collect();
    assert_eq!(
        reasons,
        [
            "attention_grid",
            "expert_grid",
            "heads_over_tp",
            "kv_heads_over_tp",
            "hidden_over_tp",
            "experts_over_ep",
            "sequence_over_tp",
            "stack_pp",
            "vpp_pair_without_p2p",
            "not_supported_yet",
            "stack_precision",
            "stack_recompute",
            "moe_act_under_delayed_fp8",
        ]
    );
}
