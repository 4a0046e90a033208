//! Plans over several numbers of GPUs: the least cost, the fewest GPUs for a deadline, or the most tokens that failures
//! leave.
//!
//! A search is of one number of GPUs. Here each of some numbers is searched, and of each the fastest plan counts. Tried
//! are powers of two and three times such, of GPUs below a node and of nodes above, and the most GPUs that there may be.
//! What a checkpoint takes and how often a job fails do not depend on its layout, so the fastest plan of a number of GPUs
//! is also the one that failures leave most of.

use anyhow::anyhow;
use moefold_planner::answer::{FailureCost, Size};
use moefold_planner::choice::StackName;
use moefold_planner::goodput::Failures;
use moefold_planner::layout::Batch;
use moefold_planner::model::{Model, count};
use moefold_planner::options::{PlanError, SearchOptions};
use moefold_planner::stack::Stack;
use moefold_profiles::Cluster;

use crate::cli::PlanArgs;
use crate::failure::Failure;
use crate::flags::Goal;
use crate::watch::Watcher;

/// What plans of several sizes are held to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    goal: Goal,
    batch: Batch,
    tokens: Option<f64>,
    deadline_days: Option<f64>,
    usd_per_gpu_hour: Option<f64>,
    /// What failures cost a job of one GPU.
    failures: Option<Failures>,
}

/// A goodput that is none: training would take a million times as long.
const NOTHING: f64 = 1e-6;

impl Wanted {
    /// What the flags want of several numbers of GPUs; nothing where they want one.
    pub(crate) fn new(
        args: &PlanArgs,
        (model, cluster): (&Model, &Cluster),
        options: &SearchOptions,
    ) -> Result<Option<Self>, Failure> {
        let refuse = |message: String| Err(Failure::Request(anyhow!(message)));
        let of_sizes = [
            ("--tokens", args.tokens),
            ("--deadline", args.deadline),
            ("--usd-per-gpu-hour", args.usd_per_gpu_hour),
        ];
        let of_failures = [
            ("--gpu-mtbf", args.gpu_mtbf),
            ("--storage-gb-per-s", args.storage_gb_per_s),
            ("--save-time", args.save_time),
            ("--restart-time", args.restart_time),
        ];
        let given = of_sizes.into_iter().chain(of_failures);
        let given: Vec<(&str, f64)> = given
            .filter_map(|(flag, found)| Some((flag, found?)))
            .collect();
        for &(flag, found) in &given {
            let least = if matches!(flag, "--save-time" | "--restart-time") {
                "a number of at least 0"
            } else {
                "a number above 0"
            };
            let may_be_none = least.ends_with("least 0");
            if !found.is_finite() || found < 0.0 || found == 0.0 && !may_be_none {
                return refuse(format!("{flag}: found {found}, expected {least}"));
            }
        }
        let goal = args.objective;
        if matches!(goal, Goal::Throughput | Goal::Memory | Goal::SeqLen) {
            return match given.first() {
                None => Ok(None),
                Some((flag, _)) => refuse(format!(
                    "{flag} goes with --objective cost, gpus or goodput, which try several numbers of GPUs; found --objective {}",
                    goal.name()
                )),
            };
        }
        if args.tokens.is_none() && (args.deadline.is_some() || goal == Goal::Gpus) {
            return refuse(format!(
                "--tokens is missing: how many are trained by the deadline; add for example --tokens 15e12 to --objective {}",
                goal.name()
            ));
        }
        if args.deadline.is_none() && goal == Goal::Gpus {
            return refuse("--deadline is missing: --objective gpus is the fewest GPUs that train --tokens in so many days; add for example --deadline 60".to_owned());
        }
        let usd_per_gpu_hour = args.usd_per_gpu_hour.or(cluster.usd_per_gpu_hour);
        if goal == Goal::Cost && usd_per_gpu_hour.is_none() {
            return refuse(format!(
                "--objective cost: cluster {} has no `usd_per_gpu_hour`; add it to its file, or --usd-per-gpu-hour USD",
                cluster.name
            ));
        }
        Ok(Some(Self {
            goal,
            batch: options.batch,
            tokens: args.tokens,
            deadline_days: args.deadline,
            usd_per_gpu_hour,
            failures: failures(args, model, options)?,
        }))
    }

