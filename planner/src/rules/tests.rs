//! Every rule by itself, all together, and anything at all without a panic.

use std::ops::ControlFlow;

use proptest::prelude::*;

use super::*;
use crate::choice::{Capacity, DropPolicy, StackName};
use crate::layout::nearest::{Nearest, divisors, multiples};
use crate::layout::*;
use crate::model::{Model, presets};
use crate::options::SearchOptions;

const BATCH: Batch = Batch {
    seq_len: 4096,
    global_batch: 256,
};

fn model(name: &str) -> Model {
    presets::load(name).expect("a preset")
}

/// 56 layers, hidden 6144, 48 heads, 8 key/value heads, 8 experts of width 16384.
fn mixtral() -> Model {
    model("Mixtral-8x22B-v0.1")
}

fn degrees(gpus: u32, text: &str) -> Degrees {
    text.parse::<PartialDegrees>().expect("parses").or_one(gpus)
}

fn refused(degrees: &Degrees, model: &Model, batch: &Batch) -> Vec<&'static str> {
    let broken = Layout::new(degrees, model, batch).expect_err("is illegal");
    broken.iter().map(Illegal::reason).collect()
}

/// One rule is broken, and its message holds these words.
fn check(text: &str, gpus: u32, batch: Batch, reason: &str, words: &[&str]) {
    let broken = Layout::new(&degrees(gpus, text), &mixtral(), &batch).expect_err(text);
    assert_eq!(broken.len(), 1, "{text}: {broken:?}");
    assert_eq!(broken[0].reason(), reason);
    let message = broken[0].to_string();
    for word in words {
        assert!(message.contains(word), "`{message}` lacks `{word}`");
    }
}

#[test]
fn each_rule_has_its_message() {
    let odd = |global_batch| Batch {
        global_batch,
        ..BATCH
    };
    let long = |seq_len| Batch { seq_len, ..BATCH };
    check(
        "tp=2,cp=3",
        128,
        long(6144),
        "attention_grid",
        &["128 GPUs", "2 x 3 x 1 = 6", "126 or 132 GPUs", "4 or 8"],
    );
    check(
        "ep=8,etp=32",
        128,
        BATCH,
        "expert_grid",
        &["128 GPUs", "32 x 8 x 1 = 256", "256 GPUs", "128"],
    );
    check(
        "ep=3",
        96,
        odd(96),
        "experts_over_ep",
        &["8 experts", "ep = 2 or 4"],
    );
    check(
        "etp=3",
        96,
        odd(96),
        "expert_width_over_etp",
        &["16384", "etp = 2 or 4"],
    );
    check(
        "cp=3",
        96,
        odd(96),
        "sequence_over_cp",
        &["4096", "= 6", "cp = 2 or 4"],
    );
    check(
        "tp=8,cp=1",
        128,
        long(4100),
        "sequence_over_tp",
        &["4100", "tp = 5 or 10", "4096 or 4104"],
    );
    check(
        "tp=2",
        128,
        odd(100),
        "global_batch",
        &["100", "1 x 64 = 64", "64 or 128", "50 or 100"],
    );
    check(
        "vpp=2",
        128,
        BATCH,
        "vpp_without_pp",
        &["vpp = 2", "pp = 2"],
    );
    check(
        "tp=8,pp=4,vpp=2,mbs=8",
        128,
        odd(64 + 32),
        "vpp_microbatches",
        &["pp = 4", "has 3", "4 microbatches"],
    );
    check(
        "pp=64",
        128,
        BATCH,
        "empty_stages",
        &[
            "56 layers",
            "64 x 1 = 64",
            "58 or less",
            "`pipeline_layout`",
        ],
    );
    check("tp=0", 128, BATCH, "zero", &["tp is 0"]);
    check("", 128, odd(0), "zero", &["global batch is 0"]);
    check(
        "",
        1,
        odd(1 << 21),
        "microbatches",
        &["2097152 microbatches", "1 stages", "1048576 passes"],
    );
    check(
        "pp=4,vpp=2",
        4,
        odd(1 << 18),
        "microbatches",
        &["262144 microbatches", "8 stages"],
    );
}

