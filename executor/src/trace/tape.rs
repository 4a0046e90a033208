//! [`Tape`]: what a rank does, in order and without times.

use std::cell::RefCell;
use std::rc::Rc;

use moefold_kernels::observe;
use moefold_planner::walk::{Allocation, At, Event};
use moefold_profiles::trace::Category;

use crate::transport::Noted;

/// See the module's documentation. Clones are the same tape.
#[derive(Debug, Clone, Default)]
pub struct Tape(Rc<RefCell<Vec<Event>>>);

impl Tape {
    /// Takes what is on it.
    pub fn take(&self) -> Vec<Event> {
        self.0.take()
    }

    /// Reads what is on it, and wipes it.
    pub(crate) fn read<T>(&self, read: impl FnOnce(&[Event]) -> T) -> T {
        let result = read(&self.0.borrow());
        self.wipe();
        result
    }

    /// Wipes it.
    pub(crate) fn wipe(&self) {
        self.0.borrow_mut().clear();
    }

    /// An empty one with room for so many events.
    pub(crate) fn with_room(events: usize) -> Self {
        Self(Rc::new(RefCell::new(Vec::with_capacity(events))))
    }

    pub(crate) fn push(&self, event: Event) {
        self.0.borrow_mut().push(event);
    }

    /// Writes down what was noted of collectives.
    pub(crate) fn communicated(&self, noted: Noted, category: Category, at: At) {
        let mut events = self.0.borrow_mut();
        events.extend(noted.started.into_iter().map(|started| Event::Started {
            number: started.number,
            group: started.group,
            collective: started.collective,
            seconds: None,
            category,
            at,
        }));
        let awaited = noted.awaited.into_iter();
        events.extend(awaited.map(|awaited| Event::Awaited {
            number: awaited.number,
        }));
    }
}

/// A tensor's memory as a device tells of it.
pub(crate) fn allocation(told: observe::Allocation) -> Allocation {
    Allocation {
        id: told.id,
        class: told.class,
        bytes: told.bytes,
        name: None,
    }
}
