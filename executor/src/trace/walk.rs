//! [`step`]: one whole step of a rank, traced.

use std::rc::Rc;

use moefold_kernels::Device;
use moefold_planner::layout::{Batch, Layout};
use moefold_planner::mesh::{self, Coordinates, GroupKind};
use moefold_planner::model::Model;
use moefold_planner::walk::Event;

use super::peers::{Crowd, Groups};
use super::{Assumed, Tape};
use crate::data::Packing;
use crate::error::Error;
use crate::moe::balance::Balancing;
use crate::optimizer::AdamOptions;
use crate::options::{MTP_LOSS_SCALING_FACTOR, Savers};
use crate::rank::Context;
use crate::record::Recorder;
use crate::step::HostTokens;
use crate::train::{Trainer, Weights};
use crate::transport::CollectiveLog;

/// A rank of a layout on a meta device, whose peers do as it does. Everything it does goes on `tape`.
/// `domain` says of a group, or of all ranks, how many members share a memory domain at most.
pub fn rank_on(
    device: Device,
    layout: &Layout,
    rank: u32,
    assumed: Assumed,
    domain: &dyn Fn(Option<GroupKind>) -> u32,
    tape: &Tape,
) -> Context {
    let groups = Groups {
        layout,
        rank,
        crowd: crowd(&device, layout, &mesh::coordinates(layout, rank), assumed),
        domain,
        of_pieces: false,
    };
    context(device, &groups, tape)
}

/// As [`rank_on`], rank 0 for a piece of the model alone: without the groups that only a step needs.
pub(super) fn piece_on(device: Device, layout: &Layout, assumed: Assumed, tape: &Tape) -> Context {
    let groups = Groups {
        layout,
        rank: 0,
        crowd: crowd(&device, layout, &mesh::coordinates(layout, 0), assumed),
        domain: &|_| 1,
        of_pieces: true,
    };
    context(device, &groups, tape)
}

/// Who exchanges tokens with the rank, whose routers choose as it is assumed.
fn crowd(device: &Device, layout: &Layout, at: &Coordinates, assumed: Assumed) -> Rc<Crowd> {
    let crowd = Rc::new(Crowd::new(layout, at, assumed));
    crowd.route(device);
    crowd
}

fn context(device: Device, groups: &Groups<'_>, tape: &Tape) -> Context {
    let collectives = CollectiveLog::default();
    let group = |wanted| groups.of(wanted).noting(Some(collectives.clone()));
    Context::with_groups(
        groups.rank,
        groups.layout,
        device,
        Recorder::onto(tape),
        collectives.clone(),
        &group,
        Rc::default(),
    )
}

/// What a rank does to set itself up, and then in one step, with the layers of each stage as said. Its
/// device's peak is that of the step. `packing` is of its samples.
///
/// The model, the layout and what the device computes in must have passed [`crate::support::check`].
#[expect(
    clippy::too_many_arguments,
    reason = "what a step is made of, each of its own type"
)]
pub fn step(
    cx: Context,
    model: &Model,
    stages: &[Vec<u32>],
    batch: &Batch,
    savers: &Savers,
    balancing: Balancing,
    packing: Packing,
    tape: &Tape,
) -> Result<[Vec<Event>; 2], Error> {
    let (layout, adam) = (cx.layout, AdamOptions::default());
    // That of multi-token prediction decides nothing that is traced.
    let losses = Weights {
        balancing,
        mtp: MTP_LOSS_SCALING_FACTOR,
    };
    let mut trainer = Trainer::assemble(cx, model, stages, batch.seq_len, savers, adam, losses);
    let before = tape.take();
    trainer.cx.device.reset_peak();
    let len = layout.mbs() as usize * batch.seq_len as usize;
    let tokens = HostTokens::blank(len, packing);
    let microbatches = vec![tokens; layout.microbatches() as usize];
    trainer.step(&microbatches, 0.0)?;
    Ok([before, tape.take()])
}
