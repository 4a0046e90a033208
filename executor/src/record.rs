//! [`Recorder`]: one rank's measured spans.
//!
//! The measured half of "predicted against measured": a span carries the stem of the op or
//! collective it covers, its category, lane, and where in the step it ran, exactly like a simulated
//! one. An op's span is the op's own: the device tells the recorder of each with its key ([`Observer`]), and
//! a layer says what their time counts as ([`Recorder::counting`]). A recorder that is off costs one branch a span. Spans may nest; [`Recorder::end_step`] counts
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

use moefold_kernels::observe::{Allocation, Observer};
use moefold_kernels::{Device, Event, Op};
use moefold_planner::walk::{At, Event as Walked};
use moefold_profiles::Collective;
use moefold_profiles::directory::Key;
use moefold_profiles::trace::{Category, Lane, TimeByCategory, TraceSpan};
use moefold_profiles::units::{Instant, Seconds};

use self::sweep::{Role, Timed, sweep};
use crate::trace::{Tape, allocation};
use crate::transport::{Carried, Noted};

mod sweep;

/// A cheap handle on one rank's spans; clones share them. Not `Send`: one a rank thread.
#[derive(Clone, Debug)]
pub struct Recorder(Option<Rc<Inner>>);

#[derive(Debug)]
struct Inner {
    rank: u32,
    epoch: time::Instant,
    place: Cell<Place>,
    /// What ops count as.
    category: Cell<Category>,
    /// Whether ops are part of a collective, which has a span of its own.
    in_collective: Cell<bool>,
    /// The op under way.
    open: RefCell<Option<Open>>,
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
    /// Where there is one, what would be a span is written down there, without times.
    tape: Option<Tape>,
}

/// A span that has begun.
#[derive(Debug)]
enum Open {
    /// By the host's clock, with what was nested before it.
    Host { start_ns: u64, nested_before: u64 },
    /// By the device's clock, with its number.
    Device { number: usize, start: Event },
    /// On a tape.
    Untimed,
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
    key: Option<Key>,
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

impl Place {
    fn at(self) -> At {
        At {
            microbatch: self.microbatch,
            layer: self.layer,
        }
    }
}

/// What a span is called, without when it was.
#[derive(Clone, Copy, Debug)]
struct Label {
    lane: Lane,
    category: Category,
    name: &'static str,
    key: Option<Key>,
}

#[derive(Debug)]
struct Entry {
    lane: Lane,
    category: Category,
    name: &'static str,
    key: Option<Key>,
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
            category: Cell::new(Category::Host),
            in_collective: Cell::new(false),
            open: RefCell::default(),
            keep: Cell::new(true),
            nested_ns: Cell::new(0),
            step_start_ns: Cell::new(elapsed_ns(epoch)),
            spans: RefCell::default(),
            sums: RefCell::default(),
            waits: RefCell::default(),
            host_reads: RefCell::default(),
            queued: None,
            tape: None,
        })))
    }

    /// A recorder that writes down on `tape` what it would measure, and what is allocated and freed.
    pub(crate) fn onto(tape: &Tape) -> Self {
        let Self(new) = Self::new(0, time::Instant::now());
        Self(new.and_then(Rc::into_inner).map(|new| {
            Rc::new(Inner {
                tape: Some(tape.clone()),
                ..new
            })
        }))
    }

    /// A recorder for spans of work on `device`: this one, or where ops are queued one that measures by
    /// the device's clock and begins anew.
    #[must_use]
    pub fn on(self, device: &Device) -> Self {
        let Some(inner) = self.0.as_ref() else {
            return self;
        };
        if !device.is_queued() || inner.tape.is_some() {
            self.listen(device);
            return self;
        }
        let Self(new) = Self::new(inner.rank, inner.epoch);
        let queued = Queued {
            device: device.clone(),
            origin: RefCell::new(device.record_event()),
            spans: RefCell::default(),
            num_begun: Cell::new(0),
        };
        let new = Self(new.and_then(Rc::into_inner).map(|new| {
            Rc::new(Inner {
                queued: Some(queued),
                ..new
            })
        }));
        new.listen(device);
        new
    }

    /// Hears of the ops of `device`.
    fn listen(&self, device: &Device) {
        if let Some(inner) = &self.0 {
            let observer: Rc<dyn Observer> = Rc::clone(inner) as Rc<dyn Observer>;
            device.observe(&observer);
        }
    }

    /// Whether anything is recorded.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Runs `work` as a span of the compute lane.
    pub fn span<T>(&self, category: Category, name: &'static str, work: impl FnOnce() -> T) -> T {
        self.span_on(Lane::Compute, category, name, work)
    }

    /// Runs `work`, whose ops count as `category`.
    pub fn counting<T>(&self, category: Category, work: impl FnOnce() -> T) -> T {
        let Some(inner) = &self.0 else {
            return work();
        };
        let before = inner.category.replace(category);
        let result = work();
        inner.category.set(before);
        result
    }

    /// Runs `work` as a span of the communication lane, its ops part of it. With its result it gives what
    /// was noted of collectives meanwhile. A span that waits for one, and for no other, is that one's: there
    /// the host exchanges what members posted at the start.
    pub(crate) fn communication<T>(
        &self,
        category: Category,
        name: &'static str,
        work: impl FnOnce() -> (T, Noted),
    ) -> T {
        let Some(inner) = &self.0 else {
            return work().0;
        };
        let open = inner.begin_span();
        let before = inner.in_collective.replace(true);
        let (result, noted) = work();
        inner.in_collective.set(before);
        debug_assert!(
            noted.started.len() <= 1 && noted.awaited.len() <= 1,
            "{name}: a span is of one collective, got {noted:?}"
        );
        let awaited = noted.awaited.first();
        let label = Label {
            lane: Lane::Communication,
            category,
            name,
            key: awaited.map(|awaited| Key::Collective(awaited.collective)),
        };
        inner.end_span(open, label);
        match (&inner.tape, &inner.queued) {
            (Some(tape), _) => {
                let place = inner.place.get();
                tape.communicated(noted, category, place.at());
            }
            (None, Some(queued)) => {
                if let Some(carried) = noted.carried {
                    queued.was_wait_for(carried);
                }
            }
            (None, None) => {}
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
        let open = inner.begin_span();
        let result = work();
        let label = Label {
            lane,
            category,
            name,
            key: None,
        };
        inner.end_span(open, label);
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
            if let Some(tape) = &inner.tape {
                tape.push(Walked::HostRead { name, reads });
            }
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
                key: kept.key,
                start: Instant(kept.start_ns),
                end: Instant(kept.end_ns),
                microbatch: kept.place.microbatch,
                layer: kept.place.layer,
                step: kept.place.step,
            })
            .collect()
    }
}

