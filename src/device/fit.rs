//! Whether a plan's ranks have room on the GPUs that run them, and what would have.
//!
//! Bytes are the planner's for this executor, worked out again from the plan's layout ([`Anew`]). The room between tensors that the executor reserves is counted
//! ([`room()`]). Beside tensors a rank needs what a profile measured, where the plan was priced
//! with one, else what is assumed ([`ASSUMED_OVERHEAD`]); and as a process of its own what NCCL keeps
//! for every group of more than one rank, by the planner's figure. Ranks that are threads share the first
//! GPU and its context, and use no NCCL. A process that a launcher started judges the GPU that it takes.

use anyhow::anyhow;
use moefold_executor::room::room;
use moefold_executor::transport::Launched;
use moefold_planner::choice::StackName;
use moefold_planner::layout::PartialDegrees;
use moefold_planner::plan::{Plan, PlannedLayout, Predicted};
use moefold_planner::stack::{ASSUMED_OVERHEAD, WORKSPACE};
use moefold_profiles::units::{Bytes, GIB};
use moefold_profiles::{TensorClass, presets};

use super::Gpu;
use super::anew::Anew;
use crate::cli::Launch;
use crate::failure::{Failure, failure};

/// Refuses a plan that needs more GPUs than there are, or more memory than they have free; what every
/// rank reserves for its tensors, and what the planner says of the plan on these GPUs.
pub(super) fn check(
    plan: &Plan,
    gpus: &[Gpu],
    launch: Launch,
) -> Result<(Bytes, Predicted), Failure> {
    let ranks = plan.request.gpus;
    let (taken, sharing) = match launch {
        Launch::Threads => (&gpus[..1], ranks),
        Launch::Processes => (of_processes(ranks, gpus)?, 1),
        Launch::Env => {
            let launched = Launched::from_environment().map_err(failure)?;
            (of_launched(&launched, gpus)?, 1)
        }
    };
    let judge = Judge::new(plan, launch, &taken[0]);
    let demand = judge
        .demand(&judge.anew.planned, sharing)
        .map_err(failure)?;
    for gpu in taken {
        judge.has_room(gpu, &demand)?;
    }
    Ok((demand.room, judge.anew.planned.predicted))
}

/// A GPU for each of so many processes of this machine.
fn of_processes(ranks: u32, gpus: &[Gpu]) -> Result<&[Gpu], Failure> {
    gpus.get(..ranks as usize).ok_or_else(|| {
        Failure::Request(anyhow!(
            "--launch processes: the plan has {ranks} ranks, a GPU each, and this machine has {}: \
             --launch threads runs all of them on GPU 0, --launch env on several machines, and \
             `plan --gpus {}` makes a plan for what is here",
            counted(gpus.len()),
            gpus.len()
        ))
    })
}

/// The GPU of the process that a launcher started.
fn of_launched<'a>(launched: &Launched, gpus: &'a [Gpu]) -> Result<&'a [Gpu], Failure> {
    let at = launched.gpu as usize;
    gpus.get(at..=at).ok_or_else(|| {
        Failure::Request(anyhow!(
            "--launch env: rank {} is to take GPU {at} of its machine (its local rank is {}), which has \
             {}, numbered from 0: start at most {} on each machine (torchrun's --nproc-per-node, srun's \
             --ntasks-per-node)",
            launched.rank,
            launched.local_rank,
            counted(gpus.len()),
            match gpus.len() {
                1 => "1 rank".to_owned(),
                more => format!("{more} ranks"),
            }
        ))
    })
}

fn counted(gpus: usize) -> String {
    match gpus {
        1 => "1 GPU".to_owned(),
        more => format!("{more} GPUs"),
    }
}

/// What the ranks on one GPU ask of it.
struct Demand {
    sharing: u32,
    /// For tensors, each.
    room: Bytes,
    /// Contexts and workspaces of all.
    beside: Bytes,
    /// NCCL's.
    communicators: Bytes,
}

impl Demand {
    fn total(&self) -> Bytes {
        self.room * u64::from(self.sharing) + self.beside + self.communicators
    }

    fn ranks(&self) -> String {
        match self.sharing {
            1 => format!("1 rank of {}", self.room),
            ranks => format!("{ranks} ranks of {}", self.room),
        }
    }
}

/// What demands are worked out from.
struct Judge<'a> {
    plan: &'a Plan,
    /// On GPUs such as those at hand.
    anew: Anew<'a>,
    /// Whether ranks are processes.
    apart: bool,
    /// Memory beside tensors, where the plan's profile measured it.
    measured: Option<Bytes>,
}

impl<'a> Judge<'a> {
    fn new(plan: &'a Plan, launch: Launch, gpu: &Gpu) -> Self {
        let known =
            || presets::gpu(&presets::gpu_name(&gpu.name)).or_else(|_| presets::gpu("h200"));
        let on_cpu = plan.cluster.gpu.is_cpu();
        let anew = Anew::new(plan, on_cpu.then(known).and_then(Result::ok));
        let mut measured = None;
        if !plan.profiles.is_empty() && plan.planned.stack == StackName::Moefold {
            // The file has one sum; the rest of it is the same without a profile.
            let sum = less(overhead(&plan.planned), communicators(&anew.planned));
            // A profile may say nothing of it, and then the plan has what is assumed.
            let is_measured = sum > Bytes::ZERO && sum != ASSUMED_OVERHEAD;
            measured = is_measured.then_some(sum);
        }
        Self {
            plan,
            anew,
            apart: launch != Launch::Threads,
            measured,
        }
    }