    /// What the fastest plan of a number of GPUs comes to; nothing where failures leave nothing of it.
    fn size(&self, gpus: u32, step_s: f64) -> Option<Size> {
        let a_step = self.batch.seq_len as f64 * self.batch.global_batch as f64;
        let tokens_per_s = a_step / step_s;
        let failures = self.failures.map(|of_one| {
            let own = Failures {
                mtbf_s: of_one.mtbf_s / f64::from(gpus),
                ..of_one
            };
            let save_every_steps = own.best_steps(step_s);
            FailureCost {
                mtbf_hours: own.mtbf_s / 3600.0,
                save_s: own.save_s,
                save_every_steps,
                goodput: own.goodput(save_every_steps as f64 * step_s),
            }
        });
        let goodput = failures.map_or(1.0, |failures| failures.goodput);
        let lasting = tokens_per_s * goodput;
        let of = |usd: f64| usd / 3600.0 * f64::from(gpus) * 1e12 / lasting;
        (goodput >= NOTHING).then(|| Size {
            gpus,
            step_s,
            tokens_per_s,
            days: self.tokens.map(|tokens| tokens / lasting / 86_400.0),
            usd_per_trillion_tokens: self.usd_per_gpu_hour.map(of),
            failures,
        })
    }

    /// What is best is least of.
    fn score(&self, size: &Size) -> f64 {
        let goodput = size.failures.map_or(1.0, |failures| failures.goodput);
        match (self.goal, size.usd_per_trillion_tokens) {
            (Goal::Cost, Some(usd)) => usd,
            (Goal::Goodput, _) => -goodput * size.tokens_per_s,
            _ => f64::from(size.gpus),
        }
    }

    fn is_in_time(&self, size: &Size) -> bool {
        match (size.days, self.deadline_days) {
            (Some(days), Some(deadline)) => days <= deadline,
            _ => true,
        }
    }

    /// The best number of GPUs, of at most so many. `search` finds what is fastest on a number of them, which has steps of
    /// `step_s`.
    pub(crate) fn best<T>(
        &self,
        cluster: &Cluster,
        most: u32,
        watcher: &Watcher,
        search: impl Fn(u32) -> Result<T, Box<PlanError>>,
        step_s: impl Fn(&T) -> f64,
    ) -> Result<Best<T>, NoSize> {
        let mut sizes: Vec<Size> = Vec::new();
        let mut best: Option<(f64, T)> = None;
        let mut refused = None;
        let mut stopped = false;
        // Numbers of which failures leave nothing.
        let mut nothing: Vec<u32> = Vec::new();
        for gpus in tried(cluster.gpus_per_node, most) {
            let found = match search(gpus) {
                Ok(found) => found,
                Err(error) if matches!(*error, PlanError::Stopped) => {
                    stopped = true;
                    break;
                }
                Err(error) => {
                    refused = Some(error);
                    continue;
                }
            };
            let Some(size) = self.size(gpus, step_s(&found)) else {
                nothing.push(gpus);
                continue;
            };
            let score = self.score(&size);
            let is_best = best.as_ref().is_none_or(|(least, _)| score < *least);
            let in_time = self.is_in_time(&size);
            sizes.push(size);
            if in_time && is_best {
                best = Some((score, found));
            }
            if in_time && self.goal == Goal::Gpus {
                // More GPUs are no fewer.
                break;
            }
            if watcher.is_stopped() {
                stopped = true;
                break;
            }
        }
        match (best, refused) {
            (Some((_, found)), _) => Ok(Best {
                found,
                sizes,
                nothing,
                stopped,
            }),
            _ if stopped => Err(NoSize::Stopped),
            (None, Some(error)) if sizes.is_empty() && nothing.is_empty() => {
                Err(NoSize::Refused(error))
            }
            _ if sizes.is_empty() => Err(NoSize::TooLate(anyhow!(
                "failures leave nothing of training on any number of GPUs up to {most}: a step and a checkpoint take too \
                 long for what is between two failures; look at --gpu-mtbf, --save-time or --storage-gb-per-s and \
                 --restart-time"
            ))),
            _ => Err(NoSize::TooLate(self.too_late(&sizes, most))),
        }
    }

