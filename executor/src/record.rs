//! [`Recorder`]: one rank's measured spans.
//!
//! The measured half of "predicted against measured": a span carries the stem of the op or
//! collective it covers, its category, lane, and where in the step it ran, exactly like a simulated
//! one. A recorder that is off costs one branch a span. Spans may nest; [`Recorder::end_step`] counts
//! each moment once, for the innermost span, and what no span covers for the host, so the categories
//! of a step sum to its wall time. It measures time only; bytes are the device's business.
//!
//! On a device whose ops are queued, a span is measured by the device's clock: it begins and ends at
//! [`Event`]s of the stream, which are resolved together at the end of the step. Lanes then overlap, and
//! each moment counts for a compute span if one is running, else for a communication span, else for the
//! host ([`sweep()`]). A collective that the device did in its communication stream is two things there: where
//! the compute stream waited for it, which counts, and when it ran ([`Carried`]), which is what a trace shows
//! and what tells how much of it was hidden.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time;

use moefold_kernels::{Device, Event};
use moefold_profiles::trace::{Category, Lane, TimeByCategory, TraceSpan};
use moefold_profiles::units::{Instant, Seconds};

use self::sweep::{Role, Timed, sweep};
use crate::transport::Carried;

mod sweep;

/// A cheap handle on one rank's spans; clones share them. Not `Send`: one a rank thread.
#[derive(Clone, Debug)]
pub struct Recorder(Option<Rc<Inner>>);

#[derive(Debug)]
struct Inner {
    rank: u32,
    epoch: time::Instant,
    place: Cell<Place>,
    /// Whether spans are kept one by one, besides being summed.
    keep: Cell<bool>,
    /// Nanoseconds spent in spans nested directly in the one that is open.
    nested_ns: Cell<u64>,
    step_start_ns: Cell<u64>,
    spans: RefCell<Vec<Entry>>,
    sums: RefCell<BTreeMap<(Lane, Category, &'static str), u64>>,
    /// Part of the communication sums that was waiting for other ranks.
    waits: RefCell<BTreeMap<Category, u64>>,
    host_reads: RefCell<BTreeMap<&'static str, f64>>,
    /// Spans by the device's clock, where that is not the host's.
    queued: Option<Queued>,
}

/// Spans of a step on a device whose ops are queued.
#[derive(Debug)]
struct Queued {
    device: Device,
    /// When the step began; what was asked for before it was done then.
    origin: RefCell<Event>,
    /// In the order in which they ended.
    spans: RefCell<Vec<QueuedSpan>>,
    num_begun: Cell<usize>,
}

#[derive(Debug, Clone)]
struct QueuedSpan {
    /// Its number among the step's, in the order in which they began.
    number: usize,
    role: Role,
    lane: Lane,
    category: Category,
    name: &'static str,
    start: Event,
    end: Event,
    place: Place,
}

#[derive(Clone, Copy, Debug, Default)]
struct Place {
    step: Option<u32>,
    microbatch: Option<u32>,
    layer: Option<u32>,
}

#[derive(Debug)]
struct Entry {
    lane: Lane,
    category: Category,
    name: &'static str,
    start_ns: u64,
    end_ns: u64,
    place: Place,
}

/// Where one step's time went on one rank.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepTime {
    /// Wall time since the step before ended.
    pub step: Seconds,
    /// The same by category; sums to `step`.
    pub time: TimeByCategory,
    /// The part of `time` in which collectives waited for other ranks to come.
    pub waited: TimeByCategory,
    /// What of the collectives that the device did ran while it also computed: no part of `time`.
    pub hidden: TimeByCategory,
    /// Exclusive seconds by lane and span name, without waiting.
    pub busy: BTreeMap<(Lane, &'static str), f64>,
    /// How often the host waited to read the device's memory, by span name.
    pub host_reads: BTreeMap<&'static str, f64>,
}

impl Recorder {
    /// A recorder that records nothing.
    pub fn off() -> Self {
        Self(None)
    }

