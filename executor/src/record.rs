//! [`Recorder`]: one rank's measured spans.
//!
//! The measured half of "predicted against measured": a span carries the stem of the op or
//! collective it covers, its category, lane, and where in the step it ran, exactly like a simulated
//! one. An op's span is the op's own: the device tells the recorder of each with its key ([`Observer`]), and
//! a layer says what their time counts as ([`Recorder::counting`]). A recorder that is off costs one branch a
//! span. Spans may nest; [`Recorder::end_step`] counts each moment once, for the innermost span, and what no
//! span covers for the host, so the categories of a step sum to its wall time. What passes until the last rank
//! comes to a collective counts as [`Category::Waiting`], and until a message of another pipeline rank is there
//! as [`Category::Bubble`]. It measures time only; bytes are the device's
//! business.
//!
//! Where ranks outnumber cores ([`Recorder::stretched`]), wall time says little of a span: the rank may have had
//! no core in it. Spans are then measured by the time their thread ran, stretched by ranks over cores, which
//! is what they take of the machine; and a rank waits where the machine has nothing to run, which is what is
//! left of the step. Of one rank that may be negative; over all ranks it is not.
//!
//! On a device whose ops are queued, a span is measured by the device's clock: it begins and ends at
//! [`moefold_kernels::Event`]s of the stream, which are resolved together at the end of the step. Lanes then overlap, and
//! each moment counts for a compute span if one is running, else for a communication span, else for the
//! host ([`sweep()`]). A collective that the device did in its communication stream is two things there: where
//! the compute stream waited for it, which counts, and when it ran ([`crate::transport::Carried`]), which is what a trace shows
//! and what tells how much of it was hidden.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time;

use moefold_kernels::observe::{Allocation, Observer};
use moefold_kernels::{Device, Op, Side};
use moefold_planner::mesh::GroupKind;
use moefold_planner::walk::Event as Walked;
use moefold_profiles::CollectiveKind;
use moefold_profiles::directory::Key;
use moefold_profiles::trace::{Category, Lane, TraceSpan};
use moefold_profiles::units::{Bytes, Instant, Seconds};

use self::queued::Queued;
use self::span::{Entry, Label, Open, Place};
use self::sweep::{Role, sweep};
use crate::clock::Clock;
use crate::trace::{Tape, allocation};
use crate::transport::{Noted, Started};

mod queued;
mod sampled;
mod span;
mod sweep;

pub use sampled::{SampledStep, Sampler, recorded_share, recording_costs};
pub use span::{Busy, Detail, KeyTime, StepTime};

/// A cheap handle on one rank's spans; clones share them. Not `Send`: one a rank thread.
#[derive(Clone, Debug)]
pub struct Recorder(Option<Rc<Inner>>);

#[derive(Debug)]
struct Inner {
    rank: u32,
    clock: Clock,
    place: Cell<Place>,
    /// What ops count as.
    category: Cell<Category>,
    /// Whether a forward pass runs again.
    again: Cell<bool>,
    /// Whether ops only add to gradients of weights.
    of_weights: Cell<bool>,
    /// Whether ops are part of a collective, which has a span of its own.
    in_collective: Cell<bool>,
    /// The op under way.
    open: RefCell<Option<Open>>,
    detail: Cell<Detail>,
    /// Own nanoseconds spent in spans nested directly in the one that is open.
    nested_ns: Cell<u64>,
    step_start_ns: Cell<u64>,
    /// The same by the own clock.
    own_start_ns: Cell<u64>,
    /// When the rank last met others, by the own clock.
    met_ns: Cell<u64>,
    spans: RefCell<Vec<Entry>>,
    sums: RefCell<BTreeMap<(Lane, Category, &'static str), Sum>>,
    keys: RefCell<BTreeMap<Key, Sum>>,
    /// Waits for other ranks.
    meetings: RefCell<Vec<Meeting>>,
    waited_ns: Cell<u64>,
    /// What of them was for messages of other pipeline ranks.
    bubble_ns: Cell<u64>,
    host_reads: RefCell<BTreeMap<&'static str, f64>>,
    /// Transfers to and from the host so far.
    transfers: Cell<u64>,
    /// Spans by the device's clock, where that is not the host's.
    queued: Option<Queued>,
    /// Where there is one, what would be a span is written down there, without times.
    tape: Option<Tape>,
}

/// Time of spans of one kind.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    calls: u64,
    own_ns: u64,
}

