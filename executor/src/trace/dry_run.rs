//! [`dry_run`]: one rank's step of a plan, walked without devices.

use std::collections::BTreeMap;

use moefold_kernels::Device;
use moefold_planner::mesh;
use moefold_planner::model::Model;
use moefold_planner::plan::{Plan, PlannedRouting};
use moefold_planner::schedule::{Action, Stage};
use moefold_planner::stack::Stack;
use moefold_planner::walk::{Event, Walked, play};
use moefold_profiles::TensorClass;
use moefold_profiles::pricing::Costs;
use moefold_profiles::trace::Category;
use moefold_profiles::units::{Bytes, GIB, Instant};

use super::answers::properties;
use super::{Assumed, Tape, rank_on, step};
use crate::data::Packing;
use crate::device::DeviceSpec;
use crate::error::Error;
use crate::moe::balance::Balancing;
use crate::options::Savers;
use crate::support;
use crate::train::prove;

/// Loads by MoE layer in the order in which the routers of a rank run in a step.
fn by_router(model: &Model, stages: &[Vec<u32>], actions: &[Action], by_layer: &[f64]) -> Vec<f64> {
    let routed: Vec<u32> = model.moe_layers().collect();
    let of_stage = |stage: Stage| {
        let layers = stages[stage.0 as usize].iter();
        layers.filter_map(|layer| Some(by_layer[routed.binary_search(layer).ok()?]))
    };
    let passes = actions.iter().flat_map(|action| action.passes());
    let forward = passes.filter_map(|pass| match pass {
        Action::Forward(stage, _) => Some(stage),
        _ => None,
    });
    forward.flat_map(of_stage).collect()
}

/// Lets each pass that begins with a message wait until the rank that sends it has come so far: `starts` says
/// when the rank's passes begin. Messages are in the order of the schedule.
fn wait_for_messages(events: Vec<Event>, actions: &[Action], starts: &[Instant]) -> Vec<Event> {
    let mut starts = starts.iter();
    let mut messages = Vec::new();
    let mut received = None;
    for action in actions {
        match action {
            Action::RecvActivation(..) | Action::RecvGradient(..) => {
                received = Some(messages.len());
                messages.push(None);
            }
            Action::SendActivation(..) | Action::SendGradient(..) => messages.push(None),
            _ => {
                let start = starts.next().copied();
                if let Some(message) = received.take() {
                    messages[message] = start;
                }
            }
        }
    }
    let mut messages = messages.into_iter();
    let mut waiting: BTreeMap<u64, Instant> = BTreeMap::new();
    let mut all = Vec::with_capacity(events.len());
    for event in events {
        let mut start = None;
        match &event {
            Event::Started {
                number, category, ..
            } if *category == Category::PpComm => {
                let received = messages.next().flatten();
                waiting.extend(received.map(|start| (*number, start)));
            }
            Event::Awaited { number } => start = waiting.remove(number),
            _ => {}
        }
        all.push(event);
        all.extend(start.map(Event::NotBefore));
    }
    all
}

/// Walks the step of a rank of a plan for this executor. `starts` says when its passes begin where other
/// pipeline ranks hold them up: see [`moefold_planner::search::starts`]. Where the plan was made for a recorded routing, the
/// rank is taken to be the fullest one in every microbatch; else routing is balanced. Samples are packed as said.
pub fn dry_run(
    plan: &Plan,
    rank: u32,
    balancing: Balancing,
    packing: Packing,
    costs: &Costs,
    starts: &[Instant],
) -> Result<Walked, Error> {
    let (planned, model, cluster) = (&plan.planned, &plan.model, &plan.cluster);
    let batch = &plan.request.batch;
    let layout = prove(planned, model, batch)?;
    let dtype = planned.precision.activation();
    let (device, spec) = match properties(cluster) {
        None => (Device::meta_cpu(), DeviceSpec::CPU),
        Some(gpu) => {
            let reserve = None;
            (
                Device::meta_cuda(gpu, dtype),
                DeviceSpec::Cuda { dtype, reserve },
            )
        }
    };
    support::check(planned, model, &spec)?;
    support::check_packing(planned, packing)?;
    let tape = Tape::default();
    let stages = &planned.pipeline.stages[..];
    let domain = |kind| match kind {
        Some(kind) => mesh::placement(&layout, kind, cluster).ranks_per_domain,
        None => cluster.gpus_per_domain.clamp(1, layout.gpus()),
    };
    let savers = Savers::of(planned);
    let schedule = savers.schedule_of(&layout);
    let actions = &schedule.ranks[mesh::coordinates(&layout, rank).pp as usize];
    let assumed = match &planned.predicted.routing {
        Some(PlannedRouting::Recorded { fullest, .. }) => {
            Assumed::Loads(by_router(model, stages, actions, fullest).into())
        }
        Some(PlannedRouting::Balanced { .. }) | None => Assumed::BALANCED,
    };
    let cx = rank_on(device, &layout, rank, assumed, &domain, &tape);
    let [setup, events] = step(cx, model, stages, batch, &savers, balancing, packing, &tape)?;
    let events = wait_for_messages(events, actions, starts);
    let stack = Stack::on(planned.stack, cluster, costs.host());
    let mut walked = play(rank, &setup, &events, costs, &stack);
    let overhead = planned.predicted.memory_gib[TensorClass::Overhead];
    walked.walk.bytes[TensorClass::Overhead] = Bytes((overhead * GIB as f64).round() as u64);
    Ok(walked)
}
