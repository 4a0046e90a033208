//! [`Observer`]: who is told of every op that a device runs, by its cost-table key, and of every tensor
//! that is allocated and freed.
//!
//! An op states its key where it begins ([`Device::begin`]). What another op calls is part of that op, so
//! only the outermost is told; memory that is cleared as it is allocated is no op. Whoever measures ([`Observer::begin`], [`Observer::end`]) and whoever
//! traces a [meta device](crate::meta) hears the same.

use std::rc::Rc;

use moefold_profiles::Op;
use moefold_profiles::units::Bytes;

use crate::device::{Device, Side, TensorClass};

/// A tensor's memory, as it is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// Its number among all of the device, from 0.
    pub id: u64,
    /// What it counts as.
    pub class: TensorClass,
    /// Whose memory it is.
    pub side: Side,
    /// Its size.
    pub bytes: Bytes,
}

/// Hears what a device does, in order.
pub trait Observer {
    /// An op begins.
    fn begin(&self, op: Op);

    /// The op that began last ends.
    fn end(&self, op: Op);

    /// Memory is taken for a tensor.
    fn allocated(&self, _allocation: Allocation) {}

    /// The last handle on the memory with this number is dropped.
    fn freed(&self, _allocation: Allocation) {}
}

/// An op under way: it ends when this is dropped.
#[must_use = "an op ends when this is dropped"]
pub(crate) struct Running<'a> {
    device: &'a Device,
    observed: Option<(Rc<dyn Observer>, Op)>,
}

impl Device {
    /// Tells `observer` from now on, as long as it lives, instead of whom it told before.
    pub fn observe(&self, observer: &Rc<dyn Observer>) {
        self.0.observer.replace(Some(Rc::downgrade(observer)));
    }

    fn observer(&self) -> Option<Rc<dyn Observer>> {
        self.0.observer.borrow().as_ref()?.upgrade()
    }

    /// Says that an op begins. Its key is made only where somebody listens.
    pub(crate) fn begin(&self, key: impl FnOnce() -> Op) -> Running<'_> {
        let depth = self.0.op_depth.get();
        self.0.op_depth.set(depth + 1);
        let observer = match depth {
            0 => self.observer(),
            _ => None,
        };
        let observed = observer.map(|observer| {
            let op = key();
            observer.begin(op);
            (observer, op)
        });
        Running {
            device: self,
            observed,
        }
    }

    pub(crate) fn tell_allocated(&self, allocation: Allocation) {
        if let Some(observer) = self.observer() {
            observer.allocated(allocation);
        }
    }

    pub(crate) fn tell_freed(&self, allocation: Allocation) {
        if let Some(observer) = self.observer() {
            observer.freed(allocation);
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.device.0.op_depth.set(self.device.0.op_depth.get() - 1);
        if let Some((observer, op)) = self.observed.take() {
            observer.end(op);
        }
    }
}
