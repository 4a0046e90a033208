//! Training as a measurement: layouts are run for some steps, and what their ops and collectives took is a
//! profile. They train on the user's own data where there are some ([`Course`]), since data and how fast routers
//! learn decide how evenly tokens go to experts, else on random tokens.
//!
//! Nothing else meets what training meets. Some operands are still in a cache, some memory is touched for
//! the first time. Other ranks run beside, and take turns where cores are too few. The host does something
//! between two ops, and ranks drift apart. A model that is too large for the time or the machine is
//! rehearsed with two layers of each kind and one microbatch, or as many as its pipeline needs. The keys of
//! its layers are the same.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use moefold_planner::choice::{Recompute, RecomputePlan};
use moefold_planner::layout::Batch;
use moefold_planner::model::{Layer, Model, count};
use moefold_planner::plan::{LayoutRecord, Plan, PlannedLayout};
use moefold_profiles::Profile;
use moefold_profiles::directory::{Key, Sample};
use moefold_profiles::presets::Machine;

use super::training::{folded, thinned};
use crate::data::Samples;
use crate::device::DeviceSpec;
use crate::environment::Environment;
use crate::error::Error;
use crate::options::{Init, TrainOptions};
use crate::train::{self, Trained};
use crate::unpriced;

/// Steps of a rehearsal, at least, and on random tokens at most.
const STEPS: [u64; 2] = [4, 25];
/// What a core is taken to compute until a step was timed, FLOP/s: the low end of products in f32.
const ASSUMED_FLOPS: f64 = 20e9;
/// Bytes of a parameter in training in f32: weight, gradient, two moments.
const PARAMETER_BYTES: u64 = 16;

/// A layout to rehearse.
#[derive(Debug, Clone)]
pub struct Rehearsal {
    /// What is trained.
    pub model: Model,
    /// Sequences of a step, and their length.
    pub batch: Batch,
    /// A legal layout of both and all that is chosen beside it, which [`crate::support`] does not refuse.
    pub planned: PlannedLayout,
}

/// A training to rehearse as it is to be: the steps that it begins with, as many as there is time for.
#[derive(Debug, Clone, Copy)]
pub struct Course<'a> {
    /// What it trains on, in sequences as long as those of the rehearsals' batches.
    pub samples: &'a Samples,
    /// How. Weights are random, whatever this says they begin with; device, trace and checkpoints are no part of it.
    pub options: &'a TrainOptions,
}

/// What rehearsals gave.
#[derive(Debug, Clone)]
pub struct Rehearsed {
    /// Samples of all of them; nothing where none was run.
    pub profile: Option<Profile>,
    /// Rehearsals left out: too large for this machine, or there was no time for them.
    pub left_out: usize,
    /// Seconds of each step of the last that was run.
    pub step_s: Vec<f64>,
}

/// Runs rehearsals on ranks that are threads of this process, within `budget` where each takes no longer
/// than its share: of a training of the user's, or on random tokens. `done` is called after each.
pub fn rehearse(
    rehearsals: &[Rehearsal],
    course: Option<Course<'_>>,
    device: DeviceSpec,
    budget: Duration,
    done: &dyn Fn(usize),
) -> Result<Rehearsed, Error> {
    let began = Instant::now();
    let ranks = rehearsals.first().map_or(1, Rehearsal::ranks);
    let environment = Environment::detect(ranks, &device);
    let (mut profiles, mut step_s) = (Vec::new(), Vec::new());
    for (index, rehearsal) in rehearsals.iter().enumerate() {
        let left = budget.saturating_sub(began.elapsed());
        let share = left.div_f64((rehearsals.len() - index) as f64);
        if let Some(fitting) = rehearsal.fitting(share) {
            let trained = fitting.run(course, device, share)?;
            profiles.push(trained.measured.profile(&environment));
            step_s = trained.steps.iter().map(|step| step.step_s).collect();
        }
        done(index + 1);
    }
    Ok(Rehearsed {
        left_out: rehearsals.len() - profiles.len(),
        profile: merged(profiles),
        step_s,
    })
}

impl Rehearsal {
    /// Of what a plan says, all of it.
    pub fn of(plan: &Plan) -> Self {
        Self {
            model: plan.model.clone(),
            batch: plan.request.batch,
            planned: plan.planned.clone(),
        }
    }

