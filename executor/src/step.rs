//! [`Stepper`]: one training step, as the interpretation of `planner`'s schedule.
//!
//! The order of work is data: this module does what each [`Action`] says and decides nothing. What a
//! stage saves between an action's forward and its backward is an explicit value here, by stage and
//! microbatch. Losses and the gradient's norm stay on the device, where the update reads them, until
//! the step has been asked for in full, and so do row counts where no other rank is to know them: within a
//! step only those that decide what is sent come to the host.
//!
//! Between stages of different ranks the residual stream and its gradient are messages. A send waits for
//! nobody; what was sent stays until the next message of its direction to the same rank, or until gradients are reduced, so
//! that how much memory messages take does not depend on when they are received.

mod counts;
mod evaluate;
mod tokens;

use std::collections::BTreeMap;
use std::pin::pin;

use moefold_kernels::attention::Sequences;
use moefold_kernels::rope::Rope;
use moefold_kernels::{Scalars, Tensor, TensorClass};
use moefold_planner::model::Model;
use moefold_planner::schedule::{Action, Microbatch, Stage};
use moefold_profiles::trace::Category;
use moefold_profiles::units::Bytes;

use crate::data::NONE;
use crate::error::Error;
use crate::later::WeightGradients;
use crate::model::Unit;
use crate::moe::balance::Biases;
use crate::moe::dispatch::Dispatching;
use crate::moe::{Balance, Load, RoutingStats, ZLoss};
use crate::optimizer::{Gathering, Pass, Reducing, ZeroAdam};
use crate::rank::Context;
use crate::rotary::Rotation;
use crate::stage::{StageModel, StageOutput, StageSaved, Tokens, Visitor};
use crate::store::Store;
use crate::transport::Pending;
use crate::turns::{now, turn};

use counts::{Counts, add_load, beyond, place};
pub(crate) use counts::{keep_offsets, offsets, routers};
use tokens::DeviceTokens;
pub use tokens::HostTokens;
pub(crate) use tokens::{rotations, upload};

/// What a step did, the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    /// Mean token cross entropy of the global batch, over the tokens that have a loss.
    pub loss: f64,
    /// The same of each depth of multi-token prediction, over as many tokens; those that predict nothing count as
    /// zero (DeepSeek-V3, arXiv 2412.19437, equation 24).
    pub mtp_losses: Vec<f64>,
    /// Load-balancing losses with their coefficients, the mean over microbatches of the sum over layers.
    pub aux_loss: f64,
    /// The same of the z-loss.
    pub z_loss: f64,
    /// Global L2 norm of the gradients before clipping.
    pub grad_norm: f64,
    /// Tokens that chose each expert `[MoE layers, experts]`.
    pub expert_load: Vec<Vec<u64>>,
    /// Choices dropped for capacity `[MoE layers]`; empty where experts take all.
    pub dropped: Vec<u64>,
}

/// The state of one rank between steps.
#[derive(Debug)]
pub struct Stepper {
    /// Weights and gradients.
    pub store: Store,
    /// States and masters of the rank's shards.
    pub optimizer: ZeroAdam,
    /// Correction biases of routers.
    pub(crate) biases: Biases,
    stages: BTreeMap<Stage, StageModel>,
    actions: Vec<Action>,
    rope: Rope,
    /// What the table was made of.
    rotation: Rotation,
    /// What a step sums up: see [`LOSS`] and the others.
    sums: Scalars,
    seq_len: usize,
    sequences: usize,
    hidden: usize,
    /// MoE layers of the model, with their experts; those of multi-token prediction last.
    routers: Vec<(u32, usize)>,
    /// Depths of multi-token prediction.
    depths: usize,
    /// Layers with experts beside those.
    moe_layers: usize,
    /// How tokens go to the experts.
    dispatching: Dispatching,
    /// Whether gradients of weights run behind the start of the next exchange of tokens.
    delays: bool,
    /// See [`Stepper::peaked`].
    peaked: Option<Microbatch>,
    /// See [`Stepper::exchanged`].
    exchanged: Vec<Vec<Vec<u64>>>,
}

