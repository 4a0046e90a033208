//! [`Schedules`]: what the schedules of a search come to, each worked out once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rayon::prelude::*;

use super::moments::{Moment, moments};
use super::shape::{Question, by_key};
use super::watch::{Looks, Phase, Watch};
use crate::choice::ScheduleName;
use crate::layout::Layout;
use crate::memory::{self, Occupancy};
use crate::schedule::Schedule;
use crate::simulate::Simulator;

/// A schedule by its name, pipeline degree, virtual stages and microbatches.
type Key = (ScheduleName, [u32; 3]);

/// By pipeline rank, the instants at which it may hold most, and what is left of them where only numbers of layers are asked
/// about.
type Held = (Vec<Vec<Occupancy>>, Vec<Vec<Moment>>);

/// Passes of the simulators that are kept: about 60 MB, or half as much again where backward passes are divided.
const KEPT: u64 = 1 << 20;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Schedules {
    /// With microbatches as far as they matter.
    held: BTreeMap<Key, Held>,
    simulators: Mutex<Simulators>,
}

#[derive(Debug, Default)]
struct Simulators {
    known: BTreeMap<Key, Arc<OnceLock<Simulator>>>,
    passes: u64,
}

/// A schedule that may be simulated.
#[derive(Debug)]
pub(crate) struct Simulated {
    key: Key,
    simulator: Arc<OnceLock<Simulator>>,
}

impl Simulated {
    /// Its dependencies.
    pub(crate) fn simulator(&self) -> &Simulator {
        let (name, [pp, vpp, microbatches]) = self.key;
        let build = || Simulator::new(&Schedule::new(name, pp, vpp, microbatches));
        self.simulator.get_or_init(build)
    }
}

/// Warm-up is over within two groups of `pp` microbatches and what follows repeats itself.
fn occupancy_size(layout: &Layout) -> [u32; 3] {
    let matter = layout.microbatches().min(4 * layout.pp());
    [layout.pp(), layout.vpp(), matter]
}

impl Schedules {
    /// Those of some layouts; none where the search is stopped before.
    pub(crate) fn new(
        question: &Question<'_>,
        layouts: &[Layout],
        watch: &Watch<'_>,
    ) -> Option<Self> {
        let sizes = by_key(layouts, occupancy_size).into_keys();
        let each = sizes.flat_map(|size| {
            let schedules = question.schedules(size[0], size[1]);
            schedules.map(move |name| (name, size))
        });
        let work: Vec<Key> = each.collect();
        let looks = Looks::new(watch, Phase::Scheduling, work.len());
        let each = work.into_par_iter().map(|(name, size)| {
            looks.one(|| {
                let schedule = Schedule::new(name, size[0], size[1], size[2]);
                let occupancies = memory::occupancies(&schedule);
                let moments = moments(&occupancies, schedule.places());
                ((name, size), (occupancies, moments))
            })
        });
        let all: Option<Vec<_>> = each.collect();
        Some(Self {
            held: all?.into_iter().collect(),
            simulators: Mutex::default(),
        })
    }

    /// By pipeline rank, the instants at which it may hold most.
    pub(crate) fn occupancies(&self, layout: &Layout, name: ScheduleName) -> &[Vec<Occupancy>] {
        &self.held[&(name, occupancy_size(layout))].0
    }

    /// The same where only numbers of layers are asked about.
    pub(crate) fn moments(&self, layout: &Layout, name: ScheduleName) -> &[Vec<Moment>] {
        &self.held[&(name, occupancy_size(layout))].1
    }

    /// A layout's schedule, whose dependencies are those that another of its size has, where they are kept.
    ///
    /// # Panics
    /// Where the layout is not [under](Layout::under) the schedule.
    pub(crate) fn simulated(&self, layout: &Layout, name: ScheduleName) -> Simulated {
        let places = name.places(layout.pp(), layout.vpp());
        assert_eq!(places, layout.places(), "the layout is under {name:?}");
        let key = (name, [layout.pp(), layout.vpp(), layout.microbatches()]);
        let simulators = &mut *self
            .simulators
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let simulator = simulators.known.get(&key).cloned().unwrap_or_else(|| {
            let passes = 2 * u64::from(layout.stages()) * u64::from(layout.microbatches());
            simulators.passes += passes;
            if simulators.passes > KEPT {
                simulators.known.clear();
                simulators.passes = passes;
            }
            simulators.known.entry(key).or_default().clone()
        });
        Simulated { key, simulator }
    }
}