    /// Of a legal layout, with nothing chosen beside it.
    pub fn of_layout(model: &Model, batch: Batch, layout: LayoutRecord) -> Self {
        Self {
            model: model.clone(),
            batch,
            planned: unpriced::planned(model, layout),
        }
    }

    /// The same of fewer layers and microbatches.
    fn short(&self) -> Self {
        let LayoutRecord { pp, vpp, .. } = self.planned.layout;
        let kept = two_of_each(&self.model, &self.planned.recompute);
        // A layer for each stage, and what interleaved stages take at once.
        let layers = kept.len().max((pp * vpp) as usize);
        let kept: Vec<u32> = kept.into_iter().cycle().take(layers).collect();
        let mut short = self.clone();
        let layer = |&number: &u32| self.model.layers[number as usize].clone();
        short.model.layers = kept.iter().map(layer).collect();
        let microbatches = match self.planned.pipeline.schedule {
            // Of fewer none is left to run beside another.
            schedule if schedule.combines() => 2 * pp,
            _ if vpp > 1 => pp,
            _ => 1,
        };
        short.batch.global_batch =
            (self.planned.layout.mbs * self.planned.layout.dp * microbatches).into();
        let planned = &mut short.planned;
        planned.layout.microbatches = microbatches;
        planned.pipeline.stages = unpriced::planned(&short.model, planned.layout)
            .pipeline
            .stages;
        let again = |&number: &u32| self.planned.recompute.of_layer(number).clone();
        planned.recompute = RecomputePlan::by_layer(kept.iter().map(again).collect());
        short
    }

    /// The same as far as it fits into the machine and the time.
    fn fitting(&self, share: Duration) -> Option<Self> {
        let fits = |rehearsal: &Self| {
            let machine = Machine::detect();
            let parameters = count::params(&rehearsal.model).total();
            let bytes = u64::from(rehearsal.ranks()) * parameters * PARAMETER_BYTES;
            let tokens = rehearsal.batch.global_batch * rehearsal.batch.seq_len;
            let flops = count::flops_per_token(&rehearsal.model, rehearsal.batch.seq_len).0;
            let step_s = flops * tokens as f64 / ASSUMED_FLOPS / f64::from(machine.cores);
            bytes < machine.memory.0 / 2 && step_s * STEPS[0] as f64 <= share.as_secs_f64()
        };
        let whole = fits(self).then(|| self.clone());
        whole.or_else(|| Some(self.short()).filter(fits))
    }

    fn ranks(&self) -> u32 {
        let layout = &self.planned.layout;
        layout.tp * layout.cp * layout.pp * layout.dp
    }

    /// Trains for as many steps as there is time for: some, to see how long they take, and then the rest twice. The first time
    /// memory is touched that the second finds, as most steps of a long training do.
    fn run(
        &self,
        course: Option<Course<'_>>,
        device: DeviceSpec,
        share: Duration,
    ) -> Result<Trained, Error> {
        let began = Instant::now();
        let first = self.train(course, device, STEPS[0])?;
        let left = share.saturating_sub(began.elapsed()).as_secs_f64();
        let step_s = began.elapsed().as_secs_f64() / STEPS[0] as f64;
        let steps = (left / step_s / 2.0) as u64;
        let most = course.map_or(STEPS[1], |course| course.options.steps);
        let steps = steps.min(most);
        if steps <= STEPS[0] {
            return Ok(first);
        }
        self.train(course, device, steps)?;
        self.train(course, device, steps)
    }

    fn train(
        &self,
        course: Option<Course<'_>>,
        device: DeviceSpec,
        steps: u64,
    ) -> Result<Trained, Error> {
        let (random, drawn);
        let Course { samples, options } = if let Some(course) = course {
            course
        } else {
            random = Samples::random(self.model.vocab_size, &self.batch, steps)?;
            drawn = TrainOptions::unpractised(STEPS[1], device);
            Course {
                samples: &random,
                options: &drawn,
            }
        };
        let options = TrainOptions {
            steps,
            init: Init::Random,
            device,
            traced_steps: 0..0,
            save: None,
            ..options.clone()
        };
        let Self {
            model,
            batch,
            planned,
        } = self;
        train::run(planned, model, batch, &options, samples, &|_| ())
    }
}