/// Which way a message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Direction {
    /// The residual stream, to the next stage.
    Forward,
    /// Its gradient, to the stage before.
    Backward,
}

/// Numbers of [`Stepper::sums`]: the sum of token losses, the load-balancing losses, the squares of the
/// gradients, the z-losses, and the sums of token losses of each depth of multi-token prediction.
const LOSS: usize = 0;
const AUX_LOSS: usize = 1;
const SQUARES: usize = 2;
const Z_LOSS: usize = 3;
const DEPTHS: usize = 4;

/// Which of them has the token losses that a head gives, the model's first.
pub(crate) fn loss_at(number: usize) -> usize {
    match number {
        0 => LOSS,
        depth => DEPTHS + depth - 1,
    }
}

/// The sums of a step, zero, of a model with so many depths of multi-token prediction.
pub(crate) fn sums(cx: &Context, depths: usize) -> Scalars {
    Scalars::zeros(&cx.device, TensorClass::Transient, DEPTHS + depths)
}

/// What the actions of one step have gathered so far.
#[derive(Debug, Default)]
struct Progress {
    saved: BTreeMap<(Stage, Microbatch), StageSaved>,
    /// What divided backward passes have left.
    left: BTreeMap<(Stage, Microbatch), WeightGradients>,
    /// The residual stream or its gradient, between a message and a pass.
    between: BTreeMap<(Stage, Microbatch), Tensor>,
    /// The last message that was sent, by direction and the pipeline rank that it went to.
    sent: BTreeMap<(Direction, usize), (Pending, Tensor)>,
    /// Weights on their way.
    gathering: Gathering,
    /// Gradients on their way.
    reducing: Reducing,
    /// By microbatch.
    tokens: Vec<DeviceTokens>,
    /// Tokens of the global batch that have a loss.
    counted: f64,
    /// Weight of one token's loss: see [`Tokens::loss_scale`].
    loss_scale: f32,
    counts: Counts,
    /// The rank's peak so far, and the microbatch that came to it.
    peak: Bytes,
    peaked: Option<Microbatch>,
    reduced_stages: usize,
}

/// A pass of a microbatch: its stage, its tokens and the weight of one token's loss.
#[derive(Clone, Copy)]
struct PassOf<'a> {
    stage: Stage,
    microbatch: Microbatch,
    tokens: &'a DeviceTokens,
    loss_scale: f32,
}

/// Has weights there before they are used, and tells the optimizer of gradients that were added to.
struct Weights<'a> {
    stepper: &'a Stepper,
    gathering: &'a mut Gathering,
    reducing: &'a mut Reducing,
    /// Whether no later pass adds to gradients.
    is_last: bool,
}

impl Visitor for Weights<'_> {
    fn before(&mut self, cx: &Context, unit: Unit) -> Result<(), Error> {
        let Stepper {
            store, optimizer, ..
        } = self.stepper;
        optimizer.come_to(cx, &store.shard, self.gathering, unit, Pass::Forward)
    }

    fn before_backward(&mut self, cx: &Context, unit: Unit) -> Result<(), Error> {
        let Stepper {
            store, optimizer, ..
        } = self.stepper;
        optimizer.come_to(cx, &store.shard, self.gathering, unit, Pass::Backward)?;
        optimizer.clear_for(cx, &store.shard, self.reducing, unit)
    }

    fn added(&mut self, cx: &Context, unit: Unit) -> Result<(), Error> {
        let Stepper {
            store, optimizer, ..
        } = self.stepper;
        optimizer.added(cx, store, self.reducing, unit)?;
        if self.is_last {
            optimizer.whole(cx, store, self.reducing, unit)?;
        }
        Ok(())
    }
}