    /// A recorder for `rank`, with times counted from `epoch`, which the ranks of a run share.
    pub fn new(rank: u32, epoch: time::Instant) -> Self {
        Self(Some(Rc::new(Inner {
            rank,
            epoch,
            place: Cell::default(),
            keep: Cell::new(true),
            nested_ns: Cell::new(0),
            step_start_ns: Cell::new(elapsed_ns(epoch)),
            spans: RefCell::default(),
            sums: RefCell::default(),
            waits: RefCell::default(),
            host_reads: RefCell::default(),
            queued: None,
        })))
    }

    /// A recorder for spans of work on `device`: this one, or where ops are queued one that measures by
    /// the device's clock and begins anew.
    #[must_use]
    pub fn on(self, device: &Device) -> Self {
        let Some(inner) = self.0.as_ref().filter(|_| device.is_queued()) else {
            return self;
        };
        let Self(new) = Self::new(inner.rank, inner.epoch);
        let queued = Queued {
            device: device.clone(),
            origin: RefCell::new(device.record_event()),
            spans: RefCell::default(),
            num_begun: Cell::new(0),
        };
        Self(new.and_then(Rc::into_inner).map(|new| {
            Rc::new(Inner {
                queued: Some(queued),
                ..new
            })
        }))
    }

    /// Whether anything is recorded.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Runs `work` as a span of the compute lane.
    pub fn span<T>(&self, category: Category, name: &'static str, work: impl FnOnce() -> T) -> T {
        self.span_on(Lane::Compute, category, name, work)
    }

    /// Runs `work` as a span of the communication lane. With its result it gives what a device carried
    /// since the last one; none where the host did all.
    pub(crate) fn communication<T>(
        &self,
        category: Category,
        name: &'static str,
        work: impl FnOnce() -> (T, Option<Vec<Carried>>),
    ) -> T {
        let Some((inner, queued)) = self.0.as_ref().and_then(|i| Some((i, i.queued.as_ref()?)))
        else {
            return self.span_on(Lane::Communication, category, name, work).0;
        };
        let place = inner.place.get();
        let (result, carried) = queued.span(Lane::Communication, category, name, place, work);
        if let Some(carried) = carried {
            queued.was_wait_for(carried);
        }
        result
    }

    /// Runs `work` as a span of a lane.
    pub fn span_on<T>(
        &self,
        lane: Lane,
        category: Category,
        name: &'static str,
        work: impl FnOnce() -> T,
    ) -> T {
        let Some(inner) = &self.0 else {
            return work();
        };
        if let Some(queued) = &inner.queued {
            return queued.span(lane, category, name, inner.place.get(), work);
        }
        let nested_before = inner.nested_ns.replace(0);
        let start_ns = elapsed_ns(inner.epoch);
        let result = work();
        let end_ns = elapsed_ns(inner.epoch);
        let own_ns = (end_ns - start_ns).saturating_sub(inner.nested_ns.get());
        inner.nested_ns.set(nested_before + (end_ns - start_ns));
        *inner
            .sums
            .borrow_mut()
            .entry((lane, category, name))
            .or_default() += own_ns;
        if inner.keep.get() {
            inner.spans.borrow_mut().push(Entry {
                lane,
                category,
                name,
                start_ns,
                end_ns,
                place: inner.place.get(),
            });
        }
        result
    }

    /// Sets part of the innermost open span apart as waiting for other ranks. Nothing where the device
    /// has a clock of its own: what the host waits for there is not time of the device.
    pub fn waited(&self, category: Category, ns: u64) {
        if let Some(inner) = &self.0
            && inner.queued.is_none()
        {
            inner.nested_ns.set(inner.nested_ns.get() + ns);
            *inner.waits.borrow_mut().entry(category).or_default() += ns;
        }
    }

    /// Counts reads of device memory that the host waited for, under the name of their span.
    pub fn count_host_reads(&self, name: &'static str, reads: u64) {
        if let Some(inner) = &self.0
            && reads > 0
        {
            *inner.host_reads.borrow_mut().entry(name).or_default() += reads as f64;
        }
    }

