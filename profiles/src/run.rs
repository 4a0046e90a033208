//! What a training run leaves behind: [`StepRecord`], one line of `steps.jsonl`, and [`RunSummary`],
//! the file `summary.json`.
//!
//! The executor writes these, `compare` reads them, and neither imports the other. A figure that is
//! not a number (a diverged loss) is `null` in the file and NaN in memory. The plan that ran
//! (`plan.json`), the machine (`env.json`) and the timeline (`trace.json`) lie beside them in the run
//! directory and have their own types.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::memory::{ByClass, TensorClass};
use crate::trace::{Category, TimeByCategory};
use crate::units::Bytes;

/// Version of the format of `summary.json`.
pub const RUN_VERSION: u32 = 1;

/// One optimizer step; one line of `steps.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepRecord {
    /// Step, from 0.
    pub step: u64,
    /// Mean token cross entropy of the global batch, nats.
    #[serde(with = "null_is_nan")]
    pub loss: f64,
    /// Mean token cross entropy of each depth of multi-token prediction, not multiplied by its weight, nats.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mtp_losses: Vec<f64>,
    /// Load-balancing losses, already multiplied by their coefficients; 0 without one.
    #[serde(default, with = "null_is_nan")]
    pub aux_loss: f64,
    /// Router z-loss, already multiplied by its coefficient; 0 without one.
    #[serde(default, with = "null_is_nan")]
    pub z_loss: f64,
    /// Global L2 norm of the gradients before clipping.
    #[serde(with = "null_is_nan")]
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Wall seconds of the step, of the slowest rank.
    pub step_s: f64,
    /// Tokens a second over all ranks.
    pub tokens_per_s: f64,
    /// Peak bytes of the worst rank so far.
    pub peak_bytes: Bytes,
    /// Tokens sent to each expert in the step, all ranks together: [MoE layers, experts].
    #[serde(default)]
    pub expert_load: Vec<Vec<u64>>,
    /// The least and the greatest correction bias of the routers after the step; absent where they have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correction_bias: Option<[f64; 2]>,
    /// The microbatch in which the worst rank came to `peak_bytes`; absent in a step that did not raise it,
    /// and where something else did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fullest: Option<FullestMicrobatch>,
    /// Token-expert assignments dropped for capacity; 0 when dropless.
    #[serde(default)]
    pub dropped: u64,
    /// The same by MoE layer; empty when dropless.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dropped_by_layer: Vec<u64>,
    /// How the model did on the validation data after the step; absent where it was not asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<Evaluation>,
}

/// How a model does on data that it is not trained on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluation {
    /// Mean token cross entropy, nats.
    #[serde(with = "null_is_nan")]
    pub loss: f64,
    /// e to the power of the loss.
    #[serde(with = "null_is_nan")]
    pub perplexity: f64,
    /// Samples it is over.
    pub samples: u64,
    /// Wall seconds that it took beside the step.
    pub eval_s: f64,
}

/// How tokens were routed where memory peaked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FullestMicrobatch {
    /// Expert ranks there are.
    pub ep: u32,
    /// The one that the worst rank is.
    pub ep_rank: u32,
    /// Tokens sent to each expert in the microbatch, by the ranks that exchange tokens with the worst one:
    /// [MoE layers, experts].
    pub load: Vec<Vec<u64>>,
}

impl StepRecord {
    /// The records of a file `steps.jsonl`, in order; a line that is none, or not of the step after that of the
    /// line before it, or of a time below zero or more tokens than any step has, ends as an error with its number, from 1, and what is wrong. The first
    /// is of any step, as a run may go on where another ended.
    pub fn lines(text: &str) -> impl Iterator<Item = Result<Self, (usize, String)>> {
        let lines = text.lines().enumerate();
        let some = lines.filter(|(_, line)| !line.trim().is_empty());
        let mut before = None;
        some.map(move |(i, line)| {
            // The parser counts lines from the one it was given.
            let record: Self =
                serde_json::from_str(line).map_err(|error| (i + 1, without_position(&error)))?;
            let expected = before
                .replace(record.step)
                .map(|step: u64| step.checked_add(1));
            match expected {
                Some(expected) if expected != Some(record.step) => {
                    let expected =
                        expected.map_or("none".to_owned(), |step| format!("step {step}"));
                    let wrong = format!(
                        "found step {}, expected {expected}: every step has one line, in order",
                        record.step
                    );
                    Err((i + 1, wrong))
                }
                _ => match record.check() {
                    Ok(()) => Ok(record),
                    Err(wrong) => Err((i + 1, wrong)),
                },
            }
        })
    }