impl Stepper {
    /// A rank that runs `actions` on `stages`.
    pub fn new(
        cx: &Context,
        model: &Model,
        store: Store,
        stages: BTreeMap<Stage, StageModel>,
        (optimizer, biases): (ZeroAdam, Biases),
        (actions, dispatching): (Vec<Action>, Dispatching),
        seq_len: usize,
    ) -> Self {
        let sequences = cx.layout.mbs() as usize;
        Self {
            store,
            optimizer,
            biases,
            stages,
            actions,
            rope: rotations(cx, model, seq_len, sequences),
            rotation: Rotation::or_unread(model),
            sums: sums(cx, model.mtp.len()),
            seq_len,
            sequences,
            hidden: model.hidden as usize,
            routers: routers(model).collect(),
            depths: model.mtp.len(),
            moe_layers: model.num_moe_layers(),
            dispatching,
            delays: false,
            peaked: None,
            exchanged: Vec::new(),
        }
    }

    /// The same where gradients of weights run behind the start of the next exchange of tokens.
    #[must_use]
    pub fn delaying(mut self, delays: bool) -> Self {
        self.delays = delays;
        self
    }

    /// Runs one step on the rank's microbatches.
    pub fn step(
        &mut self,
        cx: &Context,
        microbatches: &[HostTokens],
        lr: f64,
    ) -> Result<StepOutcome, Error> {
        let mut outcome = None;
        let mut progress = self.begin(cx, microbatches)?;
        for action in self.actions.clone() {
            if action == Action::OptimizerStep {
                outcome = Some(self.update(cx, &mut progress, lr)?);
            } else {
                self.accumulate(cx, &mut progress, action)?;
            }
        }
        assert!(
            progress.saved.is_empty() && progress.between.is_empty() && progress.left.is_empty(),
            "a schedule runs every forward backward"
        );
        (self.peaked, self.exchanged) = (progress.peaked, progress.counts.exchanged);
        Ok(outcome.expect("a schedule ends in an optimizer step"))
    }

    /// The last microbatch of the last step in which the memory of this rank came to a new peak, where one did.
    pub fn peaked(&self) -> Option<Microbatch> {
        self.peaked
    }

    /// Of a microbatch of the last step, tokens sent to each expert by the ranks that exchange tokens with this
    /// one `[MoE layers, experts]`; none in layers of other stages.
    pub fn exchanged(&self, microbatch: Microbatch) -> &[Vec<u64>] {
        &self.exchanged[microbatch.0 as usize][..self.moe_layers]
    }

    /// Runs one step up to the update: leaves the gradients in the store, each shard complete where
    /// it is updated, and gives how many tokens of this rank went to each expert. For tests.
    pub fn gradients(
        &self,
        cx: &Context,
        microbatches: &[HostTokens],
    ) -> Result<Vec<Vec<u64>>, Error> {
        let mut progress = self.begin(cx, microbatches)?;
        for &action in self.actions.iter().filter(|&&a| a != Action::OptimizerStep) {
            self.accumulate(cx, &mut progress, action)?;
        }
        progress.counts.read_offsets(cx, &self.routers)?;
        Ok(progress.counts.load)
    }

    /// A step without any action done: nothing summed, its tokens on their way to the device.
    fn begin(&self, cx: &Context, microbatches: &[HostTokens]) -> Result<Progress, Error> {
        let (counted, loss_scale) = self.losses(cx, microbatches)?;
        cx.recorder.at_microbatch(None);
        let gathering = self.optimizer.gather(cx)?;
        self.sums.clear();
        self.stages.values().for_each(StageModel::begin_step);
        let routers = self.routers.iter();
        let none: Vec<Vec<u64>> = routers.map(|&(_, experts)| vec![0; experts]).collect();
        Ok(Progress {
            gathering,
            reducing: self.optimizer.reducing(),
            tokens: self.upload(cx, microbatches),
            counted,
            loss_scale,
            counts: Counts {
                offsets: offsets(cx, &self.dispatching, &self.routers, microbatches.len()),
                limits: vec![None; none.len()],
                dropped: vec![0; none.len()],
                exchanged: vec![none.clone(); microbatches.len()],
                load: none,
            },
            peak: cx.device.memory().peak_total(),
            ..Progress::default()
        })
    }