    /// Begins a step: forgets sums from before it, and says whether its spans are kept one by one
    /// (a trace of every step of a long run would not open in a viewer).
    pub fn begin_step(&self, step: u32, keep_spans: bool) {
        if let Some(inner) = &self.0 {
            inner.place.set(Place {
                step: Some(step),
                ..Place::default()
            });
            inner.keep.set(keep_spans);
            inner.nested_ns.set(0);
            inner.sums.borrow_mut().clear();
            inner.waits.borrow_mut().clear();
            inner.host_reads.borrow_mut().clear();
            inner.step_start_ns.set(elapsed_ns(inner.epoch));
            if let Some(queued) = &inner.queued {
                queued.begin();
            }
        }
    }

    /// Spans from here on belong to a microbatch (or to none).
    pub fn at_microbatch(&self, microbatch: Option<u32>) {
        self.change_place(|place| place.microbatch = microbatch);
    }

    /// Spans from here on belong to a model layer (or to none).
    pub fn at_layer(&self, layer: Option<u32>) {
        self.change_place(|place| place.layer = layer);
    }

    fn change_place(&self, change: impl FnOnce(&mut Place)) {
        if let Some(inner) = &self.0 {
            let mut place = inner.place.get();
            change(&mut place);
            inner.place.set(place);
        }
    }

    /// Ends the step that [`Recorder::begin_step`] began. All zero when off.
    pub fn end_step(&self) -> StepTime {
        let Some(inner) = &self.0 else {
            return StepTime::default();
        };
        let timed = inner.queued.as_ref().map(Queued::resolve);
        let step_ns = elapsed_ns(inner.epoch) - inner.step_start_ns.get();
        let mut result = StepTime {
            step: seconds(step_ns),
            host_reads: inner.host_reads.take(),
            ..StepTime::default()
        };
        if let Some(timed) = timed {
            let swept = sweep(step_ns, &timed);
            for (category, ns) in swept.time {
                result.time.add(category, seconds(ns));
            }
            for (category, ns) in swept.hidden {
                result.hidden.add(category, seconds(ns));
            }
            for (key, ns) in swept.busy {
                result.busy.insert(key, seconds(ns).0);
            }
            if inner.keep.get() {
                let start_ns = inner.step_start_ns.get();
                let kept = timed.iter().filter(|span| span.role != Role::Wait);
                let kept = kept.map(|span| span.kept(start_ns));
                inner.spans.borrow_mut().extend(kept);
            }
            return result;
        }
        let mut covered_ns = 0;
        for (&category, &ns) in inner.waits.borrow().iter() {
            covered_ns += ns;
            result.time.add(category, seconds(ns));
            result.waited.add(category, seconds(ns));
        }
        for (&(lane, category, name), &ns) in inner.sums.borrow().iter() {
            covered_ns += ns;
            result.time.add(category, seconds(ns));
            *result.busy.entry((lane, name)).or_default() += seconds(ns).0;
        }
        result
            .time
            .add(Category::Host, seconds(step_ns.saturating_sub(covered_ns)));
        result
    }

    /// Takes the spans kept so far.
    pub fn take_spans(&self) -> Vec<TraceSpan> {
        let Some(inner) = &self.0 else {
            return Vec::new();
        };
        let spans = inner.spans.take();
        spans
            .into_iter()
            .map(|kept| TraceSpan {
                rank: inner.rank,
                lane: kept.lane,
                name: kept.name.to_owned(),
                category: kept.category,
                start: Instant(kept.start_ns),
                end: Instant(kept.end_ns),
                microbatch: kept.place.microbatch,
                layer: kept.place.layer,
                step: kept.place.step,
            })
            .collect()
    }
}

impl Queued {
    fn begin(&self) {
        // Events of before are reached, so that the host's clock and the device's can be told apart.
        self.device.synchronize();
        self.spans.borrow_mut().clear();
        self.num_begun.set(0);
        *self.origin.borrow_mut() = self.device.record_event();
    }