/// Two layers of each kind, by what they are and what they compute again, in the order in which kinds first come.
fn two_of_each(model: &Model, recompute: &RecomputePlan) -> Vec<u32> {
    let mut kept: Vec<(u32, (&Layer, &Recompute))> = Vec::new();
    for (number, layer) in (0..).zip(&model.layers) {
        let kind = (layer, recompute.of_layer(number));
        if kept.iter().filter(|(_, other)| *other == kind).count() < 2 {
            kept.push((number, kind));
        }
    }
    kept.into_iter().map(|(number, _)| number).collect()
}

/// One profile of several of this machine and number of ranks: a key has the timings of all.
fn merged(profiles: Vec<Profile>) -> Option<Profile> {
    let mut profiles = profiles.into_iter();
    let mut first = profiles.next()?;
    let mut by_key: BTreeMap<Key, Sample> = BTreeMap::new();
    let samples = std::mem::take(&mut first.samples);
    for sample in samples
        .into_iter()
        .chain(profiles.flat_map(|profile| profile.samples))
    {
        match by_key.get_mut(&sample.key) {
            Some(known) => {
                known.seconds.extend(sample.seconds);
                known.waits.extend(sample.waits);
            }
            None => drop(by_key.insert(sample.key, sample)),
        }
    }
    first.samples = by_key
        .into_values()
        .map(|sample| Sample {
            seconds: thinned(&sample.seconds),
            waits: folded(&sample.waits),
            ..sample
        })
        .collect();
    Some(first)
}

#[cfg(test)]
mod tests {
    use moefold_planner::choice::{Dispatcher, ScheduleName};
    use moefold_planner::schedule::Schedule;
    use moefold_profiles::Op;
    use moefold_profiles::directory::Taken;

    use super::*;
    use crate::data::{Order, TokenStream};

    const ONE_THREAD: DeviceSpec = DeviceSpec::Cpu {
        threads_per_rank: Some(1),
    };

    fn rehearsal() -> Rehearsal {
        let plan = crate::testing::plan();
        let layout = LayoutRecord {
            dp: 2,
            ep: 2,
            microbatches: 2,
            ..plan.planned.layout
        };
        Rehearsal::of_layout(&plan.model, plan.request.batch, layout)
    }

    #[test]
    fn training_measures_every_op_collective_and_the_host() {
        let both = [rehearsal(), rehearsal()];
        let done = std::cell::Cell::new(0);
        let rehearsed = rehearse(&both, None, ONE_THREAD, Duration::from_mins(5), &|n| {
            done.set(n);
        });
        let rehearsed = rehearsed.expect("trains");
        assert_eq!((rehearsed.left_out, done.get()), (0, 2));
        assert!(rehearsed.step_s.len() as u64 >= STEPS[0]);
        let profile = rehearsed.profile.expect("there is one");
        assert_eq!(profile.concurrent_ranks, both[0].ranks());
        let mut keys: Vec<Key> = profile.samples.iter().map(|sample| sample.key).collect();
        keys.dedup();
        assert_eq!(keys.len(), profile.samples.len(), "a sample a key");
        assert!(
            profile
                .samples
                .iter()
                .all(|sample| sample.taken == Taken::Training)
        );
        for stem in ["gemm", "attention", "rms_norm", "adamw", "launch"] {
            assert!(
                keys.iter().any(|key| key.stem() == stem),
                "no {stem} in {keys:?}"
            );
        }
        let collectives = || {
            let all = profile.samples.iter();
            all.filter(|sample| matches!(sample.key, Key::Collective(_)))
        };
        assert!(collectives().count() > 0);
        assert!(collectives().all(|sample| !sample.waits.is_empty()));
    }