    /// Tokens of the global batch that have a loss, and the weight of one's loss ([`Tokens::loss_scale`]). Where not
    /// all have, ranks tell each other how many of theirs do.
    fn losses(&self, cx: &Context, microbatches: &[HostTokens]) -> Result<(f64, f32), Error> {
        if !microbatches.iter().any(|host| host.packing.eod_mask_loss) {
            let len = self.own_tokens(cx) as f32;
            let scale = 1.0 / (len * cx.layout.microbatches() as f32);
            return Ok((self.tokens_of_batch(cx), scale));
        }
        let targets = microbatches.iter().flat_map(|host| &host.targets);
        let mut counted = [targets.filter(|target| **target != NONE).count() as f64];
        cx.comm(Category::DpComm, "all_reduce", || {
            cx.world.all_reduce_f64(&mut counted)
        })?;
        // Ranks that share a model share its microbatches. Where no token counts, losses are zero anyway.
        let replicas = f64::from(cx.layout.dp());
        let counted = (counted[0] * replicas / cx.world.size() as f64).max(1.0);
        let averaged = replicas * f64::from(cx.layout.cp());
        Ok((counted, (averaged / counted) as f32))
    }

    /// An action that adds to gradients or completes them.
    fn accumulate(
        &self,
        cx: &Context,
        progress: &mut Progress,
        action: Action,
    ) -> Result<(), Error> {
        match action {
            Action::Forward(stage, microbatch) => {
                cx.recorder.at_microbatch(Some(microbatch.0));
                self.forward(cx, progress, stage, microbatch)
            }
            Action::Backward(stage, microbatch) => {
                self.backward(cx, progress, (stage, microbatch), self.delays)?;
                Self::note_peak(cx, progress, microbatch);
                Ok(())
            }
            Action::BackwardInput(stage, microbatch) => {
                // All of them are left, none for a next exchange.
                let pass = || self.backward(cx, progress, (stage, microbatch), false);
                let (ran, left) = cx.leaving_weights(pass);
                ran?;
                progress.left.insert((stage, microbatch), left);
                Self::note_peak(cx, progress, microbatch);
                Ok(())
            }
            Action::Combined { forward, backward } => {
                self.combined(cx, progress, forward, backward)?;
                Self::note_peak(cx, progress, backward.1);
                Ok(())
            }
            Action::BackwardWeight(stage, microbatch) => {
                cx.recorder.at_microbatch(Some(microbatch.0));
                let left = progress.left.remove(&(stage, microbatch));
                left.expect("gradients of inputs come before those of weights")
                    .run(&cx.recorder);
                Self::note_peak(cx, progress, microbatch);
                Ok(())
            }
            Action::RecvActivation(stage, microbatch) => {
                self.receive(cx, progress, Direction::Forward, (stage, microbatch))
            }
            Action::SendActivation(stage, microbatch) => {
                Self::send(cx, progress, Direction::Forward, (stage, microbatch))
            }
            Action::RecvGradient(stage, microbatch) => {
                self.receive(cx, progress, Direction::Backward, (stage, microbatch))
            }
            Action::SendGradient(stage, microbatch) => {
                Self::send(cx, progress, Direction::Backward, (stage, microbatch))
            }
            Action::ReduceGradients(_) => {
                cx.recorder.at_microbatch(None);
                Self::settle(cx, std::mem::take(&mut progress.sent))?;
                // The flat buffers hold all stages of the rank, so the last one reduces them.
                progress.reduced_stages += 1;
                if progress.reduced_stages == self.stages.len() {
                    let reducing = &mut progress.reducing;
                    self.optimizer.reduce_gradients(cx, &self.store, reducing)?;
                }
                Ok(())
            }
            Action::OptimizerStep => unreachable!("an update is not an accumulation"),
        }
    }