    /// Refuses times below zero, and counts that no step has.
    fn check(&self) -> Result<(), String> {
        at_least_zero(self.step_s, self.tokens_per_s)?;
        let fullest = self.fullest.iter().flat_map(|fullest| &fullest.load);
        let loads = |of: &[Vec<u64>]| of.iter().flatten().copied().collect::<Vec<u64>>();
        for (key, counts) in [
            ("expert_load", loads(&self.expert_load)),
            ("fullest.load", fullest.flatten().copied().collect()),
            ("dropped", vec![self.dropped]),
            ("dropped_by_layer", self.dropped_by_layer.clone()),
        ] {
            at_most(key, counts, MOST_ASSIGNMENTS)?;
        }
        Ok(())
    }
}

/// Assignments of tokens to experts that a step has at most, over all its layers: thirty times those of 2^26 tokens in a
/// hundred layers of 20 experts each. Sums over millions of steps are numbers too.
const MOST_ASSIGNMENTS: u64 = 1 << 42;
/// Bytes that all ranks of a run have at most.
const MOST_BYTES: u64 = 1 << 62;

/// Refuses times and rates that are below zero.
fn at_least_zero(step_s: f64, tokens_per_s: f64) -> Result<(), String> {
    for (key, found) in [("step_s", step_s), ("tokens_per_s", tokens_per_s)] {
        if found < 0.0 {
            return Err(format!("found `{key}` {found}, expected at least 0"));
        }
    }
    Ok(())
}

/// Refuses numbers that come to more.
fn at_most(key: &str, numbers: impl IntoIterator<Item = u64>, most: u64) -> Result<(), String> {
    let add = |all: u64, number| all.checked_add(number);
    match numbers.into_iter().try_fold(0, add) {
        Some(all) if all <= most => Ok(()),
        _ => Err(format!("found `{key}` that come to more than {most}")),
    }
}

fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(at) => text[..at].to_owned(),
        None => text,
    }
}

/// What a run measured, without its first steps; the file `summary.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunSummary {
    /// Format version, [`RUN_VERSION`].
    pub version: u32,
    /// Steps that ran.
    pub steps: u64,
    /// Leading steps left out of every figure below (caches and allocators warm up in them).
    pub warmup_steps: u64,
    /// Median wall seconds of a step.
    pub step_s: f64,
    /// Tokens a second over all ranks, at the median step.
    pub tokens_per_s: f64,
    /// Exposed seconds of a step by category; sums to `step_s` up to rounding.
    pub time_s: TimeByCategory,
    /// Seconds a step in which a device did a collective while it also computed, by the category of the
    /// collective: no part of `time_s`. Empty where nothing overlaps. Over NCCL it counts from when the
    /// device would begin, with waiting for a late peer; of rank threads on one GPU from when all are there.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hidden_s: BTreeMap<Category, f64>,
    /// Busy seconds a step by op or collective stem, hidden ones included, of the rank that `time_s` is of, the busiest of the pipeline
    /// rank that the plan says the same of: the same keys as `predicted.busy_s`.
    pub busy_s: BTreeMap<String, f64>,
    /// How often a step that rank ran each; empty where a file does not say.
    #[serde(default)]
    pub calls: BTreeMap<String, f64>,
    /// Times a step that the host waited to read the device's memory, by the name of the span; empty
    /// where that memory is the host's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub host_reads: BTreeMap<String, f64>,
    /// Peak memory of every rank, in the order of ranks.
    pub peak_by_rank: Vec<RankPeak>,
    /// Loss of the last step; NaN where no step ran.
    #[serde(with = "null_is_nan")]
    pub final_loss: f64,
    /// The last evaluation; absent where there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<Evaluation>,
    /// What else the machine did meanwhile; absent where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<HostLoad>,
}

