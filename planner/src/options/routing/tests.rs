//! Tests of loads: by hand, and against a search over every rank of every step.

use moefold_profiles::random::SplitMix64;
use moefold_profiles::run::FullestMicrobatch;
use moefold_profiles::trace::TimeByCategory;
use moefold_profiles::units::Bytes;

use super::*;
use crate::model::presets;

fn one_busy() -> Vec<f64> {
    let mut tokens = vec![0.0; 8];
    tokens[0] = 1000.0;
    tokens
}

#[test]
fn oracle_one_busy_expert_loads_its_rank_alone() {
    let routing = Routing::new("h.json", &[one_busy()]).expect("fits");
    for (ep, load) in [(1, 1.0), (2, 2.0), (4, 4.0), (8, 8.0)] {
        let expected = Loads {
            busiest: vec![load],
            fullest: vec![load],
        };
        assert_eq!(routing.loads(ep), expected, "ep {ep}");
    }
}

#[test]
fn golden_the_busiest_differ_by_layer_and_the_fullest_is_one_rank() {
    // Rank 1 of 2 is busiest in the second layer alone, and rank 0 holds more over both.
    let layers = vec![vec![5.0, 4.0, 1.0, 2.0], vec![1.0, 4.0, 1.0, 6.0]];
    let routing = Routing::new("h.json", &layers).expect("fits");
    let expected = Loads {
        busiest: vec![1.5, 14.0 / 12.0],
        fullest: vec![1.5, 10.0 / 12.0],
    };
    assert_eq!(routing.loads(2), expected);
}

fn step(number: u64, load: Vec<Vec<u64>>, fullest: Option<FullestMicrobatch>) -> StepRecord {
    StepRecord {
        step: number,
        loss: 1.0,
        mtp_losses: Vec::new(),
        aux_loss: 0.0,
        z_loss: 0.0,
        grad_norm: 1.0,
        lr: 1e-3,
        step_s: 1.0,
        tokens_per_s: 1.0,
        peak_bytes: Bytes(1),
        expert_load: load,
        correction_bias: None,
        fullest,
        dropped: 0,
        dropped_by_layer: Vec::new(),
        validation: None,
    }
}

fn summary(warmup_steps: u64) -> RunSummary {
    RunSummary {
        version: 1,
        steps: 1,
        warmup_steps,
        step_s: 1.0,
        tokens_per_s: 1.0,
        time_s: TimeByCategory::default(),
        hidden_s: BTreeMap::new(),
        busy_s: BTreeMap::new(),
        calls: BTreeMap::new(),
        host_reads: BTreeMap::new(),
        peak_by_rank: Vec::new(),
        final_loss: 1.0,
        validation: None,
        host: None,
    }
}

/// A run directory of steps; without a summary where warm-up is not said.
fn run(steps: &[StepRecord], warmup: Option<u64>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let line = |step| serde_json::to_string(step).expect("serializes");
    let lines: Vec<String> = steps.iter().map(line).collect();
    fs::write(dir.path().join("steps.jsonl"), lines.join("\n")).expect("writes");
    if let Some(warmup) = warmup {
        let text = serde_json::to_string(&summary(warmup)).expect("serializes");
        fs::write(dir.path().join("summary.json"), text).expect("writes");
    }
    dir
}

fn read(dir: &tempfile::TempDir) -> Result<Routing, PlanError> {
    Routing::read(dir.path())
}