    /// Runs a stage backward; gradients of weights may run behind the start of its next exchange of tokens.
    fn backward(
        &self,
        cx: &Context,
        progress: &mut Progress,
        place: (Stage, Microbatch),
        delays: bool,
    ) -> Result<(), Error> {
        cx.recorder.at_microbatch(Some(place.1.0));
        let saved = progress.saved.remove(&place);
        let saved = saved.expect("a schedule runs a stage forward before backward");
        let dy = progress.between.remove(&place);
        // Where gradients rest divided, a shared matrix has those of the microbatch before until now.
        self.optimizer.settle(cx, &mut progress.reducing)?;
        let of = Self::pass_of(&progress.tokens, progress.loss_scale, place);
        let moving = (&mut progress.gathering, &mut progress.reducing);
        let pass = self.backward_pass(cx, of, (dy, saved), moving);
        let dx = if delays {
            cx.delay_weights();
            let mut pass = pin!(pass);
            let dx = loop {
                let ended = turn(pass.as_mut());
                cx.settle_weights();
                if let Some(dx) = ended {
                    break dx;
                }
            };
            cx.end_delay();
            dx?
        } else {
            now(pass)?
        };
        let there = Self::passed_on(cx, Direction::Backward, place);
        progress.between.extend(dx.map(|dx| (there, dx)));
        Ok(())
    }

    /// Runs one stage forward and one backward, of different microbatches, in turns: the one backward begins.
    fn combined(
        &self,
        cx: &Context,
        progress: &mut Progress,
        forward: (Stage, Microbatch),
        backward: (Stage, Microbatch),
    ) -> Result<(), Error> {
        let saved = progress.saved.remove(&backward);
        let saved = saved.expect("a schedule runs a stage forward before backward");
        let dy = progress.between.remove(&backward);
        let input = progress.between.remove(&forward);
        let of = |place| Self::pass_of(&progress.tokens, progress.loss_scale, place);
        let [ahead, back] = [forward, backward].map(of);
        // Weights that rest divided do not go with combined passes, so the one only waits for weights and the other
        // only tells of gradients.
        let (mut nothing, mut none) = (Gathering::default(), self.optimizer.reducing());
        let ahead = {
            let moving = (&mut progress.gathering, &mut none);
            self.forward_pass(cx, ahead, input, &mut progress.counts, moving)
        };
        let moving = (&mut nothing, &mut progress.reducing);
        let back = self.backward_pass(cx, back, (dy, saved), moving);
        let (mut ahead, mut back) = (pin!(ahead), pin!(back));
        let (mut output, mut dx) = (None, None);
        // The layers that they have come to.
        let (mut ahead_at, mut back_at) = (None, None);
        if self.delays {
            cx.delay_weights();
        }
        while output.is_none() || dx.is_none() {
            if dx.is_none() {
                cx.recorder.at_microbatch(Some(backward.1.0));
                cx.recorder.at_layer(back_at);
                dx = turn(back.as_mut()).transpose()?;
                back_at = cx.recorder.layer();
                cx.settle_weights();
            }
            if output.is_none() {
                cx.recorder.at_microbatch(Some(forward.1.0));
                cx.recorder.at_layer(ahead_at);
                output = turn(ahead.as_mut()).transpose()?;
                ahead_at = cx.recorder.layer();
            }
        }
        cx.recorder.at_layer(None);
        if self.delays {
            cx.end_delay();
        }
        if let Some((output, saved)) = output {
            progress.saved.insert(forward, saved);
            let there = Self::passed_on(cx, Direction::Forward, forward);
            let output = output.map(|output| (there, output));
            progress.between.extend(output);
        }
        let there = Self::passed_on(cx, Direction::Backward, backward);
        let dx = dx.flatten().map(|dx| (there, dx));
        progress.between.extend(dx);
        Ok(())
    }