impl RunSummary {
    /// The text of a file `summary.json`; refuses another version, times below zero and memory that no machines have. What a
    /// category took may be a little below zero, as waiting is what the others leave.
    pub fn read(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let wrong = |error: serde_json::Error| error.to_string();
        let Versioned { version } = serde_json::from_str(text).map_err(wrong)?;
        if version != RUN_VERSION {
            return Err(format!(
                "found version {version}, expected {RUN_VERSION}, which this program reads"
            ));
        }
        let read: Self = serde_json::from_str(text).map_err(wrong)?;
        at_least_zero(read.step_s, read.tokens_per_s)?;
        let named = [&read.busy_s, &read.calls, &read.host_reads];
        let named = named.into_iter().flatten();
        let hidden = read
            .hidden_s
            .iter()
            .map(|(category, &time)| (category.name(), time));
        let all = named
            .map(|(key, &found)| (key.as_str(), found))
            .chain(hidden);
        for (key, found) in all {
            if found < 0.0 {
                return Err(format!("found `{key}` {found}, expected at least 0"));
            }
        }
        let bytes = read.peak_by_rank.iter().flat_map(|peak| {
            let by_class = TensorClass::ALL.map(|class| peak.bytes[class]);
            let beside = [peak.reserved, peak.reached, peak.resident];
            let all = by_class.into_iter().chain(beside).chain(peak.host_bytes);
            all.map(|bytes| bytes.0)
        });
        at_most("bytes", bytes, MOST_BYTES)?;
        Ok(read)
    }
}

/// How busy the machine was that a run was measured on, and how fast.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostLoad {
    /// Cores the process may use.
    pub cores: u32,
    /// Threads of the run that compute: of all ranks on the machine.
    pub threads: u32,
    /// Runnable threads of the machine, its mean over the minute before the run began: its own are not
    /// among them.
    pub load_before: f64,
    /// The same at the end, its own among them.
    pub load_after: f64,
    /// Cores that other programs kept busy on average while it ran; absent where ranks are other
    /// processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub others_busy: Option<f64>,
    /// Seconds that a fixed piece of work took on all cores before the run and after it; absent where no time is the
    /// CPU's, or ranks are other processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pace_s: Option<[f64; 2]>,
}

/// Peak memory of one rank, by what it held at that instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankPeak {
    /// The rank.
    pub rank: u32,
    /// Its pipeline rank.
    pub pp_rank: u32,
    /// What it had taken of its device's memory for tensors, in use or not; 0 where a file does not say,
    /// as for the two below.
    #[serde(default)]
    pub reserved: Bytes,
    /// How much of that tensors ever reached into: the peak with the holes between them.
    #[serde(default)]
    pub reached: Bytes,
    /// How often it took more after the first step.
    #[serde(default)]
    pub growths: u64,
    /// The most that the rank's process had of the host's memory, its program and buffers included: ranks
    /// that are threads of one process share that, and each tells all of it. 0 where the system or a file
    /// does not say.
    #[serde(default)]
    pub resident: Bytes,
    /// The most bytes of its tensors that rested in memory of the host at once; absent where none did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_bytes: Option<Bytes>,
    /// Bytes by class at the instant of the peak.
    pub bytes: ByClass<Bytes>,
}

/// JSON has no NaN: it is written as `null` and read back as NaN.
mod null_is_nan {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
    pub(super) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        value.is_finite().then_some(*value).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step() -> StepRecord {
        StepRecord {
            step: 3,
            loss: 5.25,
            mtp_losses: vec![6.5],
            aux_loss: 0.01,
            z_loss: 0.0,
            grad_norm: 1.5,
            lr: 1e-3,
            step_s: 0.25,
            tokens_per_s: 4096.0,
            peak_bytes: Bytes(1 << 20),
            expert_load: vec![vec![3, 5], vec![4, 4]],
            correction_bias: None,
            fullest: Some(FullestMicrobatch {
                ep: 2,
                ep_rank: 1,
                load: vec![vec![1, 3], vec![2, 2]],
            }),
            dropped: 0,
            dropped_by_layer: Vec::new(),
            validation: None,
        }
    }

    #[test]
    fn law_steps_round_trip_in_one_line() {
        let line = serde_json::to_string(&step()).expect("serializes");
        assert!(!line.contains('\n'));
        assert_eq!(
            serde_json::from_str::<StepRecord>(&line).expect("parses"),
            step()
        );
    }

