//! [`SearchOptions`]: what a search may vary and what is fixed, read from command-line words.
//!
//! [`Flags`] holds the words as they were typed; [`SearchOptions::parse`] gives them meaning or
//! refuses them with a [`PlanError`] that names the flag, the value and what would work. Values that
//! the design knows and this release does not price are refused as such, not silently ignored.

mod error;
mod pipeline;
mod routing;

use moefold_profiles::{Dtype, Precision};

use crate::choice::{Dispatcher, Module, Objective, Optimizer, Overlap, Recompute, StackName};
use crate::layout::{Batch, Illegal, PartialDegrees};

pub use error::{LeastMemory, PlanError};
pub use pipeline::{PipelineLayout, pipeline_layout};
pub use routing::Routing;

/// Words of the `plan` command, unread. `None` is the default of the flag.
#[derive(Debug, Clone, Default, PartialEq)]
#[expect(missing_docs, reason = "each field is the flag of its name")]
pub struct Flags {
    pub precision: Option<String>,
    pub layout: Option<String>,
    pub stack: Option<String>,
    pub dispatcher: Option<String>,
    pub schedule: Option<String>,
    pub recompute: Option<String>,
    pub offload: Option<String>,
    pub pipeline_layout: Option<String>,
    pub overlap: Option<String>,
    pub cuda_graph: Option<String>,
    pub optimizer: Option<String>,
    pub grad_dtype: Option<String>,
    pub zero: Option<String>,
    pub capacity_factor: Option<f64>,
    pub routing: Option<String>,
    pub objective: Option<String>,
    pub top: Option<usize>,
}

/// What a search may vary and what is fixed.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchOptions {
    /// Sequence length and global batch.
    pub batch: Batch,
    /// Recipe.
    pub precision: Precision,
    /// Runtime.
    pub stack: StackName,
    /// Fixed degrees.
    pub pins: PartialDegrees,
    /// Token dispatcher; `None` tries the stack's.
    pub dispatcher: Option<Dispatcher>,
    /// Recompute set; `None` tries every sensible one.
    pub recompute: Option<Recompute>,
    /// What each stage holds, where given.
    pub stages: Option<PipelineLayout>,
    /// Optimizer.
    pub optimizer: Optimizer,
    /// Type of the main gradients.
    pub grad_dtype: Dtype,
    /// What runs beside compute; `None` takes all that the stack can.
    pub overlap: Option<Overlap>,
    /// How tokens were routed; balanced where absent.
    pub routing: Option<Routing>,
    /// What is best.
    pub objective: Objective,
    /// Plans wanted.
    pub top: usize,
    /// Memory a plan may fill on each device, GiB; `None` is all of it.
    pub memory_gib: Option<f64>,
    /// Whether to look at every layout for a picture of them all, besides what the search needs.
    pub survey: bool,
    /// What was asked for that this release does not price; refused with whatever else is wrong.
    pub unpriced: Vec<Illegal>,
}

impl SearchOptions {
    /// The defaults for a batch on a stack.
    pub fn new(batch: Batch, stack: StackName) -> Self {
        Self {
            batch,
            precision: match stack {
                StackName::Megatron => Precision::Bf16,
                StackName::Moefold => Precision::Fp32,
            },
            stack,
            pins: PartialDegrees::default(),
            dispatcher: None,
            recompute: None,
            stages: None,
            optimizer: Optimizer::Adam,
            grad_dtype: Dtype::F32,
            overlap: None,
            routing: None,
            objective: Objective::Throughput,
            top: 5,
            memory_gib: None,
            survey: false,
            unpriced: Vec::new(),
        }
    }

