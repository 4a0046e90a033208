//! [`Queued`]: spans by the clock of a device whose ops are queued.

use std::cell::{Cell, RefCell};

use moefold_kernels::{Device, Event};
use moefold_profiles::Collective;
use moefold_profiles::directory::Key;
use moefold_profiles::trace::{Category, Lane};

use super::span::{Label, Open, Place};
use super::sweep::{Role, Timed};
use crate::transport::Carried;

/// Spans of a step on a device whose ops are queued.
#[derive(Debug)]
pub(super) struct Queued {
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

impl Queued {
    pub(super) fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            origin: RefCell::new(device.record_event()),
            spans: RefCell::default(),
            num_begun: Cell::new(0),
        }
    }

    /// Begins a step.
    pub(super) fn begin(&self) {
        // Events of before are reached, so that the host's clock and the device's can be told apart.
        self.device.synchronize();
        self.spans.borrow_mut().clear();
        self.num_begun.set(0);
        *self.origin.borrow_mut() = self.device.record_event();
    }

    pub(super) fn begin_span(&self) -> Open {
        let number = self.num_begun.get();
        self.num_begun.set(number + 1);
        Open::Device {
            number,
            start: self.device.record_event(),
        }
    }

    pub(super) fn end_span(&self, (number, start): (usize, Event), label: Label, place: Place) {
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
    pub(super) fn was_wait_for(&self, carried: Vec<(Carried, Collective)>) {
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
    pub(super) fn resolve(&self) -> Vec<Timed> {
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
