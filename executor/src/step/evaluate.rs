//! What of a step is forward alone: evaluation, and the routing that tests look at.

use moefold_planner::schedule::{Action, Microbatch, Stage};

use super::{Direction, HostTokens, LOSS, Progress, Stepper, Weights};
use crate::error::Error;
use crate::moe::{Load, RoutingStats};
use crate::rank::Context;
use crate::stage::StageOutput;
use crate::turns::now;

impl Stepper {
    /// The sum of token cross entropies of a global batch of which the rank has some microbatches, and how many
    /// tokens have one, the same on every rank. It runs the forward passes of a step and leaves the state of training as it is. What a pass saves is
    /// let go of before the next: at the same routing this takes no more memory than a step.
    pub fn evaluate(&self, cx: &Context, microbatches: &[HostTokens]) -> Result<[f64; 2], Error> {
        let counted = self.forwards(cx, microbatches, &mut |progress, stage, microbatch| {
            self.forward(cx, progress, stage, microbatch)?;
            progress.saved.clear();
            Ok(())
        })?;
        cx.recorder.at_microbatch(None);
        self.sum_over_ranks(cx)?;
        let sums = cx.to_host("sums_to_host", || self.sums.read());
        Ok([sums[LOSS], counted])
    }

    /// Runs the rank's stages forward and gives the routing of each MoE layer and microbatch, in the order of a
    /// step: for tests.
    pub fn routing(
        &self,
        cx: &Context,
        microbatches: &[HostTokens],
    ) -> Result<Vec<RoutingStats>, Error> {
        let mut all = Vec::new();
        self.forwards(cx, microbatches, &mut |progress, stage, microbatch| {
            let tokens = &progress.tokens[microbatch.0 as usize];
            let tokens = self.tokens(tokens, progress.loss_scale);
            let input = progress.between.remove(&(stage, microbatch));
            let routed = |_, stats: RoutingStats| {
                let load = Load::Known(stats.load.read());
                all.push(RoutingStats { load, ..stats });
            };
            let mut weights = Weights {
                stepper: self,
                gathering: &mut progress.gathering,
                reducing: &mut progress.reducing,
                is_last: false,
            };
            let built = &self.stages[&stage];
            let pass = built.forward(cx, input, &tokens, &mut weights, routed);
            let (output, _) = now(pass)?;
            if let StageOutput::Hidden(output) = output {
                let there = Self::passed_on(cx, Direction::Forward, (stage, microbatch));
                progress.between.insert(there, output);
            }
            Ok(())
        })?;
        Ok(all)
    }

    /// Walks what of a step is forward, `pass` by pass. Gives the tokens of the global batch that have a loss.
    fn forwards(
        &self,
        cx: &Context,
        microbatches: &[HostTokens],
        pass: &mut dyn FnMut(&mut Progress, Stage, Microbatch) -> Result<(), Error>,
    ) -> Result<f64, Error> {
        let mut progress = self.begin(cx, microbatches)?;
        for &action in &self.actions {
            match action {
                Action::RecvActivation(..) | Action::SendActivation(..) => {
                    self.accumulate(cx, &mut progress, action)?;
                }
                Action::Forward(stage, microbatch)
                | Action::Combined {
                    forward: (stage, microbatch),
                    ..
                } => {
                    cx.recorder.at_microbatch(Some(microbatch.0));
                    pass(&mut progress, stage, microbatch)?;
                }
                _ => {}
            }
        }
        Self::settle(cx, std::mem::take(&mut progress.sent))?;
        Ok(progress.counted)
    }
}