    fn demand(
        &self,
        planned: &PlannedLayout,
        sharing: u32,
    ) -> Result<Demand, moefold_executor::error::Error> {
        let context = self.measured.unwrap_or(ASSUMED_OVERHEAD);
        Ok(Demand {
            sharing,
            room: room(planned, &self.plan.model, &self.plan.request.batch)?,
            // Ranks that share a context each give the matrix library a workspace.
            beside: context + WORKSPACE * u64::from(sharing - 1),
            communicators: if self.apart {
                communicators(planned)
            } else {
                Bytes::ZERO
            },
        })
    }

    fn has_room(&self, gpu: &Gpu, demand: &Demand) -> Result<(), Failure> {
        let (Some(free), Some(memory)) = (gpu.free(), gpu.memory) else {
            return Ok(());
        };
        let needed = demand.total();
        if needed <= free {
            return Ok(());
        }
        let source = match self.measured {
            Some(_) => "as the plan's profile measured",
            None => "as is assumed where no profile says",
        };
        let nccl = match demand.communicators {
            Bytes::ZERO => String::new(),
            bytes => format!(", {bytes} for NCCL"),
        };
        Err(Failure::Request(anyhow!(
            "the plan needs {needed} on GPU {} ({}), which has {free} free of {memory}: {} in tensors and \
             room between them, {} for the context and libraries, {source}{nccl}; {}",
            gpu.ordinal,
            gpu.name,
            demand.ranks(),
            demand.beside,
            self.what_fits(free, demand.sharing)
        )))
    }

    /// What of the same job has room: a smaller microbatch, another layout of as many ranks, fewer
    /// ranks on the GPU, more GPUs.
    fn what_fits(&self, free: Bytes, sharing: u32) -> String {
        let (plan, ranks) = (self.plan, self.plan.request.gpus);
        let needed = |planned: &PlannedLayout, sharing: u32| {
            let demand = self.demand(planned, sharing).ok()?;
            (demand.total() <= free).then(|| demand.total())
        };
        let mut degrees = plan.planned.layout.pinned();
        for mbs in (1..plan.planned.layout.mbs).rev() {
            degrees.mbs = Some(mbs);
            let found = self.anew.least(ranks, degrees);
            if let Some(needed) = found.and_then(|planned| needed(&planned, sharing)) {
                return format!(
                    "what fits: the same layout with --layout {degrees} takes {needed}"
                );
            }
        }
        let free_choice = PartialDegrees::default();
        let other = self.anew.least(ranks, free_choice);
        if let Some(planned) = &other
            && let Some(needed) = needed(planned, sharing)
        {
            return format!(
                "what fits: --layout {} takes {needed}",
                planned.layout.pinned()
            );
        }
        if ranks > 1
            && sharing > 1
            && let Some(planned) = self.anew.least(1, free_choice)
            && let Some(needed) = needed(&planned, 1)
        {
            return format!("what fits: one rank (plan --gpus 1) takes {needed}");
        }
        self.more_gpus(free, sharing)
    }

    /// How many GPUs would do, a rank each.
    fn more_gpus(&self, free: Bytes, sharing: u32) -> String {
        let ranks = self.plan.request.gpus;
        let first = if sharing > 1 { ranks } else { 2 * ranks };
        let counts = std::iter::successors(Some(first), |gpus| Some(2 * gpus));
        // Ranks with a GPU each are processes, which NCCL connects.
        let apart = Self {
            plan: self.plan,
            anew: self.anew.clone(),
            apart: true,
            measured: self.measured,
        };
        for more in counts.take_while(|&more| more <= MOST_GPUS) {
            let Some(planned) = self.anew.least(more, PartialDegrees::default()) else {
                continue;
            };
            let Ok(demand) = apart.demand(&planned, 1) else {
                continue;
            };
            if demand.total() > free {
                continue;
            }
            let none = match ranks {
                1 => "no layout of one rank fits".to_owned(),
                _ if sharing > 1 => format!("no layout of {ranks} ranks fits on one GPU"),
                _ => format!("no layout of {ranks} ranks fits"),
            };
            return format!(
                "{none}; {more} such GPUs, a rank each, would do (--layout {}, {} a rank)",
                planned.layout.pinned(),
                demand.total()
            );
        }
        "no layout fits, with shorter sequences or fewer layers one might".to_owned()
    }
}

/// Of what the planner predicts without a profile, the part of NCCL.
fn communicators(planned: &PlannedLayout) -> Bytes {
    less(overhead(planned), ASSUMED_OVERHEAD)
}

fn less(from: Bytes, part: Bytes) -> Bytes {
    Bytes(from.0.saturating_sub(part.0))
}

/// Predicted bytes beside tensors.
fn overhead(planned: &PlannedLayout) -> Bytes {
    Bytes((planned.predicted.memory_gib[TensorClass::Overhead] * GIB as f64).round() as u64)
}

/// Where looking for enough GPUs ends.
const MOST_GPUS: u32 = 1024;
