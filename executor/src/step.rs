//! [`Stepper`]: one training step, as the interpretation of `planner`'s schedule.
//!
//! The order of work is data: this module does what each [`Action`] says and decides nothing. What a
//! stage keeps between an action's forward and its backward is an explicit value here, by stage and
//! microbatch. Sends and receives between pipeline ranks are refused by [`crate::support`] so far.

use std::collections::BTreeMap;

use moefold_kernels::TensorClass;
use moefold_kernels::rope::{self, Rope};
use moefold_planner::model::{Mixer, Model};
use moefold_planner::schedule::{Action, Microbatch, Stage};
use moefold_profiles::trace::Category;

use crate::error::Error;
use crate::moe::RoutingStats;
use crate::optimizer::ZeroAdam;
use crate::rank::Context;
use crate::stage::{StageKept, StageModel, StageOutput, Tokens};
use crate::store::Store;

/// The host's copy of one microbatch of a rank: `sequences * seq_len` tokens each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostTokens {
    /// Inputs.
    pub ids: Vec<i32>,
    /// What each should predict.
    pub targets: Vec<i32>,
}

/// What a step did, the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutcome {
    /// Mean token cross entropy of the global batch.
    pub loss: f64,
    /// Load-balancing loss with its coefficient, the mean over microbatches of the sum over layers.
    pub aux_loss: f64,
    /// Global L2 norm of the gradients before clipping.
    pub grad_norm: f64,
    /// Tokens sent to each expert `[MoE layers, experts]`.
    pub expert_load: Vec<Vec<u64>>,
}

/// The state of one rank between steps.
#[derive(Debug)]
pub struct Stepper {
    /// Weights and gradients.
    pub store: Store,
    /// States and masters of the rank's shards.
    pub optimizer: ZeroAdam,
    stages: BTreeMap<Stage, StageModel>,
    actions: Vec<Action>,
    rope: Rope,
    seq_len: usize,
    sequences: usize,
}

/// What the actions of one step have gathered so far.
#[derive(Debug, Default)]
struct Progress {
    kept: BTreeMap<(Stage, Microbatch), StageKept>,
    /// Sum of the token losses this rank accounts for.
    loss: f64,
    aux_loss: f64,
    /// By MoE layer, in order.
    load: Vec<Vec<u64>>,
    reduced_stages: usize,
}

impl Stepper {
    /// A rank that runs `actions` on `stages`.
    pub fn new(
        cx: &Context,
        model: &Model,
        store: Store,
        stages: BTreeMap<Stage, StageModel>,
        optimizer: ZeroAdam,
        actions: Vec<Action>,
        seq_len: usize,
    ) -> Self {
        let sequences = cx.layout.mbs() as usize;
        Self {
            store,
            optimizer,
            stages,
            actions,
            rope: rotations(cx, model, seq_len, sequences),
            seq_len,
            sequences,
        }
    }

    /// Runs one step on the rank's microbatches.
    pub fn step(
        &mut self,
        cx: &Context,
        microbatches: &[HostTokens],
        lr: f64,
    ) -> Result<StepOutcome, Error> {
        let mut outcome = None;
        let mut progress = Progress::default();
        for action in self.actions.clone() {
            if action == Action::OptimizerStep {
                outcome = Some(self.update(cx, &progress, lr)?);
            } else {
                self.accumulate(cx, &mut progress, microbatches, action)?;
            }
        }
        assert!(
            progress.kept.is_empty(),
            "a schedule runs every forward backward"
        );
        Ok(outcome.expect("a schedule ends in an optimizer step"))
    }

    /// Runs one step up to the update: leaves the gradients in the store, each shard complete where
    /// it is updated, and gives how many tokens of this rank went to each expert. For tests.
    pub fn gradients(
        &self,
        cx: &Context,
        microbatches: &[HostTokens],
    ) -> Result<Vec<Vec<u64>>, Error> {
        let mut progress = Progress::default();
        for &action in self.actions.iter().filter(|&&a| a != Action::OptimizerStep) {
            self.accumulate(cx, &mut progress, microbatches, action)?;
        }
        Ok(progress.load)
    }

    /// An action that adds to gradients or completes them.
    fn accumulate(
        &self,
        cx: &Context,
        progress: &mut Progress,
        microbatches: &[HostTokens],
        action: Action,
    ) -> Result<(), Error> {
        match action {
            Action::Forward(stage, microbatch) => {
                cx.recorder.at_microbatch(Some(microbatch.0));
                let tokens = self.tokens(cx, microbatches, microbatch);
                self.forward(cx, progress, stage, microbatch, &tokens)
            }
            Action::Backward(stage, microbatch) => {
                cx.recorder.at_microbatch(Some(microbatch.0));
                let tokens = self.tokens(cx, microbatches, microbatch);
                let kept = progress.kept.remove(&(stage, microbatch));
                let kept = kept.expect("a schedule runs a stage forward before backward");
                self.stages[&stage].backward(cx, None, &tokens, kept)?;
                Ok(())
            }
            Action::ReduceGradients(_) => {
                cx.recorder.at_microbatch(None);
                // The flat buffers hold all stages of the rank, so the last one reduces them.
                progress.reduced_stages += 1;
                if progress.reduced_stages == self.stages.len() {
                    self.optimizer.reduce_gradients(cx, &self.store)?;
                }
                Ok(())
            }
            Action::OptimizerStep => unreachable!("an update is not an accumulation"),
            Action::RecvActivation(..)
            | Action::SendActivation(..)
            | Action::RecvGradient(..)
            | Action::SendGradient(..) => {
                unreachable!("support::check refuses plans with a pipeline")
            }
        }
    }