#[test]
fn more_work_than_anyone_has_is_refused_before_it_is_searched() {
    let odd = |global_batch| Batch {
        global_batch,
        ..BATCH
    };
    let long = |seq_len| Batch { seq_len, ..BATCH };
    for (batch, words) in [
        (
            odd(1 << 40),
            ["global batch is 1099511627776", "at most 4194304"],
        ),
        (
            long(1 << 40),
            ["sequence length is 1099511627776", "at most 67108864"],
        ),
        (
            Batch {
                seq_len: 1 << 20,
                global_batch: 1 << 20,
            },
            ["tokens of a step is 1099511627776", "at most 17179869184"],
        ),
    ] {
        check("", 1, batch, "huge", &words);
    }
}

#[test]
fn rows_that_kernels_cannot_count_are_refused_and_with_larger_degrees_are_not() {
    // Mixtral 8x22B has 48 heads, and a token goes to 2 experts.
    let long = Batch {
        seq_len: 1 << 26,
        global_batch: 64,
    };
    let words = ["3221225472 rows of heads", "at most 2147483647"];
    check("", 64, long, "rows", &words);
    let words = ["4294967296 rows of experts", "a larger cp or tp"];
    check("tp=2,ep=8,etp=8", 64, long, "rows", &words);
    for larger in ["tp=2", "tp=4,ep=8,etp=4"] {
        let layout = Layout::new(&degrees(64, larger), &mixtral(), &long);
        assert_eq!(layout.err(), None, "{larger}");
    }
    // Each expert is padded to three times its even share.
    let mut options = SearchOptions::new(long, StackName::Megatron);
    for pad in [false, true] {
        options.capacity = Some(Capacity {
            factor: 3.0,
            drop_policy: DropPolicy::Probs,
            pad,
        });
        let layout = Rules::of(&mixtral(), &options).layout(&degrees(64, "tp=4,ep=8,etp=4"));
        let rows = Illegal::Rows {
            what: "of experts",
            rows: 3 << 30,
        };
        let is_refused = layout.is_err_and(|broken| broken.contains(&rows));
        assert_eq!(is_refused, pad, "pad {pad}");
    }
}

#[test]
fn all_violations_are_reported_together() {
    assert_eq!(
        refused(&degrees(96, "tp=5,ep=3,cp=3,vpp=3"), &mixtral(), &BATCH),
        [
            "attention_grid",
            "heads_over_tp",
            "kv_heads_over_tp",
            "hidden_over_tp",
            "experts_over_ep",
            "sequence_over_cp",
            "vpp_without_pp",
        ]
    );
    assert_eq!(
        refused(
            &degrees(8, "tp=4,ep=2,etp=2"),
            &model("Llama-3.1-8B"),
            &BATCH
        ),
        ["no_experts", "no_experts"]
    );
    assert_eq!(
        refused(&degrees(0, "tp=0,ep=0"), &mixtral(), &BATCH),
        ["zero", "zero", "zero"]
    );
}

/// Layouts that others trained with.
#[test]
fn golden_published_layouts_are_legal() {
    let check = |name: &str, gpus: u32, text: &str, batch: Batch| {
        let layout = Layout::new(&degrees(gpus, text), &model(name), &batch);
        layout.unwrap_or_else(|broken| panic!("{name} {text}: {broken:?}"))
    };
    let large = Batch {
        seq_len: 4096,
        global_batch: 8192,
    };
    // arXiv 2603.07685: DeepSeek-V3 on 256 GPUs; experts have no replica.
    let layout = check("DeepSeek-V3", 256, "pp=4,vpp=4,ep=64", large);
    assert_eq!(
        (layout.dp(), layout.edp(), layout.microbatches()),
        (64, 1, 128)
    );
    assert_eq!(layout.stages(), 16);
    // Megatron-Bridge, DeepSeek-V3 on 1024 H100.
    let layout = check("DeepSeek-V3", 1024, "tp=2,pp=8,vpp=4,ep=64", large);
    assert_eq!((layout.dp(), layout.edp()), (64, 2));
    assert!(layout.sequence_parallel());
    // arXiv 2504.14960, table 3: Mixtral 8x22B on 128 H100, folded.
    let layout = check("Mixtral-8x22B-v0.1", 128, "tp=2,pp=8,ep=8", BATCH);
    assert_eq!((layout.dp(), layout.edp()), (8, 2));
}