#[test]
fn oracle_a_run_is_read_rank_by_rank_and_step_by_step() {
    const LAYERS: usize = 3;
    const EXPERTS: usize = 12;
    const WARMUP: u64 = 2;
    // Of 3, where memory peaks.
    const RANK: usize = 2;
    let mut random = SplitMix64::new(41);
    let mut load = || -> Vec<Vec<u64>> {
        let mut list = || (0..EXPERTS).map(|_| random.below(50)).collect();
        (0..LAYERS).map(|_| list()).collect()
    };
    // Memory peaks in step 4 for the last time, on a rank of 3 that has not most rows.
    let peaked = [1, 4].map(|step| (step, load()));
    let fullest = |step: u64| {
        let (_, load) = peaked.iter().find(|(at, _)| *at == step)?;
        Some(FullestMicrobatch {
            ep: 3,
            ep_rank: RANK as u32,
            load: load.clone(),
        })
    };
    let steps: Vec<StepRecord> = (0..7).map(|i| step(i, load(), fullest(i))).collect();
    let dir = run(&steps, Some(WARMUP));
    let routing = read(&dir).expect("a run");
    for ep in [1, 2, 3, 4, 6, 12] {
        let held = EXPERTS / ep;
        let share = |list: &Vec<u64>, rank: usize| {
            let own: u64 = list[rank * held..(rank + 1) * held].iter().sum();
            (own * ep as u64) as f64 / list.iter().sum::<u64>() as f64
        };
        let found = routing.loads(ep as u32);
        for layer in 0..LAYERS {
            let busiest = |step: &StepRecord| {
                let ranks = (0..ep).map(|rank| share(&step.expert_load[layer], rank));
                ranks.fold(0.0, f64::max)
            };
            let counted = &steps[WARMUP as usize..];
            let mean = counted.iter().map(busiest).sum::<f64>() / counted.len() as f64;
            assert!(
                (found.busiest[layer] - mean).abs() < 1e-12,
                "ep {ep} layer {layer}"
            );
        }
        let of = |rank: usize| -> Vec<f64> {
            peaked[1].1.iter().map(|list| share(list, rank)).collect()
        };
        let sum = |rank: usize| of(rank).iter().sum::<f64>();
        let most = (0..ep).map(sum).fold(0.0, f64::max);
        if ep == 3 {
            assert_eq!(found.fullest, of(RANK));
            assert!(sum(RANK) < most, "the draw");
        } else {
            assert!(
                (found.fullest.iter().sum::<f64>() - most).abs() < 1e-12,
                "ep {ep}"
            );
        }
    }
    // A run that did not finish counts from its first step, and one that does not say by its last.
    let whole = vec![vec![3, 1], vec![1, 1]];
    let unfinished = run(&[step(0, whole, None)], None);
    let loads = read(&unfinished).expect("a run").loads(2);
    assert_eq!(
        (&loads.busiest, &loads.fullest),
        (&vec![1.5, 1.0], &vec![1.5, 1.0])
    );
}

#[test]
fn a_run_without_what_is_needed_is_refused() {
    let load = || vec![vec![1, 2], vec![2, 1]];
    let cases = [
        (
            run(&[step(0, load(), None)], Some(1)),
            "has 1 steps; expected more than the 1",
        ),
        (run(&[step(0, Vec::new(), None)], None), "holds no layer"),
        (
            run(
                &[step(0, load(), None), step(1, load()[..1].to_vec(), None)],
                None,
            ),
            "has 1 lists after one of 2",
        ),
        (
            run(&[step(0, vec![vec![1, 2], vec![1, 1, 1]], None)], None),
            "list 1 has 3 numbers; expected 2",
        ),
    ];
    for (dir, expected) in cases {
        let message = read(&dir).expect_err("refused").to_string();
        assert!(
            message.contains("steps.jsonl") && message.contains(expected),
            "{message}"
        );
    }
    let empty = tempfile::tempdir().expect("a temporary folder");
    let message = read(&empty).expect_err("refused").to_string();
    assert!(message.contains("steps.jsonl"), "{message}");
    fs::write(empty.path().join("steps.jsonl"), "{\"step\": 0}\n").expect("writes");
    let message = read(&empty).expect_err("refused").to_string();
    assert!(message.contains("line 1: missing field"), "{message}");
}

#[test]
fn what_is_no_histogram_of_the_model_is_refused() {
    for tokens in [vec![], vec![0.0; 8], vec![-1.0, 2.0], vec![f64::MAX; 8]] {
        assert!(
            Routing::new("h.json", std::slice::from_ref(&tokens)).is_err(),
            "{tokens:?}"
        );
    }
    assert!(Routing::new("h.json", &[]).is_err());
    let mixtral = presets::load("mixtral-8x7b").expect("a preset");
    let refused = |lists: usize, experts: usize| {
        let routing = Routing::new("h.json", &vec![vec![1.0; experts]; lists]);
        let check = routing.expect("a histogram").check(&mixtral);
        check.expect_err("of another model").to_string()
    };
    // Each token goes to two experts, of which none gets it twice.
    let mut tokens = vec![1.0; 8];
    tokens[3] = 7.0;
    let routing = |tokens: &[f64]| Routing::new("h.json", &[tokens.to_vec()]).expect("a histogram");
    assert!(routing(&tokens).check(&mixtral).is_ok());
    tokens[3] = 8.0;
    let beyond = routing(&tokens).check(&mixtral).expect_err("too many");
    for (message, expected) in [
        (beyond.to_string(), ["53.3 %", "at most 50.0"]),
        (refused(1, 7), ["7 numbers", "expected 8"]),
        (refused(3, 8), ["3 lists", "or 32"]),
    ] {
        for expected in expected {
            assert!(
                message.contains("h.json") && message.contains(expected),
                "{message}"
            );
        }
    }
    for lists in [1, 32] {
        let routing = Routing::new("h.json", &vec![vec![1.0; 8]; lists]);
        assert!(routing.expect("a histogram").check(&mixtral).is_ok());
    }
}