    /// The optimizer's step on complete gradients, and what all ranks are to know of the step.
    fn update(&mut self, cx: &Context, progress: &Progress, lr: f64) -> Result<StepOutcome, Error> {
        cx.recorder.at_microbatch(None);
        let outcome = self.globally(cx, progress)?;
        // The same on every rank, so all stop here with their weights as they were.
        if !(outcome.loss.is_finite() && outcome.grad_norm.is_finite()) {
            return Err(Error::Diverged {
                loss: outcome.loss,
                grad_norm: outcome.grad_norm,
            });
        }
        self.optimizer.step(cx, lr, outcome.grad_norm)?;
        Ok(outcome)
    }

    /// Runs one stage forward and gives what it keeps, with nothing recorded: for tests of what is
    /// kept and for measurements.
    pub fn forward_only(&self, cx: &Context, tokens: &HostTokens) -> Result<Vec<StageKept>, Error> {
        let tokens = self.tokens(cx, std::slice::from_ref(tokens), Microbatch(0));
        let mut all = Vec::with_capacity(self.stages.len());
        for stage in self.stages.values() {
            all.push(stage.forward(cx, None, &tokens, |_| ())?.1);
        }
        Ok(all)
    }

    fn forward(
        &self,
        cx: &Context,
        progress: &mut Progress,
        stage: Stage,
        microbatch: Microbatch,
        tokens: &Tokens<'_>,
    ) -> Result<(), Error> {
        let mut layer = 0;
        let routed = |stats: RoutingStats| {
            if progress.load.len() == layer {
                progress.load.push(vec![0; stats.load.len()]);
            }
            let sums = progress.load[layer].iter_mut();
            sums.zip(&stats.load).for_each(|(sum, count)| *sum += count);
            progress.aux_loss += stats.aux_loss;
            layer += 1;
        };
        let (output, kept) = self.stages[&stage].forward(cx, None, tokens, routed)?;
        progress.kept.insert((stage, microbatch), kept);
        match output {
            // TP ranks compute the same loss; one of them accounts for it.
            StageOutput::Loss(loss) if cx.tp.index() == 0 => progress.loss += loss,
            StageOutput::Loss(_) => {}
            StageOutput::Hidden(_) => unreachable!("support::check refuses plans with a pipeline"),
        }
        Ok(())
    }

    /// Sums over all ranks what every rank has to know.
    fn globally(&self, cx: &Context, progress: &Progress) -> Result<StepOutcome, Error> {
        let mut sums = vec![
            progress.loss,
            progress.aux_loss,
            self.optimizer.sum_squares(cx),
        ];
        sums.extend(progress.load.iter().flatten().map(|&count| count as f64));
        cx.comm(Category::DpComm, "all_reduce", || {
            cx.world.all_reduce_f64(&mut sums)
        })?;

        let microbatches = f64::from(cx.layout.microbatches() * cx.layout.dp());
        let tokens = microbatches * (self.sequences * self.seq_len) as f64;
        let mut counts = sums[3..].iter().map(|&count| count as u64);
        let load = progress.load.iter();
        Ok(StepOutcome {
            loss: sums[0] / tokens,
            aux_loss: sums[1] / microbatches,
            grad_norm: sums[2].sqrt(),
            expert_load: load
                .map(|layer| counts.by_ref().take(layer.len()).collect())
                .collect(),
        })
    }

    fn tokens(&self, cx: &Context, all: &[HostTokens], microbatch: Microbatch) -> Tokens<'_> {
        let host = &all[microbatch.0 as usize];
        let len = self.sequences * self.seq_len;
        let tensor = |values: &[i32]| cx.device.from_i32(TensorClass::Activations, values, &[len]);
        Tokens {
            ids: tensor(&host.ids),
            targets: tensor(&host.targets),
            sequences: self.sequences,
            rope: &self.rope,
            loss_scale: 1.0 / (len as f32 * cx.layout.microbatches() as f32),
        }
    }
}

/// Rotations of `sequences` sequences, each from position 0.
fn rotations(cx: &Context, model: &Model, seq_len: usize, sequences: usize) -> Rope {
    let rotary_dim = model.layers.iter().find_map(|layer| match &layer.mixer {
        Some(Mixer::Gqa(gqa)) if gqa.rotary_dim > 0 => Some(gqa.rotary_dim as usize),
        _ => None,
    });
    let positions: Vec<u32> = (0..sequences).flat_map(|_| 0..seq_len as u32).collect();
    // A model without rotations never reads the table.
    let theta = model.rope_theta.unwrap_or(1.0);
    rope::table(&cx.device, &positions, rotary_dim.unwrap_or(2), theta)
}