    /// Where all tokens are one, all go to the same experts: of every grouped product the rows are none or a multiple
    /// of all tokens of the ranks. Of random tokens they are not.
    #[test]
    fn a_course_trains_on_its_own_data() {
        let rehearsal = rehearsal();
        let layout = &rehearsal.planned.layout;
        let tokens = rehearsal.batch.seq_len * u64::from(layout.mbs * layout.ep);
        let stream = TokenStream::of_ids("one", vec![5; 1000]);
        let vocab = rehearsal.model.vocab_size;
        let samples = Samples::new(stream, rehearsal.batch.seq_len, vocab, Order::TokenStream);
        let samples = samples.expect("long enough");
        let options = TrainOptions::unpractised(STEPS[0], ONE_THREAD);
        let course = Course {
            samples: &samples,
            options: &options,
        };
        let uneven = |course| {
            let trained = rehearsal.train(course, ONE_THREAD, STEPS[0]);
            let measured = trained.expect("trains").measured;
            let rows = measured
                .samples
                .iter()
                .filter_map(|sample| match sample.key {
                    Key::Op(Op::GroupedGemm { rows, .. }) => Some(rows),
                    _ => None,
                });
            rows.filter(|rows| rows % tokens != 0).count()
        };
        assert_eq!(uneven(Some(course)), 0);
        assert!(uneven(None) > 0);
    }

    #[test]
    fn what_is_too_large_is_cut_down_or_left_out() {
        let whole = rehearsal();
        let mut deep = whole.clone();
        let layers = whole.model.layers.iter().cycle();
        deep.model.layers = layers.take(100_000).cloned().collect();
        let cut = deep
            .fitting(Duration::from_mins(5))
            .expect("it fits when cut");
        let kept = two_of_each(&whole.model, &whole.planned.recompute);
        assert_eq!(cut.model.layers.len(), kept.len());
        assert_eq!(cut.planned.layout.microbatches, 1);
        let left =
            rehearse(&[deep], None, ONE_THREAD, Duration::ZERO, &|_| ()).expect("nothing fails");
        assert!(left.left_out == 1 && left.profile.is_none());
    }

    /// Tokens that are gathered are no exchange, a layer that computes again runs its norms once more, and what is cut
    /// down keeps all of it.
    #[test]
    fn what_a_plan_chooses_is_rehearsed() {
        let mut chosen = rehearsal();
        chosen.planned.dispatcher = Dispatcher::Allgather;
        chosen.planned.recompute = Recompute::Full.into();
        for rehearsal in [&chosen, &chosen.short()] {
            let trained = rehearsal.train(None, ONE_THREAD, STEPS[0]);
            let measured = trained.expect("trains").measured;
            let stems = || measured.samples.iter().map(|sample| sample.key.stem());
            assert!(stems().any(|stem| stem == "all_gather"));
            assert!(!stems().any(|stem| stem == "all_to_all"));
            assert_eq!(rehearsal.planned.recompute.alike(), Some(&Recompute::Full));
        }
        // One layer of a kind that computes again, and the next that does not, are two kinds.
        chosen.model.layers = vec![chosen.model.layers[0].clone(); 6];
        chosen.planned.recompute =
            RecomputePlan::by_layer([vec![Recompute::Full; 3], vec![Recompute::None; 3]].concat());
        assert_eq!(
            two_of_each(&chosen.model, &chosen.planned.recompute),
            [0, 1, 3, 4]
        );
        let short = chosen.short().planned.recompute;
        assert_eq!(short.groups(), [(&Recompute::Full, vec![0, 1])]);
    }

    /// Of every schedule, cut down to a layer a stage.
    #[test]
    fn what_is_cut_down_is_legal_under_every_schedule() {
        for schedule in ScheduleName::ALL {
            let [pp, vpp] = match schedule {
                ScheduleName::None => [1, 1],
                ScheduleName::Interleaved => [2, 2],
                _ if schedule.is_vee() => [2, 2],
                _ => [2, 1],
            };
            let mut whole = rehearsal();
            let layers = whole.model.layers.iter().cycle().take(8);
            whole.model.layers = layers.cloned().collect();
            let layout = LayoutRecord {
                pp,
                vpp,
                ..whole.planned.layout
            };
            let mut whole = Rehearsal::of_layout(&whole.model, whole.batch, layout);
            whole.planned.pipeline.schedule = schedule;
            train::prove(&whole.planned, &whole.model, &whole.batch).expect("the whole is legal");
            let short = whole.short();
            let found = train::prove(&short.planned, &short.model, &short.batch);
            let layout = found.unwrap_or_else(|error| panic!("{schedule:?}: {error}"));
            let pipeline = &short.planned.pipeline;
            assert_eq!(pipeline.schedule, schedule);
            assert_eq!(pipeline.stages.len() as u32, pp * vpp);
            Schedule::of(&layout, schedule)
                .validate()
                .expect("it can run");
        }
    }
}