    /// Reads the words of the command line.
    pub fn parse(batch: Batch, flags: &Flags) -> Result<Self, PlanError> {
        let stack = match flags.stack.as_deref() {
            None | Some("megatron") => StackName::Megatron,
            Some("moefold") => StackName::Moefold,
            Some(other) => return Err(PlanError::value("--stack", other, "megatron or moefold")),
        };
        let mut options = Self::new(batch, stack);
        if let Some(word) = &flags.precision {
            options.precision = precision(word)?;
        }
        if let Some(text) = &flags.layout {
            options.pins = text.parse()?;
        }
        options.dispatcher = match flags.dispatcher.as_deref() {
            None | Some("auto") => None,
            Some(word) => {
                let named = Dispatcher::ALL
                    .into_iter()
                    .find(|known| known.name() == word);
                let expected = "auto, alltoall, allgather, deepep or hybridep";
                Some(named.ok_or_else(|| PlanError::value("--dispatcher", word, expected))?)
            }
        };
        options.recompute = match flags.recompute.as_deref() {
            None | Some("auto") => None,
            Some(words) => Some(recompute(words)?),
        };
        if let Some(text) = &flags.pipeline_layout {
            options.stages = Some(pipeline_layout(text)?);
        }
        options.optimizer = match flags.optimizer.as_deref() {
            None | Some("adam") => Optimizer::Adam,
            Some("adam-bf16-moments") => Optimizer::AdamBf16Moments,
            Some(other) => {
                let works = "adam, adam-bf16-moments";
                let unpriced = later("--optimizer", other, &["muon"], works)?;
                options.unpriced.push(unpriced);
                Optimizer::Adam
            }
        };
        options.grad_dtype = match flags.grad_dtype.as_deref() {
            None | Some("fp32") => Dtype::F32,
            Some("bf16") => Dtype::Bf16,
            Some(other) => return Err(PlanError::value("--grad-dtype", other, "fp32 or bf16")),
        };
        options.overlap = match flags.overlap.as_deref() {
            None | Some("auto") => None,
            Some(words) => Some(overlap(words, &mut options.unpriced)?),
        };
        options.objective = match flags.objective.as_deref() {
            None | Some("throughput") => Objective::Throughput,
            Some("cost") => Objective::Cost,
            Some("memory") => Objective::Memory,
            Some(other) => {
                let works = "throughput, cost, memory";
                let unpriced = later("--objective", other, &["gpus"], works)?;
                options.unpriced.push(unpriced);
                Objective::Throughput
            }
        };
        options.top = flags.top.unwrap_or(options.top).max(1);
        if let Some(path) = flags.routing.as_deref().filter(|&word| word != "balanced") {
            options.routing = Some(Routing::read(path)?);
        }
        flags.unpriced(&mut options.unpriced)?;
        Ok(options)
    }
}

impl Flags {
    /// Collects what the design has and this release does not price.
    fn unpriced(&self, unpriced: &mut Vec<Illegal>) -> Result<(), PlanError> {
        let mut only = |flag, word: &Option<String>, known: &[&str], works: &'static str| {
            match word.as_deref() {
                Some(word) if works.split(", ").all(|ok| ok != word) => {
                    unpriced.push(later(flag, word, known, works)?);
                }
                _ => {}
            }
            Ok::<(), PlanError>(())
        };
        let schedules = ["1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe"];
        only("--schedule", &self.schedule, &schedules, "auto")?;
        let any_module = self.offload.as_deref().map(|word| [word]);
        let known: &[&str] = any_module.as_ref().map_or(&[], |word| word);
        only("--offload", &self.offload, known, "auto, none")?;
        only(
            "--cuda-graph",
            &self.cuda_graph,
            &["partial", "full"],
            "auto, none",
        )?;
        only("--zero", &self.zero, &["partial", "fsdp"], "1")?;
        if let Some(factor) = self.capacity_factor {
            unpriced.push(Illegal::Unpriced {
                flag: "--capacity-factor",
                value: factor.to_string(),
                works: "no capacity factor: routing is dropless",
            });
        }
        Ok(())
    }
}