    /// What a pass of a microbatch runs on.
    fn pass_of(
        tokens: &[DeviceTokens],
        loss_scale: f32,
        (stage, microbatch): (Stage, Microbatch),
    ) -> PassOf<'_> {
        PassOf {
            stage,
            microbatch,
            tokens: &tokens[microbatch.0 as usize],
            loss_scale,
        }
    }

    /// The gradient of a stage's input, unless the embedding took it.
    async fn backward_pass(
        &self,
        cx: &Context,
        of: PassOf<'_>,
        (dy, saved): (Option<Tensor>, StageSaved),
        (gathering, reducing): (&mut Gathering, &mut Reducing),
    ) -> Result<Option<Tensor>, Error> {
        let tokens = self.tokens(of.tokens, of.loss_scale);
        let mut weights = Weights {
            stepper: self,
            gathering,
            reducing,
            is_last: self.is_last(of.stage, of.microbatch),
        };
        let built = &self.stages[&of.stage];
        built.backward(cx, dy, &tokens, saved, &mut weights).await
    }

    /// Notes whether a backward pass of a microbatch came to a new peak.
    fn note_peak(cx: &Context, progress: &mut Progress, microbatch: Microbatch) {
        let peak = cx.device.memory().peak_total();
        if peak > progress.peak {
            (progress.peak, progress.peaked) = (peak, Some(microbatch));
        }
    }

    /// Whether a microbatch's backward pass is the last of a stage, and its gradients are whole after it; where
    /// the last is divided none is.
    fn is_last(&self, stage: Stage, microbatch: Microbatch) -> bool {
        let of_stage = |action: &&Action| match action {
            Action::Backward(own, _) => *own == stage,
            Action::Combined { backward, .. } => backward.0 == stage,
            _ => false,
        };
        self.actions.iter().rfind(of_stage) == Some(&Action::Backward(stage, microbatch))
    }

    /// Gathers weights that rest whole and that the last step left to the next: for whoever looks at them between
    /// steps.
    pub fn gather_weights(&self, cx: &Context) -> Result<(), Error> {
        self.optimizer.gather(cx)?.finish(cx)
    }

    /// The place between stages of what a pass gives: that of the pass until it is sent, or of the stage that goes on with it
    /// where this rank has both.
    fn passed_on(
        cx: &Context,
        direction: Direction,
        (stage, microbatch): (Stage, Microbatch),
    ) -> (Stage, Microbatch) {
        let places = cx.layout.places();
        let next = match direction {
            Direction::Forward if places.is_sent(stage.0) => stage.0,
            Direction::Backward if places.is_received(stage.0) => stage.0,
            Direction::Forward => stage.0 + 1,
            // The first stage gives nothing.
            Direction::Backward => stage.0.saturating_sub(1),
        };
        (Stage(next), microbatch)
    }

    /// Takes what a stage is to begin a pass with from the pipeline rank that has it.
    fn receive(
        &self,
        cx: &Context,
        progress: &mut Progress,
        direction: Direction,
        (stage, microbatch): (Stage, Microbatch),
    ) -> Result<(), Error> {
        cx.recorder.at_microbatch(Some(microbatch.0));
        let rows = self.own_tokens(cx) / cx.tp.size();
        let (dtype, dims) = (cx.device.dtype(), [rows, self.hidden]);
        let tensor = cx.device.empty(TensorClass::Activations, dtype, &dims);
        let (group, from) = match direction {
            Direction::Forward => (&cx.activations, stage.0 - 1),
            Direction::Backward => (&cx.gradients, stage.0 + 1),
        };
        let from = cx.layout.places().rank_of(from) as usize;
        cx.comm(Category::PpComm, "send_recv", || {
            group.receive(&tensor, from)
        })?;
        progress.between.insert((stage, microbatch), tensor);
        Ok(())
    }

    /// Sends what a pass of a stage gave to the pipeline rank that goes on with it.
    fn send(
        cx: &Context,
        progress: &mut Progress,
        direction: Direction,
        (stage, microbatch): (Stage, Microbatch),
    ) -> Result<(), Error> {
        cx.recorder.at_microbatch(Some(microbatch.0));
        let tensor = progress.between.remove(&(stage, microbatch));
        let tensor = tensor.expect("a schedule sends what a pass gave");
        let (group, to) = match direction {
            Direction::Forward => (&cx.activations, stage.0 + 1),
            Direction::Backward => (&cx.gradients, stage.0 - 1),
        };
        let to = cx.layout.places().rank_of(to) as usize;
        Self::settle(cx, progress.sent.remove_entry(&(direction, to)))?;
        let pending = cx.comm(Category::PpComm, "send_recv", || {
            group.start_send(&tensor, to)
        })?;
        progress.sent.insert((direction, to), (pending, tensor));
        Ok(())
    }

    /// Lets go of messages once they have left.
    fn settle(
        cx: &Context,
        sent: impl IntoIterator<Item = ((Direction, usize), (Pending, Tensor))>,
    ) -> Result<(), Error> {
        for (_, (pending, tensor)) in sent {
            cx.comm(Category::PpComm, "send_recv", || pending.wait())?;
            drop(tensor);
        }
        Ok(())
    }

    /// The optimizer's step on complete gradients, and what all ranks are to know of the step.
    fn update(
        &mut self,
        cx: &Context,
        progress: &mut Progress,
        lr: f64,
    ) -> Result<StepOutcome, Error> {
        cx.recorder.at_microbatch(None);
        self.optimizer.add_squares(cx, &self.sums, SQUARES);
        self.sum_over_ranks(cx)?;
        self.optimizer.step(cx, lr, &self.sums, SQUARES)?;
        let mut outcome = self.outcome(cx, progress)?;
        self.biases.step(&self.store, &outcome.expert_load);
        outcome.expert_load.truncate(self.moe_layers);
        // The same on every rank, so all stop here, with weights that are of no use any more.
        if !(outcome.loss.is_finite() && outcome.grad_norm.is_finite()) {
            return Err(Error::Diverged {
                loss: outcome.loss,
                grad_norm: outcome.grad_norm,
            });
        }
        Ok(outcome)
    }

    fn forward(
        &self,
        cx: &Context,
        progress: &mut Progress,
        stage: Stage,
        microbatch: Microbatch,
    ) -> Result<(), Error> {
        let place = (stage, microbatch);
        let input = progress.between.remove(&place);
        let of = Self::pass_of(&progress.tokens, progress.loss_scale, place);
        let moving = (&mut progress.gathering, &mut progress.reducing);
        let pass = self.forward_pass(cx, of, input, &mut progress.counts, moving);
        let (output, saved) = now(pass)?;
        progress.saved.insert(place, saved);
        let there = Self::passed_on(cx, Direction::Forward, place);
        let output = output.map(|output| (there, output));
        progress.between.extend(output);
        Ok(())
    }

    /// What a stage gives the next one, and what it saves.
    async fn forward_pass(
        &self,
        cx: &Context,
        of: PassOf<'_>,
        input: Option<Tensor>,
        counts: &mut Counts,
        (gathering, reducing): (&mut Gathering, &mut Reducing),
    ) -> Result<(Option<Tensor>, StageSaved), Error> {
        let microbatch = of.microbatch.0 as usize;
        let Counts {
            load,
            offsets,
            limits,
            dropped,
            exchanged,
        } = counts;
        let exchanged = &mut exchanged[microbatch];
        let offsets = offsets.as_ref();
        let offsets = offsets.map(|all| all.rows(microbatch..microbatch + 1));
        let routed = |layer: u32, stats: RoutingStats| {
            let router = self.routers.iter().position(|(routed, _)| *routed == layer);
            let router = router.expect("a MoE layer of the model");
            if let Some(offsets) = &offsets {
                let [start, words] = place(&self.routers, router);
                keep_offsets(cx, &stats, &offsets.view(start, &[words]));
            }
            limits[router] = stats.limit;
            if let Load::Known(known) = &stats.load {
                add_load(&mut load[router], known);
                dropped[router] += beyond(stats.limit, known);
            }
            exchanged[router] = stats.exchanged;
            if let Some(Balance {
                score_sums, logged, ..
            }) = &stats.balance
            {
                let factor = f64::from(cx.layout.microbatches());
                cx.op(Category::RouterPermute, || {
                    self.sums.add_products(AUX_LOSS, factor, score_sums, logged);
                });
            }
            if let Some(ZLoss { z, factor }) = &stats.z {
                cx.op(Category::RouterPermute, || {
                    self.sums.add_squares(Z_LOSS, *factor, z);
                });
            }
        };
        let tokens = self.tokens(of.tokens, of.loss_scale);
        let mut weights = Weights {
            stepper: self,
            gathering,
            reducing,
            is_last: false,
        };
        let built = &self.stages[&of.stage];
        let pass = built.forward(cx, input, &tokens, &mut weights, routed);
        let (output, saved) = pass.await?;
        let losses = match output {
            StageOutput::Losses(losses) => losses,
            StageOutput::Hidden(output) => return Ok((Some(output), saved)),
        };
        // TP ranks compute the same losses; one of them accounts for them.
        if cx.tp.index() == 0 {
            for (number, losses) in losses.iter().enumerate() {
                cx.op(Category::Dense, || {
                    self.sums.add_sum(loss_at(number), 1.0, losses);
                });
            }
        }
        Ok((None, saved))
    }

    /// Makes the sums those of all ranks, where they are.
    fn sum_over_ranks(&self, cx: &Context) -> Result<(), Error> {
        if cx.world.is_solo() {
            return Ok(());
        }
        cx.comm(Category::DpComm, "all_reduce", || {
            if let Some(sums) = self.sums.tensor() {
                return cx.world.all_reduce(sums);
            }
            let mut sums = self.sums.read();
            cx.world.all_reduce_f64(&mut sums)?;
            self.sums.write(&sums);
            Ok(())
        })?;
        Ok(())
    }

    /// What all ranks are to know of the step, from sums over all of them.
    fn outcome(&self, cx: &Context, progress: &mut Progress) -> Result<StepOutcome, Error> {
        let sums = cx.to_host("sums_to_host", || self.sums.read());
        progress.counts.read_offsets(cx, &self.routers)?;
        let counts = progress
            .counts
            .load
            .iter()
            .flatten()
            .chain(&progress.counts.dropped);
        let mut counts: Vec<f64> = counts.map(|&count| count as f64).collect();
        cx.comm(Category::DpComm, "all_reduce", || {
            cx.world.all_reduce_f64(&mut counts)
        })?;

        let microbatches = f64::from(cx.layout.microbatches() * cx.layout.dp());
        let tokens = progress.counted;
        let mut counts = counts.iter().map(|&count| count as u64);
        let load = progress.counts.load.iter();
        Ok(StepOutcome {
            loss: sums[LOSS] / tokens,
            mtp_losses: sums[DEPTHS..].iter().map(|sum| sum / tokens).collect(),
            aux_loss: sums[AUX_LOSS] / microbatches,
            z_loss: sums[Z_LOSS] / microbatches,
            grad_norm: sums[SQUARES].sqrt(),
            expert_load: load
                .map(|layer| counts.by_ref().take(layer.len()).collect())
                .collect(),
            dropped: match self.dispatching.capacity {
                None => Vec::new(),
                Some(_) => counts.take(self.moe_layers).collect(),
            },
        })
    }

    /// Tokens of a microbatch that the rank's tensor-parallel group has.
    fn own_tokens(&self, cx: &Context) -> usize {
        self.sequences * self.seq_len / cx.layout.cp() as usize
    }

    /// Tokens of a global batch.
    fn tokens_of_batch(&self, cx: &Context) -> f64 {
        let microbatches = f64::from(cx.layout.microbatches() * cx.layout.dp());
        microbatches * (self.sequences * self.seq_len) as f64
    }

    fn upload(&self, cx: &Context, microbatches: &[HostTokens]) -> Vec<DeviceTokens> {
        let size = [self.sequences, self.seq_len];
        let (rope, rotation) = (&self.rope, &self.rotation);
        upload(cx, size, self.depths, rope, rotation, microbatches)
    }

    fn tokens<'a>(&'a self, tokens: &'a DeviceTokens, loss_scale: f32) -> Tokens<'a> {
        let [ids, targets] = tokens.own.clone();
        Tokens {
            ids,
            targets,
            sequences: Sequences {
                count: self.sequences,
                documents: tokens.documents.as_ref(),
            },
            rope: tokens.rope.as_ref().unwrap_or(&self.rope),
            loss_scale,
            ahead: tokens.ahead.clone(),
        }
    }
}