impl Inner {
    fn begin_span(&self) -> Open {
        if self.tape.is_some() {
            return Open::Untimed;
        }
        if let Some(queued) = &self.queued {
            return queued.begin_span();
        }
        Open::Host {
            nested_before: self.nested_ns.replace(0),
            start_ns: elapsed_ns(self.epoch),
        }
    }

    fn end_span(&self, open: Open, label: Label) {
        let Label {
            lane,
            category,
            name,
            key,
        } = label;
        match (open, &self.queued) {
            (Open::Untimed, _) | (Open::Device { .. }, None) => {}
            (Open::Device { number, start }, Some(queued)) => {
                queued.end_span((number, start), label, self.place.get());
            }
            (
                Open::Host {
                    start_ns,
                    nested_before,
                },
                _,
            ) => {
                let end_ns = elapsed_ns(self.epoch);
                let own_ns = (end_ns - start_ns).saturating_sub(self.nested_ns.get());
                self.nested_ns.set(nested_before + (end_ns - start_ns));
                let mut sums = self.sums.borrow_mut();
                *sums.entry((lane, category, name)).or_default() += own_ns;
                if self.keep.get() {
                    self.spans.borrow_mut().push(Entry {
                        lane,
                        category,
                        name,
                        key,
                        start_ns,
                        end_ns,
                        place: self.place.get(),
                    });
                }
            }
        }
    }
}

impl Observer for Inner {
    fn begin(&self, _op: Op) {
        if !self.in_collective.get() {
            self.open.replace(Some(self.begin_span()));
        }
    }

    fn end(&self, op: Op) {
        let Some(open) = self.open.take() else {
            return;
        };
        let category = self.category.get();
        if let Some(tape) = &self.tape {
            let place = self.place.get();
            tape.push(Walked::Op {
                op,
                category,
                at: place.at(),
            });
        }
        let label = Label {
            lane: Lane::Compute,
            category,
            name: op.stem(),
            key: Some(Key::Op(op)),
        };
        self.end_span(open, label);
    }

    fn allocated(&self, told: Allocation) {
        if let Some(tape) = &self.tape {
            tape.push(Walked::Allocated(allocation(told)));
        }
    }

    fn freed(&self, told: Allocation) {
        if let Some(tape) = &self.tape {
            tape.push(Walked::Freed(allocation(told)));
        }
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

    fn begin_span(&self) -> Open {
        let number = self.num_begun.get();
        self.num_begun.set(number + 1);
        Open::Device {
            number,
            start: self.device.record_event(),
        }
    }

    fn end_span(&self, (number, start): (usize, Event), label: Label, place: Place) {
        self.spans.borrow_mut().push(QueuedSpan {
            number,
            role: Role::Work,
            lane: label.lane,
            category: label.category,
            name: label.name,
            key: label.key,
            start,
            end: self.device.record_event(),
            place,
        });
    }

    /// The span that has just ended was the start of collectives that the device does, or the wait for
    /// these.
    fn was_wait_for(&self, carried: Vec<(Carried, Collective)>) {
        let mut spans = self.spans.borrow_mut();
        let wait = spans.last_mut().expect("one has just ended");
        wait.role = Role::Wait;
        let wait = wait.clone();
        spans.extend(
            carried
                .into_iter()
                .map(|(Carried { begun, done }, collective)| QueuedSpan {
                    role: Role::Carried,
                    key: Some(Key::Collective(collective)),
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
            key: span.key,
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
    use crate::transport::{CollectiveLog, World};

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
            recorder.communication(Category::EpComm, "all_to_all", || (nap(), Noted::default()));
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
            ((), Noted::default())
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
            let (log, recorder) = (CollectiveLog::default(), rank.recorder().on(&device));
            let group = rank.noting(&log).communicator("all", &[0, 1]);
            let zeros = |len| device.zeros(TensorClass::Activations, Dtype::F32, &[len]);
            let [own, all, other] = [4, 8, 8].map(zeros);
            recorder.begin_step(0, true);
            let gather = || (group.start_all_gather(&own, &all), log.take());
            let pending = recorder.communication(Category::TpComm, "all_gather", gather)?;
            recorder.counting(Category::Dense, || {
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