/// A value that is known but not priced yet; an error where it is not known at all.
fn later(
    flag: &'static str,
    value: &str,
    known: &[&str],
    works: &'static str,
) -> Result<Illegal, PlanError> {
    if !known.contains(&value) {
        return Err(PlanError::value(flag, value, &format!("one of {works}")));
    }
    Ok(Illegal::Unpriced {
        flag,
        value: value.to_owned(),
        works,
    })
}

fn precision(word: &str) -> Result<Precision, PlanError> {
    const ALL: [Precision; 7] = [
        Precision::Fp32,
        Precision::Bf16,
        Precision::Fp8,
        Precision::Fp8Delayed,
        Precision::Fp8Blockwise,
        Precision::Mxfp8,
        Precision::Nvfp4,
    ];
    ALL.into_iter()
        .find(|precision| precision.name() == word)
        .ok_or_else(|| {
            let expected = "fp32, bf16, fp8, fp8-delayed, fp8-blockwise, mxfp8 or nvfp4";
            PlanError::value("--precision", word, expected)
        })
}

fn overlap(words: &str, unpriced: &mut Vec<Illegal>) -> Result<Overlap, PlanError> {
    let mut overlap = Overlap::default();
    if words == "none" {
        return Ok(overlap);
    }
    for word in words.split(',').map(str::trim) {
        match word {
            "grad-reduce" => overlap.grad_reduce = true,
            "param-gather" => overlap.param_gather = true,
            "p2p" => overlap.p2p = true,
            _ => {
                let known = ["expert-alltoall", "shared-expert", "tp"];
                let works = "auto, none, grad-reduce, param-gather, p2p";
                unpriced.push(later("--overlap", word, &known, works)?);
                overlap.expert_alltoall |= word == "expert-alltoall";
                overlap.shared_expert |= word == "shared-expert";
                overlap.tp |= word == "tp";
            }
        }
    }
    Ok(overlap)
}

fn recompute(words: &str) -> Result<Recompute, PlanError> {
    match words {
        "none" => return Ok(Recompute::None),
        "full" => return Ok(Recompute::Full),
        _ => {}
    }
    let modules: Result<Vec<Module>, PlanError> = words
        .split(',')
        .map(|word| {
            Module::ALL
                .into_iter()
                .find(|module| module.name() == word.trim())
                .ok_or_else(|| {
                    let names = Module::ALL.map(Module::name).join(", ");
                    let expected = format!("auto, none, full, or some of {names}");
                    PlanError::value("--recompute", word, &expected)
                })
        })
        .collect();
    Ok(Recompute::of(modules?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_later_releases_are_collected_by_name() {
        let batch = Batch {
            seq_len: 4096,
            global_batch: 8,
        };
        let flags = Flags {
            zero: Some("fsdp".to_owned()),
            overlap: Some("p2p,tp".to_owned()),
            ..Flags::default()
        };
        let options = SearchOptions::parse(batch, &flags).expect("known words");
        let unpriced: Vec<String> = options.unpriced.iter().map(ToString::to_string).collect();
        assert_eq!(unpriced.len(), 2, "{unpriced:?}");
        assert!(unpriced[0].contains("--overlap tp"), "{unpriced:?}");
        assert!(unpriced[1].contains("--zero fsdp"), "{unpriced:?}");
        let flags = Flags {
            zero: Some("9".to_owned()),
            ..Flags::default()
        };
        let error = SearchOptions::parse(batch, &flags).expect_err("refused");
        assert!(error.to_string().contains("one of 1"), "{error}");
    }

    #[test]
    fn a_slip_in_the_degrees_is_said_once_after_its_flag() {
        let batch = Batch {
            seq_len: 4096,
            global_batch: 8,
        };
        let flags = Flags {
            layout: Some("tp=2,tp=4".to_owned()),
            ..Flags::default()
        };
        let error = SearchOptions::parse(batch, &flags).expect_err("refused");
        let cause = std::error::Error::source(&error).expect("a cause");
        assert_eq!(error.to_string(), "--layout");
        assert!(cause.to_string().contains("tp is given twice"), "{cause}");
    }
}
