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
use crate::flags::Goal;
use crate::watch::Watcher;

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
    fn size(&self, gpus: u32, step_s: f64) -> Size {
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
            let size = self.size(gpus, step_s(&found));
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
        match (best, refused) {
            (Some((_, found)), _) => Ok(Best {
                found,
                sizes,
                stopped,
            }),
            _ if stopped => Err(NoSize::Stopped),
            (None, Some(error)) if sizes.is_empty() => Err(NoSize::Refused(error)),
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

/// What was found on the best number of GPUs.
pub(crate) struct Best<T> {
    pub(crate) found: T,
    /// What each number comes to.
    pub(crate) sizes: Vec<Size>,
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
