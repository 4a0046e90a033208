//! Plans over several numbers of GPUs: the least cost, or the fewest GPUs for a deadline.
//!
//! A search is of one number of GPUs. Here each of some numbers is searched, and of each the fastest plan counts. Tried
//! are powers of two and three times such, of GPUs below a node and of nodes above, and the most GPUs that there may be.

use anyhow::anyhow;
use moefold_planner::answer::Size;
use moefold_planner::layout::Batch;
use moefold_planner::options::PlanError;
use moefold_profiles::Cluster;

use crate::cli::PlanArgs;
use crate::failure::Failure;
use crate::plan::{Found, refusal};
use crate::watch::Watcher;

/// What `--objective` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// Tokens a second.
    Throughput,
    /// Least peak memory.
    Memory,
    /// Least dollars a token.
    Cost,
    /// Fewest GPUs that train so many tokens in time.
    Gpus,
}

impl Goal {
    pub(crate) const ALL: [Self; 4] = [Self::Throughput, Self::Memory, Self::Cost, Self::Gpus];

    /// The word of the flag.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Throughput => "throughput",
            Self::Memory => "memory",
            Self::Cost => "cost",
            Self::Gpus => "gpus",
        }
    }
}

/// What plans of several sizes are held to.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    by_cost: bool,
    batch: Batch,
    tokens: Option<f64>,
    deadline_days: Option<f64>,
    usd_per_gpu_hour: Option<f64>,
}

impl Wanted {
    /// What the flags want of several numbers of GPUs; nothing where they want one.
    pub(crate) fn new(args: &PlanArgs, cluster: &Cluster) -> Result<Option<Self>, Failure> {
        let refuse = |message: String| Err(Failure::Request(anyhow!(message)));
        for (flag, found) in [
            ("--tokens", args.tokens),
            ("--deadline", args.deadline),
            ("--usd-per-gpu-hour", args.usd_per_gpu_hour),
        ] {
            if let Some(found) = found.filter(|found| !(found.is_finite() && *found > 0.0)) {
                return refuse(format!("{flag}: found {found}, expected a number above 0"));
            }
        }
        let by_cost = match args.objective {
            Goal::Throughput | Goal::Memory => {
                let given = [
                    ("--tokens", args.tokens),
                    ("--deadline", args.deadline),
                    ("--usd-per-gpu-hour", args.usd_per_gpu_hour),
                ];
                return match given.into_iter().find(|(_, given)| given.is_some()) {
                    None => Ok(None),
                    Some((flag, _)) => refuse(format!(
                        "{flag} goes with --objective cost or gpus, which try several numbers of GPUs; found --objective {}",
                        args.objective.name()
                    )),
                };
            }
            Goal::Cost => true,
            Goal::Gpus => false,
        };
        if args.tokens.is_none() && (args.deadline.is_some() || !by_cost) {
            return refuse(format!(
                "--tokens is missing: how many are trained by the deadline; add for example --tokens 15e12 to --objective {}",
                args.objective.name()
            ));
        }
        if args.deadline.is_none() && !by_cost {
            return refuse("--deadline is missing: --objective gpus is the fewest GPUs that train --tokens in so many days; add for example --deadline 60".to_owned());
        }
        let usd_per_gpu_hour = args.usd_per_gpu_hour.or(cluster.usd_per_gpu_hour);
        if by_cost && usd_per_gpu_hour.is_none() {
            return refuse(format!(
                "--objective cost: cluster {} has no `usd_per_gpu_hour`; add it to its file, or --usd-per-gpu-hour USD",
                cluster.name
            ));
        }
        Ok(Some(Self {
            by_cost,
            batch: Batch {
                seq_len: args.seq_len,
                global_batch: args.global_batch,
            },
            tokens: args.tokens,
            deadline_days: args.deadline,
            usd_per_gpu_hour,
        }))
    }

    /// What the fastest plan of a number of GPUs comes to.
    fn size(&self, found: &Found, gpus: u32) -> Size {
        let step_s = found.answer.plans[0].predicted.step_s;
        let a_step = self.batch.seq_len as f64 * self.batch.global_batch as f64;
        let tokens_per_s = a_step / step_s;
        let of = |usd: f64| usd / 3600.0 * f64::from(gpus) * 1e12 / tokens_per_s;
        Size {
            gpus,
            step_s,
            tokens_per_s,
            days: self.tokens.map(|tokens| tokens / tokens_per_s / 86_400.0),
            usd_per_trillion_tokens: self.usd_per_gpu_hour.map(of),
        }
    }

    fn is_in_time(&self, size: &Size) -> bool {
        match (size.days, self.deadline_days) {
            (Some(days), Some(deadline)) => days <= deadline,
            _ => true,
        }
    }

    /// The answer of the best number of GPUs, of at most so many; it says what the others come to.
    pub(crate) fn best(
        &self,
        cluster: &Cluster,
        most: u32,
        watcher: &Watcher,
        search: impl Fn(u32) -> Result<Found, Box<PlanError>>,
    ) -> Result<Found, Failure> {
        let mut sizes: Vec<Size> = Vec::new();
        let mut best: Option<(f64, Found)> = None;
        let mut refused = None;
        let mut stopped = false;
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
            let size = self.size(&found, gpus);
            let score = match size.usd_per_trillion_tokens.filter(|_| self.by_cost) {
                Some(usd) => usd,
                None => f64::from(gpus),
            };
            let is_best = best.as_ref().is_none_or(|(least, _)| score < *least);
            let in_time = self.is_in_time(&size);
            sizes.push(size);
            if in_time && is_best {
                best = Some((score, found));
            }
            if in_time && !self.by_cost {
                // More GPUs are no fewer.
                break;
            }
            if watcher.is_stopped() {
                stopped = true;
                break;
            }
        }
        let Some((_, mut found)) = best else {
            return Err(match (sizes.is_empty(), stopped, refused) {
                (_, true, _) => watcher.found_nothing(),
                (true, _, Some(error)) => refusal(*error),
                _ => self.too_late(&sizes, most),
            });
        };
        found.answer.sizes = sizes;
        if stopped {
            // Numbers of GPUs that were not searched may be better by any measure.
            let search = &mut found.answer.search;
            search.unseen = Some(search.unseen.unwrap_or(0));
            search.optimal = false;
        }
        Ok(found)
    }

    fn too_late(&self, sizes: &[Size], most: u32) -> Failure {
        let days = |size: &Size| size.days.unwrap_or(f64::INFINITY);
        let nearest = sizes.iter().min_by(|a, b| days(a).total_cmp(&days(b)));
        let nearest = nearest.map_or(String::new(), |size| {
            format!("; {} take {:.1} days", size.gpus, days(size))
        });
        Failure::Infeasible(anyhow!(
            "no number of GPUs up to {most} that was tried trains {:e} tokens in {} days{nearest}; more --gpus, a later \
             --deadline or a larger --global-batch may",
            self.tokens.unwrap_or_default(),
            self.deadline_days.unwrap_or_default()
        ))
    }
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
        .filter(|&gpus| gpus < gpus_per_node && gpus_per_node % gpus == 0);
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