/// A rank's wait for the others at a collective.
#[derive(Clone, Copy, Debug)]
struct Meeting {
    key: Key,
    waited_ns: u64,
    /// Since it last met others, by its own clock.
    apart_ns: u64,
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
            clock: Clock::new(epoch, 1.0),
            place: Cell::default(),
            category: Cell::new(Category::Host),
            again: Cell::new(false),
            of_weights: Cell::new(false),
            in_collective: Cell::new(false),
            open: RefCell::default(),
            detail: Cell::new(Detail::Spans),
            nested_ns: Cell::default(),
            step_start_ns: Cell::default(),
            own_start_ns: Cell::default(),
            met_ns: Cell::default(),
            spans: RefCell::default(),
            sums: RefCell::default(),
            keys: RefCell::default(),
            meetings: RefCell::default(),
            waited_ns: Cell::default(),
            bubble_ns: Cell::default(),
            host_reads: RefCell::default(),
            transfers: Cell::default(),
            queued: None,
            tape: None,
        })))
    }

    /// A recorder that writes down on `tape` what it would measure, and what is allocated and freed.
    pub(crate) fn onto(tape: &Tape) -> Self {
        let new = Self::new(0, time::Instant::now());
        new.changed(|inner| inner.tape = Some(tape.clone()))
    }

    /// This recorder, which nothing shares yet, of one of `stretch` times as many threads as cores where that is
    /// above 1. Only for the thread that it is made on.
    #[must_use]
    pub fn stretched(self, stretch: f64) -> Self {
        self.changed(|inner| inner.clock = inner.clock.stretched(stretch))
    }

    fn changed(self, change: impl FnOnce(&mut Inner)) -> Self {
        Self(self.0.and_then(Rc::into_inner).map(|mut inner| {
            change(&mut inner);
            Rc::new(inner)
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
        let new = Self::new(inner.rank, inner.clock.epoch());
        let new = new.changed(|inner| inner.queued = Some(Queued::new(device)));
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
        let before = inner.category.replace(inner.counted(category));
        let result = work();
        inner.category.set(before);
        result
    }

    /// Runs `work`, all of which counts as [`Category::Recompute`], whatever it is.
    pub fn again<T>(&self, work: impl FnOnce() -> T) -> T {
        let Some(inner) = &self.0 else {
            return work();
        };
        let before = inner.again.replace(true);
        let result = work();
        inner.again.set(before);
        result
    }

    /// Runs `work`, whose ops only add to gradients of weights.
    pub(crate) fn of_weights<T>(&self, work: impl FnOnce() -> T) -> T {
        let Some(inner) = &self.0 else {
            return work();
        };
        let before = inner.of_weights.replace(true);
        let result = work();
        inner.of_weights.set(before);
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
        let Some(inner) = self.recording() else {
            return work().0;
        };
        let category = inner.counted(category);
        let open = inner.begin_span();
        let before = inner.in_collective.replace(true);
        let (result, noted) = work();
        inner.in_collective.set(before);
        inner.met(&noted);
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
        inner.end_span(open, label, noted.started.first());
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
        let Some(inner) = self.recording() else {
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
        inner.end_span(open, label, None);
        result
    }

    /// What records spans now.
    fn recording(&self) -> Option<&Inner> {
        let inner = self.0.as_deref()?;
        (inner.detail.get() != Detail::Whole).then_some(inner)
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

    /// Writes down that tensors of a device start to leave for its host, or to come back, in its stream of copies;
    /// their number, for [`Recorder::transferred`].
    pub(crate) fn transfer(&self, bytes: Bytes, leaves: bool, device: &Device) -> u64 {
        let Some(inner) = self.0.as_ref().filter(|_| device.is_queued()) else {
            return 0;
        };
        let number = inner.transfers.get();
        inner.transfers.set(number + 1);
        if let Some(tape) = &inner.tape {
            tape.push(Walked::Transfer {
                number,
                bytes,
                leaves,
                at: inner.place.get().at(),
            });
        }
        number
    }

    /// Writes down that the device waits for a transfer.
    pub(crate) fn transferred(&self, number: u64) {
        if let Some(tape) = self.0.as_ref().and_then(|inner| inner.tape.as_ref()) {
            tape.push(Walked::Transferred { number });
        }
    }

    /// Begins a step: forgets sums from before it.
    pub fn begin_step(&self, step: u32, detail: Detail) {
        if let Some(inner) = &self.0 {
            inner.place.set(Place {
                step: Some(step),
                ..Place::default()
            });
            inner.detail.set(detail);
            inner.nested_ns.set(0);
            inner.sums.borrow_mut().clear();
            inner.keys.borrow_mut().clear();
            inner.meetings.borrow_mut().clear();
            inner.waited_ns.set(0);
            inner.bubble_ns.set(0);
            inner.host_reads.borrow_mut().clear();
            inner.step_start_ns.set(inner.clock.wall_ns());
            inner.own_start_ns.set(inner.clock.own_ns());
            inner.met_ns.set(inner.clock.own_ns());
            if let Some(queued) = &inner.queued
                && detail != Detail::Whole
            {
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

    /// The model layer that spans belong to.
    pub(crate) fn layer(&self) -> Option<u32> {
        self.0.as_ref().and_then(|inner| inner.place.get().layer)
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
        let recorded = inner.detail.get() != Detail::Whole;
        let queued = inner.queued.as_ref().filter(|_| recorded);
        let timed = queued.map(Queued::resolve);
        let step_ns = inner.clock.wall_ns() - inner.step_start_ns.get();
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
            for (name, ns) in swept.busy {
                result.busy.entry(name).or_default().seconds = seconds(ns).0;
            }
            for span in timed.iter().filter(|span| span.role != Role::Wait) {
                let busy = result.busy.entry((span.lane, span.name)).or_default();
                busy.calls += 1.0;
                if let Some(key) = span.key {
                    let time = result.keys.entry(key).or_default();
                    time.calls += 1;
                    time.seconds += seconds(span.end_ns.saturating_sub(span.start_ns)).0;
                }
            }
            if inner.detail.get() == Detail::Spans {
                let start_ns = inner.step_start_ns.get();
                let kept = timed.iter().filter(|span| span.role != Role::Wait);
                let kept = kept.map(|span| span.kept(start_ns));
                inner.spans.borrow_mut().extend(kept);
            }
        } else if recorded {
            inner.sum_up(&mut result);
        }
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
    /// What the time of something of a category counts as.
    fn counted(&self, category: Category) -> Category {
        if self.again.get() {
            Category::Recompute
        } else {
            category
        }
    }

    fn begin_span(&self) -> Open {
        if self.tape.is_some() {
            return Open::Untimed;
        }
        if let Some(queued) = &self.queued {
            return queued.begin_span();
        }
        let is_kept = self.detail.get() == Detail::Spans;
        Open::Host {
            nested_before: self.nested_ns.replace(0),
            start_ns: if is_kept { self.clock.wall_ns() } else { 0 },
            own_ns: self.clock.own_ns(),
        }
    }

    /// Notes that the rank met others, and for how long it waited for them. Nothing where the device has
    /// a clock of its own: what the host waits for there is not time of the device.
    fn met(&self, noted: &Noted) {
        if self.queued.is_some() || self.tape.is_some() {
            return;
        }
        let waited_ns = noted.waited_ns;
        let now = self.clock.own_ns();
        self.nested_ns
            .set(self.nested_ns.get() + self.own_of(waited_ns));
        self.waited_ns.set(self.waited_ns.get() + waited_ns);
        let mut all = noted.started.iter().chain(&noted.awaited);
        let is_message = |one: &Started| {
            one.collective.kind == CollectiveKind::SendRecv && *one.group != *GroupKind::Cp.name()
        };
        if all.any(is_message) {
            // Who waits for a message waits for work, and meets nobody: ranks of another stage are not those
            // of a collective.
            self.bubble_ns.set(self.bubble_ns.get() + waited_ns);
            self.met_ns.set(self.met_ns.get() + self.own_of(waited_ns));
            return;
        }
        let Some(awaited) = noted.awaited.first() else {
            return;
        };
        self.meetings.borrow_mut().push(Meeting {
            key: Key::Collective(awaited.collective),
            waited_ns,
            apart_ns: (now - self.met_ns.get()).saturating_sub(self.own_of(waited_ns)),
        });
        self.met_ns.set(now);
    }

    /// What a wait takes by the own clock: while a thread waits, it does not run.
    fn own_of(&self, waited_ns: u64) -> u64 {
        if self.clock.is_shared() { 0 } else { waited_ns }
    }

    /// Tells where a step's time went.
    fn sum_up(&self, result: &mut StepTime) {
        let counted = |ns: u64| self.clock.counted(ns);
        for (&(lane, category, name), sum) in self.sums.borrow().iter() {
            let time = counted(sum.own_ns);
            result.time.add(category, time);
            let busy = result.busy.entry((lane, name)).or_default();
            busy.calls += sum.calls as f64;
            busy.seconds += time.0;
        }
        let covered = result.time.total().0;
        let blocked = seconds(self.waited_ns.get()).0;
        // What a rank was blocked for, it waited for, but where others had its core meanwhile.
        let (waited, own) = if self.clock.is_shared() {
            let own = counted(self.clock.own_ns() - self.own_start_ns.get()).0;
            (result.step.0 - own, own)
        } else {
            (blocked, result.step.0 - blocked)
        };
        let bubble = seconds(self.bubble_ns.get()).0;
        let bubble = waited * (bubble / blocked.max(bubble).max(f64::MIN_POSITIVE));
        result.time.add(Category::Bubble, Seconds(bubble));
        result.time.add(Category::Waiting, Seconds(waited - bubble));
        result.time.add(Category::Host, Seconds(own - covered));
        for (&key, sum) in self.keys.borrow().iter() {
            let time = result.keys.entry(key).or_default();
            time.calls = sum.calls;
            time.seconds = counted(sum.own_ns).0;
        }
        let share = if blocked > 0.0 {
            waited.max(0.0) / blocked
        } else {
            0.0
        };
        for meeting in self.meetings.borrow().iter() {
            let time = result.keys.entry(meeting.key).or_default();
            let waited = seconds(meeting.waited_ns).0 * share;
            time.waits.push([waited, counted(meeting.apart_ns).0]);
        }
    }

    /// Ends a span: of what it covers, or where that is no more than the start of a collective, of what it
    /// started.
    fn end_span(&self, open: Open, label: Label, started: Option<&Started>) {
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
                    own_ns,
                    nested_before,
                },
                _,
            ) => {
                let whole_ns = self.clock.own_ns() - own_ns;
                let sum = Sum {
                    calls: u64::from(key.is_some() || started.is_none()),
                    own_ns: whole_ns.saturating_sub(self.nested_ns.get()),
                };
                self.nested_ns.set(nested_before + whole_ns);
                let mut sums = self.sums.borrow_mut();
                sums.entry((lane, category, name)).or_default().add(sum);
                let started = started.map(|started| Key::Collective(started.collective));
                if let Some(key) = key.or(started) {
                    self.keys.borrow_mut().entry(key).or_default().add(sum);
                }
                if self.detail.get() == Detail::Spans {
                    let end_ns = self.clock.wall_ns();
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

impl Sum {
    fn add(&mut self, other: Self) {
        self.calls += other.calls;
        self.own_ns += other.own_ns;
    }
}

impl Observer for Inner {
    fn begin(&self, _op: Op) {
        if !self.in_collective.get() && self.detail.get() != Detail::Whole {
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
                of_weights: self.of_weights.get(),
            });
        }
        let label = Label {
            lane: Lane::Compute,
            category,
            name: op.stem(),
            key: Some(Key::Op(op)),
        };
        self.end_span(open, label, None);
    }

    fn allocated(&self, told: Allocation) {
        if let Some(tape) = &self.tape {
            let allocated = match told.side {
                Side::Device => Walked::Allocated,
                Side::Host => Walked::TakenOnHost,
            };
            tape.push(allocated(allocation(told)));
        }
    }

    fn freed(&self, told: Allocation) {
        if let Some(tape) = &self.tape {
            let freed = match told.side {
                Side::Device => Walked::Freed,
                Side::Host => Walked::GivenOnHost,
            };
            tape.push(freed(allocation(told)));
        }
    }
}

fn seconds(ns: u64) -> Seconds {
    Seconds(ns as f64 * 1e-9)
}

#[cfg(test)]
mod tests;