    #[test]
    fn steps_that_are_missing_repeated_or_negative_are_refused_by_line() {
        let line = |step: &str| {
            let line = serde_json::to_string(&self::step()).expect("serializes");
            line.replace("\"step\":3", &format!("\"step\":{step}"))
        };
        let read = |steps: &[&str]| {
            let lines: Vec<String> = steps.iter().map(|step| line(step)).collect();
            StepRecord::lines(&lines.join("\n"))
                .map(|record| record.map(|record| record.step))
                .collect::<Result<Vec<u64>, _>>()
        };
        assert_eq!(read(&["7", "8", "9"]), Ok(vec![7, 8, 9]));
        for (steps, number, found) in [
            (&["0", "2"][..], 2, "found step 2, expected step 1"),
            (&["0", "1", "1"], 3, "found step 1, expected step 2"),
            (&["4", "3"], 2, "found step 3, expected step 5"),
            (&["0", "-1"], 2, "integer `-1`"),
            (
                &["18446744073709551615", "0"],
                2,
                "found step 0, expected none",
            ),
        ] {
            let (at, problem) = read(steps).expect_err("refused");
            assert!(
                at == number && problem.contains(found),
                "{steps:?}: line {at}: {problem}"
            );
        }
    }

    #[test]
    fn counts_that_no_run_has_are_refused_by_key() {
        let many = StepRecord {
            expert_load: vec![vec![8, u64::MAX], vec![1, 1]],
            ..step()
        };
        let line = serde_json::to_string(&many).expect("serializes");
        let (_, problem) = StepRecord::lines(&line)
            .next()
            .expect("a line")
            .expect_err("refused");
        assert!(problem.contains("`expert_load`"), "{problem}");
        let rank = serde_json::json!({
            "rank": 0, "pp_rank": 0, "resident": 1_u64 << 62,
            "bytes": ByClass::<Bytes>::from_fn(|_| Bytes(1)),
        });
        let summary = |version: u32, [step_s, adamw]: [f64; 2], ranks: &[serde_json::Value]| {
            let text = serde_json::json!({
                "version": version, "steps": 1, "warmup_steps": 0, "step_s": step_s, "tokens_per_s": 1.0,
                "time_s": TimeByCategory::default(), "busy_s": {"adamw": adamw}, "peak_by_rank": ranks, "final_loss": 2.0,
            });
            RunSummary::read(&text.to_string())
        };
        assert!(summary(RUN_VERSION, [0.5, 0.1], &[]).is_ok());
        for (found, expected) in [
            (summary(RUN_VERSION, [0.5, 0.1], &[rank]), "`bytes`"),
            (summary(RUN_VERSION, [-0.5, 0.1], &[]), "`step_s` -0.5"),
            (summary(RUN_VERSION, [0.5, -1.0], &[]), "`adamw` -1"),
            (summary(RUN_VERSION + 1, [0.5, 0.1], &[]), "expected 1"),
        ] {
            let problem = found.expect_err("refused");
            assert!(problem.contains(expected), "{problem}");
        }
    }

    #[test]
    fn times_below_zero_are_refused_by_key() {
        let bad = [
            StepRecord {
                step_s: -1.0,
                ..step()
            },
            StepRecord {
                tokens_per_s: -4096.0,
                ..step()
            },
        ];
        for (record, expected) in bad.iter().zip(["`step_s` -1", "`tokens_per_s` -4096"]) {
            let line = serde_json::to_string(record).expect("serializes");
            let mut read = StepRecord::lines(&line);
            let (at, problem) = read.next().expect("a line").expect_err("refused");
            assert!(at == 1 && problem.contains(expected), "{problem}");
        }
    }

    #[test]
    fn a_diverged_loss_is_null_and_comes_back_as_nan() {
        let evaluation = Evaluation {
            loss: 800.0,
            perplexity: f64::INFINITY,
            samples: 4,
            eval_s: 0.5,
        };
        let diverged = StepRecord {
            loss: f64::NAN,
            validation: Some(evaluation),
            ..step()
        };
        let line = serde_json::to_string(&diverged).expect("serializes");
        assert!(line.contains("\"loss\":null"), "{line}");
        let back: StepRecord = serde_json::from_str(&line).expect("parses");
        assert!(back.loss.is_nan());
        let validation = back.validation.expect("there");
        assert!(validation.loss == 800.0 && validation.perplexity.is_nan());
    }
}