#[test]
fn law_key_value_heads_may_be_replicated() {
    let rules = Rules::new(&mixtral(), &BATCH);
    for tp in [1, 2, 3, 4, 6, 8, 12, 16, 24, 48] {
        let broken = rules.layout(&degrees(48, &format!("tp={tp}")));
        let refused = broken.is_err_and(|b| b.iter().any(|b| b.reason() == "kv_heads_over_tp"));
        // 8 key/value heads: split over 1 to 8 ranks, or each held by 2, 3 or 6.
        assert_eq!(refused, [3, 6, 12].contains(&tp), "tp {tp}");
    }
}

#[test]
fn law_nearest_values_are_legal_and_nothing_lies_between() {
    for whole in 1..80_u64 {
        for part in 1..100_u64 {
            if whole % part == 0 {
                continue;
            }
            let near = divisors(whole, part);
            let all: Vec<u64> = (1..=whole).filter(|d| whole % d == 0).collect();
            assert_eq!(near.below, all.iter().copied().rfind(|&d| d < part));
            assert_eq!(near.above, all.iter().copied().find(|&d| d > part));
            let near = multiples(whole, part);
            assert_eq!(near.below.unwrap_or(0), whole - whole % part);
            assert_eq!(near.above, Some(whole - whole % part + part));
        }
    }
    let none = Nearest::around(10, |_| false);
    assert_eq!((none.below, none.above), (None, None));
}

#[test]
fn law_the_space_tiles_and_holds_every_legal_power_of_two() {
    let model = model("DeepSeek-V3");
    let batch = Batch {
        seq_len: 4096,
        global_batch: 1024,
    };
    let rules = Rules::new(&model, &batch);
    let listed: std::collections::BTreeSet<Degrees> =
        space(&model, 64, &batch, &PartialDegrees::default()).collect();
    for degrees in &listed {
        if let Err(broken) = rules.layout(degrees) {
            let grid =
                |b: &Illegal| matches!(b.reason(), "attention_grid" | "expert_grid" | "zero");
            assert!(!broken.iter().any(grid), "{degrees:?}: {broken:?}");
        }
    }
    let powers = [1, 2, 4, 8, 16, 32, 64];
    let mut legal = 0;
    for tp in powers {
        for cp in powers {
            for pp in powers {
                for ep in powers {
                    for etp in powers {
                        let degrees = Degrees {
                            gpus: 64,
                            tp,
                            cp,
                            pp,
                            vpp: 1,
                            ep,
                            etp,
                            mbs: 1,
                        };
                        if rules.layout(&degrees).is_ok() {
                            legal += 1;
                            assert!(listed.contains(&degrees), "{degrees:?} is not listed");
                        }
                    }
                }
            }
        }
    }
    assert!(legal > 500, "{legal}");
}