    fn too_late(&self, sizes: &[Size], most: u32) -> anyhow::Error {
        let days = |size: &Size| size.days.unwrap_or(f64::INFINITY);
        let nearest = sizes.iter().min_by(|a, b| days(a).total_cmp(&days(b)));
        let nearest = nearest.map_or(String::new(), |size| {
            format!("; {} take {:.1} days", size.gpus, days(size))
        });
        anyhow!(
            "no number of GPUs up to {most} that was tried trains {:e} tokens in {} days{nearest}; more --gpus, a later \
             --deadline or a larger --global-batch may",
            self.tokens.unwrap_or_default(),
            self.deadline_days.unwrap_or_default()
        )
    }
}

/// What failures cost a job of one GPU, where that was asked.
fn failures(
    args: &PlanArgs,
    model: &Model,
    options: &SearchOptions,
) -> Result<Option<Failures>, Failure> {
    let asked = args.objective == Goal::Goodput
        || args.gpu_mtbf.is_some()
        || args.storage_gb_per_s.is_some()
        || args.save_time.is_some()
        || args.restart_time.is_some();
    if !asked {
        return Ok(None);
    }
    let need = |found: Option<f64>, flag: &str, what: &str| {
        let missing = || anyhow!("{flag} is missing: {what}, which nothing here knows");
        found.ok_or_else(|| Failure::Request(missing()))
    };
    let mtbf_hours = need(
        args.gpu_mtbf,
        "--gpu-mtbf",
        "hours between two failures of a GPU; add for example --gpu-mtbf 50000",
    )?;
    let save_s = match (args.save_time, args.storage_gb_per_s) {
        (Some(save_s), _) => save_s,
        (None, rate) => {
            let gb_per_s = need(
                rate,
                "--storage-gb-per-s",
                "what all ranks together write a second, GB; add for example --storage-gb-per-s 40, or --save-time SECONDS",
            )?;
            saved_bytes(model, options) / (1e9 * gb_per_s)
        }
    };
    let restart_s = need(
        args.restart_time,
        "--restart-time",
        "seconds from a failure until training goes on; add for example --restart-time 600",
    )?;
    Ok(Some(Failures {
        mtbf_s: 3600.0 * mtbf_hours,
        save_s,
        restart_s,
    }))
}

/// Bytes of a checkpoint.
fn saved_bytes(model: &Model, options: &SearchOptions) -> f64 {
    match options.stack {
        StackName::Moefold => moefold_executor::checkpoint::bytes(model) as f64,
        StackName::Megatron => {
            let each = Stack::of(options.stack).saved(options.precision, options.optimizer);
            each * count::params(model).total() as f64
        }
    }
}

/// What was found on the best number of GPUs.
pub(crate) struct Best<T> {
    pub(crate) found: T,
    /// What each number comes to.
    pub(crate) sizes: Vec<Size>,
    /// Numbers of GPUs of whose training failures leave nothing.
    pub(crate) nothing: Vec<u32>,
    /// Whether numbers are left that were not searched.
    pub(crate) stopped: bool,
}

/// Why no number of GPUs is best.
pub(crate) enum NoSize {
    /// The search was stopped before.
    Stopped,
    /// None has a plan; of the most the reason.
    Refused(Box<PlanError>),
    /// None meets the deadline.
    TooLate(anyhow::Error),
}

/// Numbers of GPUs that are tried, the fewest first.
fn tried(gpus_per_node: u32, most: u32) -> Vec<u32> {
    let powers = (0..u32::BITS).map(|exponent| 1_u32 << exponent);
    let each = powers.flat_map(|power| [Some(power), power.checked_mul(3)]);
    let nodes = each
        .clone()
        .flatten()
        .filter_map(|n| n.checked_mul(gpus_per_node));
    let below = each
        .flatten()
        .filter(|&gpus| gpus < gpus_per_node && gpus_per_node.is_multiple_of(gpus));
    let mut all: Vec<u32> = below
        .chain(nodes)
        .chain([most])
        .filter(|&gpus| gpus <= most)
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_numbers_of_gpus() {
        assert_eq!(tried(8, 100), [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]);
        assert_eq!(tried(4, 24), [1, 2, 4, 8, 12, 16, 24]);
        assert_eq!(tried(1, 5), [1, 2, 3, 4, 5]);
        assert_eq!(tried(8, u32::MAX).last(), Some(&u32::MAX));
    }
}