    fn span<T>(
        &self,
        lane: Lane,
        category: Category,
        name: &'static str,
        place: Place,
        work: impl FnOnce() -> T,
    ) -> T {
        let number = self.num_begun.get();
        self.num_begun.set(number + 1);
        let start = self.device.record_event();
        let result = work();
        self.spans.borrow_mut().push(QueuedSpan {
            number,
            role: Role::Work,
            lane,
            category,
            name,
            start,
            end: self.device.record_event(),
            place,
        });
        result
    }

    /// The span that has just ended was the start of collectives that the device does, or the wait for
    /// these.
    fn was_wait_for(&self, carried: Vec<Carried>) {
        let mut spans = self.spans.borrow_mut();
        let wait = spans.last_mut().expect("one has just ended");
        wait.role = Role::Wait;
        let wait = wait.clone();
        spans.extend(
            carried
                .into_iter()
                .map(|Carried { begun, done }| QueuedSpan {
                    role: Role::Carried,
                    start: begun,
                    end: done,
                    ..wait.clone()
                }),
        );
    }

    /// The spans in the order in which they began, in nanoseconds from the begin of the step.
    fn resolve(&self) -> Vec<Timed> {
        self.device.synchronize();
        let origin = self.origin.borrow();
        let ns = |event: &Event| (event.seconds_since(&origin) * 1e9).max(0.0) as u64;
        let mut spans = self.spans.take();
        spans.sort_by_key(|span| span.number);
        let timed = |span: &QueuedSpan| Timed {
            role: span.role,
            lane: span.lane,
            category: span.category,
            name: span.name,
            start_ns: ns(&span.start),
            end_ns: ns(&span.end),
            place: span.place,
        };
        spans.iter().map(timed).collect()
    }
}

fn elapsed_ns(epoch: time::Instant) -> u64 {
    epoch.elapsed().as_nanos() as u64
}

fn seconds(ns: u64) -> Seconds {
    Seconds(ns as f64 * 1e-9)
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;
    use std::time::Duration;

    use moefold_emulator::at_hand;
    use moefold_kernels::cuda::Architecture;
    use moefold_kernels::{Dtype, TensorClass, elementwise};

    use super::*;
    use crate::transport::{CarriedLog, World};

    fn nap() {
        sleep(Duration::from_millis(2));
    }

    #[test]
    fn law_categories_of_a_step_sum_to_its_wall_time() {
        let recorder = Recorder::new(3, time::Instant::now());
        recorder.begin_step(7, true);
        recorder.at_layer(Some(1));
        recorder.span(Category::Host, "forward", || {
            recorder.span(Category::Attention, "gemm", nap);
            recorder.at_layer(Some(2));
            recorder.communication(Category::EpComm, "all_to_all", || (nap(), None));
            nap();
        });
        nap();
        let step = recorder.end_step();
        assert!(
            (step.time.total().0 - step.step.0).abs() < 1e-6,
            "{step:?} does not sum"
        );
        assert!(step.time.get(Category::Attention).0 >= 2e-3);
        assert!(step.time.get(Category::Host).0 >= 4e-3);
        assert!(step.busy[&(Lane::Communication, "all_to_all")] >= 2e-3);
        // The outer span counts only what no inner span covers.
        assert!(step.busy[&(Lane::Compute, "forward")] < step.step.0 - 4e-3);

        let spans = recorder.take_spans();
        assert_eq!(spans.len(), 3);
        let exchange = spans
            .iter()
            .find(|s| s.name == "all_to_all")
            .expect("recorded");
        assert_eq!(exchange.rank, 3);
        assert_eq!(exchange.lane, Lane::Communication);
        assert_eq!((exchange.step, exchange.layer), (Some(7), Some(2)));
        let forward = spans
            .iter()
            .find(|s| s.name == "forward")
            .expect("recorded");
        assert!(forward.start <= exchange.start && exchange.end <= forward.end);
    }

    #[test]
    fn waiting_for_other_ranks_is_set_apart_and_still_sums() {
        let recorder = Recorder::new(0, time::Instant::now());
        recorder.begin_step(0, true);
        recorder.communication(Category::EpComm, "all_to_all", || {
            nap();
            recorder.waited(Category::EpComm, 1_500_000);
            ((), None)
        });
        let step = recorder.end_step();
        assert_eq!(step.waited.get(Category::EpComm), Seconds(1.5e-3));
        let exchange = step.busy[&(Lane::Communication, "all_to_all")];
        let whole = step.time.get(Category::EpComm).0;
        assert!((whole - exchange - 1.5e-3).abs() < 1e-9, "{step:?}");
        assert!((step.time.total().0 - step.step.0).abs() < 1e-6, "{step:?}");
    }

    /// Its start and the wait for it are where the compute stream stood still; what a trace shows is when
    /// the communication stream did it.
    #[test]
    fn a_collective_of_a_device_is_one_span_of_the_communication_lane() {
        let open = || moefold_emulator::device(Architecture::SM80, Dtype::F32, 3);
        if at_hand(open()).is_none() {
            return;
        }
        let steps = World::threads(2).run(|rank| {
            let device = open().expect("there was one");
            let (log, recorder) = (CarriedLog::default(), rank.recorder().on(&device));
            let group = rank.noting(&log).communicator("all", &[0, 1]);
            let zeros = |len| device.zeros(TensorClass::Activations, Dtype::F32, &[len]);
            let [own, all, other] = [4, 8, 8].map(zeros);
            recorder.begin_step(0, true);
            let gather = || (group.start_all_gather(&own, &all), log.take());
            let pending = recorder.communication(Category::TpComm, "all_gather", gather)?;
            recorder.span(Category::Dense, "scale", || {
                elementwise::scale(&other, 2.0);
                // Meanwhile the gather comes to its end.
                group.barrier()
            })?;
            let wait = || (pending.wait(), log.take());
            recorder.communication(Category::TpComm, "all_gather", wait)?;
            group.barrier()?;
            Ok((recorder.end_step(), recorder.take_spans()))
        });
        for (step, spans) in steps.expect("every rank finishes") {
            let of = |lane| spans.iter().filter(move |span| span.lane == lane);
            assert_eq!(of(Lane::Compute).count(), 1);
            let gathers: Vec<_> = of(Lane::Communication).collect();
            assert_eq!(gathers.len(), 1, "{spans:?}");
            assert_eq!(gathers[0].category, Category::TpComm);
            let busy = step.busy[&(Lane::Communication, "all_gather")];
            assert!((busy - gathers[0].duration().seconds().0).abs() < 1e-8);
            // What does not fall into the span of compute ran before it.
            let hidden = step.hidden.get(Category::TpComm).0;
            assert!(hidden <= busy && busy > 0.0, "{step:?}");
            assert!((step.time.total().0 - step.step.0).abs() < 1e-6, "{step:?}");
        }
    }

    #[test]
    fn spans_are_kept_only_for_the_steps_asked_for() {
        let recorder = Recorder::new(0, time::Instant::now());
        for step in 0..3 {
            recorder.begin_step(step, step == 1);
            recorder.span(Category::Dense, "gemm", || ());
            assert!(
                recorder
                    .end_step()
                    .busy
                    .contains_key(&(Lane::Compute, "gemm"))
            );
        }
        let spans = recorder.take_spans();
        assert_eq!(spans.len(), 1);
        assert_eq!(spans[0].step, Some(1));
    }

    #[test]
    fn an_off_recorder_records_nothing() {
        let recorder = Recorder::off();
        recorder.begin_step(0, true);
        assert_eq!(recorder.span(Category::Dense, "gemm", || 5), 5);
        assert_eq!(recorder.end_step(), StepTime::default());
        assert!(recorder.take_spans().is_empty());
    }
}