#[test]
fn pins_narrow_the_space_and_nothing_else() {
    let (model, batch) = (mixtral(), BATCH);
    let all: Vec<Degrees> = space(&model, 32, &batch, &PartialDegrees::default()).collect();
    let pinned = |text: &str| -> Vec<Degrees> {
        space(&model, 32, &batch, &text.parse().expect("parses")).collect()
    };
    let keep = |wanted: &dyn Fn(&Degrees) -> bool| -> Vec<Degrees> {
        all.iter().filter(|d| wanted(d)).copied().collect()
    };
    assert_eq!(pinned("tp=4,ep=8"), keep(&|d| d.tp == 4 && d.ep == 8));
    // A pin is not judged, so it may list what the free search leaves out, but nothing less.
    let found = pinned("vpp=2,mbs=2");
    assert!(found.iter().all(|d| d.vpp == 2 && d.mbs == 2));
    assert!(
        keep(&|d| d.vpp == 2 && d.mbs == 2)
            .iter()
            .all(|d| found.contains(d))
    );
    assert_eq!(
        pinned("dp=4"),
        keep(&|d| d.gpus / (d.tp * d.cp * d.pp) == 4)
    );
    assert_eq!(
        pinned("edp=2"),
        keep(&|d| d.gpus / (d.etp * d.ep * d.pp) == 2)
    );
    let exact = degrees(32, "tp=2,pp=4,ep=8");
    let pins = PartialDegrees::exactly(&exact);
    assert_eq!(
        space(&model, 32, &batch, &pins).collect::<Vec<_>>(),
        [exact]
    );
    // Pins that cannot tile the ranks leave one tuple, to be refused in words.
    assert_eq!(pinned("tp=3"), [degrees(32, "tp=3")]);
    assert_eq!(pinned("tp=8,ep=3"), [degrees(32, "tp=8,ep=3")]);
    assert!(pinned("dp=3").is_empty());
}

/// What pins break by themselves is said with all else they break, and nothing that the open degrees
/// could mend.
#[test]
fn contradictions_of_pins_are_those_that_nothing_mends() {
    let reasons = |text: &str, gpus: u32, batch: Batch| -> Vec<&str> {
        let pins: PartialDegrees = text.parse().expect("parses");
        let broken = Rules::new(&mixtral(), &batch).contradictions(&pins, gpus);
        broken.iter().map(Illegal::reason).collect()
    };
    let check = |text: &str, expected: &[&str]| {
        assert_eq!(reasons(text, 32, BATCH), expected, "{text}");
    };
    check("tp=2,cp=1,dp=4", &[]);
    check("vpp=2", &[]);
    check("dp=3", &["replicas", "global_batch"]);
    check("tp=2,cp=1,pp=2,dp=4", &["replicas"]);
    check("tp=8,pp=1,vpp=2", &["vpp_without_pp"]);
    check("ep=16", &["experts_over_ep"]);
    check("mbs=7", &["global_batch"]);
    check("pp=4,vpp=15", &["empty_stages"]);
    check("ep=64,tp=0", &["zero", "expert_grid", "experts_over_ep"]);
    check(
        "tp=3,ep=16",
        &[
            "attention_grid",
            "kv_heads_over_tp",
            "experts_over_ep",
            "sequence_over_tp",
        ],
    );
    let hundred = Batch {
        global_batch: 100,
        ..BATCH
    };
    assert_eq!(reasons("tp=1", 32, hundred), [""; 0]);
    assert_eq!(reasons("dp=8", 32, hundred), ["global_batch"]);
    assert_eq!(reasons("tp=1,cp=1,pp=1", 32, hundred), ["global_batch"]);
}

/// Also of a batch that is refused, whose nearest legal degrees are asked for.
#[test]
fn oracle_microbatches_are_divisors_of_a_replicas_share() {
    let sizes = |seq_len, global_batch, pins: &str| {
        let batch = Batch {
            seq_len,
            global_batch,
        };
        let all = space(&mixtral(), 1, &batch, &pins.parse().expect("degrees"));
        all.map(|degrees| degrees.mbs).collect::<Vec<u32>>()
    };
    for share in (1..=300).chain([u64::from(u32::MAX) + 1, 1 << 62, u64::MAX]) {
        for seq_len in [1 << 9, 1 << 12, 1 << 14] {
            let most = (MAX_MICROBATCH_TOKENS / seq_len) as u32;
            let expected = (1..=most).filter(|&mbs| share.is_multiple_of(mbs.into()));
            assert_eq!(sizes(seq_len, share, ""), expected.collect::<Vec<u32>>());
        }
        if share <= 300 {
            let expected = (1..=300).filter(|&mbs| share.is_multiple_of(mbs.into()));
            let whole = sizes(1 << 12, share, "tp=1,cp=1,pp=1,ep=1,etp=1");
            assert_eq!(whole, expected.collect::<Vec<u32>>());
        }
    }
}

#[test]
fn the_nearest_legal_layout_is_close() {
    let near = |text: &str, batch: Batch| {
        let (model, pins) = (mixtral(), text.parse().expect("parses"));
        let rules = Rules::new(&model, &batch);
        nearest_legal(&rules, &model, &pins, 64, || ControlFlow::Continue(()))
    };
    let all = near("tp=3,cp=1,ep=8,etp=1,pp=2,vpp=1,mbs=1", BATCH).expect("64 ranks have layouts");
    assert_eq!((all.ep, all.pp, all.mbs), (Some(8), Some(2), Some(1)));
    assert!(matches!(all.tp, Some(2 | 4)), "{all}");
    // What is left open is left open.
    let some = near("ep=16", BATCH).expect("64 ranks have layouts");
    assert_eq!(some.to_string(), "ep=8");
    let none = Batch {
        seq_len: 4096,
        global_batch: 0,
    };
    assert!(near("tp=3", none).is_none());
    assert!(near("", BATCH).is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Anything may be written; it is a layout or a list of readable refusals.
    #[test]
    fn law_no_input_panics(
        sizes in prop::array::uniform8(prop_oneof![0..70_u32, Just(u32::MAX), any::<u32>()]),
        seq_len in prop_oneof![Just(4096), Just(u64::MAX), any::<u64>()],
        global_batch in prop_oneof![0..5000_u64, Just(u64::MAX), any::<u64>()],
    ) {
        let [gpus, tp, cp, pp, vpp, ep, etp, mbs] = sizes;
        let degrees = Degrees { gpus, tp, cp, pp, vpp, ep, etp, mbs };
        let batch = Batch { seq_len, global_batch };
        match Layout::new(&degrees, &mixtral(), &batch) {
            Ok(layout) => {
                prop_assert_eq!(layout.dp() * tp * cp * pp, gpus);
                let samples = u64::from(layout.dp()) * u64::from(mbs);
                prop_assert_eq!(samples * u64::from(layout.microbatches()), global_batch);
            }
            Err(broken) => {
                prop_assert!(!broken.is_empty());
                for rule in broken {
                    prop_assert!(!rule.to_string().is_empty());
                }
            }
        }
        let pins = PartialDegrees::exactly(&degrees);
        prop_assert!(space(&mixtral(), gpus, &batch, &pins).count() <= 1);
        Rules::new(&mixtral(), &batch).contradictions(&pins, gpus);
    }

    /// What pins break by themselves, every tuple that agrees with them breaks; and where all are
    /// pinned, that is everything.
    #[test]
    fn law_a_contradiction_leaves_nothing_legal(
        gpus in prop_oneof![Just(8), Just(12), Just(16), Just(24)],
        pins in prop::array::uniform9(prop::option::weighted(0.4, 1..9_u32)),
        global_batch in 1..50_u64,
    ) {
        let [tp, cp, pp, vpp, ep, etp, mbs, dp, edp] = pins;
        let pins = PartialDegrees { tp, cp, pp, vpp, ep, etp, mbs, dp, edp };
        let batch = Batch { seq_len: 4096, global_batch };
        let rules = Rules::new(&mixtral(), &batch);
        let broken = rules.contradictions(&pins, gpus);
        if broken.is_empty() {
            if let Some(degrees) = pins.complete(gpus) {
                prop_assert!(rules.layout(&degrees).is_ok());
            }
        } else {
            let legal = space(&mixtral(), gpus, &batch, &pins)
                .filter_map(|degrees| rules.layout(&degrees).ok())
                .find(|layout| dp.is_none_or(|dp| dp == layout.dp()) && edp.is_none_or(|edp| edp == layout.edp()));
            prop_assert!(legal.is_none(), "{pins}: {broken:?}, but {legal:?}");
        }
    }
}
