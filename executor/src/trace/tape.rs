//! [`Tape`]: what a rank does, in order and without times.

use std::cell::RefCell;
use std::rc::Rc;

use moefold_kernels::Op;
use moefold_kernels::observe::Allocation;
use moefold_profiles::Collective;
use moefold_profiles::trace::Category;
use moefold_profiles::units::Bytes;

use crate::transport::Noted;

/// One thing that a rank does.
#[derive(Debug, Clone, PartialEq)]
pub enum Entry {
    /// It runs an op.
    Op {
        /// By its key.
        op: Op,
        /// What its time counts as.
        category: Category,
        /// Microbatch, where it belongs to one.
        microbatch: Option<u32>,
        /// Decoder layer, where it belongs to one.
        layer: Option<u32>,
    },
    /// It starts a collective.
    Started {
        /// Its number among the rank's.
        number: u64,
        /// Name of the group.
        group: Rc<str>,
        /// By its key.
        collective: Collective,
        /// What its exposed time counts as.
        category: Category,
        /// Microbatch, where it belongs to one.
        microbatch: Option<u32>,
        /// Decoder layer, where it belongs to one.
        layer: Option<u32>,
    },
    /// It waits for a collective to end.
    Awaited {
        /// Its number among the rank's.
        number: u64,
    },
    /// Hosts exchange words.
    Words {
        /// Name of the group.
        group: Rc<str>,
        /// Bytes over all members.
        bytes: Bytes,
    },
    /// The host waits to read the device's memory.
    HostRead {
        /// What for.
        name: &'static str,
        /// How often.
        reads: u64,
    },
    /// Memory is taken for a tensor.
    Allocated(Allocation),
    /// A tensor's memory is given back.
    Freed(Allocation),
}

/// See the module's documentation. Clones are the same tape.
#[derive(Debug, Clone, Default)]
pub struct Tape(Rc<RefCell<Vec<Entry>>>);

impl Tape {
    /// Takes what is on it.
    pub fn take(&self) -> Vec<Entry> {
        self.0.take()
    }

    pub(crate) fn push(&self, entry: Entry) {
        self.0.borrow_mut().push(entry);
    }

    /// Writes down what was noted of collectives.
    pub(crate) fn communicated(
        &self,
        noted: Noted,
        category: Category,
        (microbatch, layer): (Option<u32>, Option<u32>),
    ) {
        let mut entries = self.0.borrow_mut();
        for (group, bytes) in noted.words {
            entries.push(Entry::Words { group, bytes });
        }
        entries.extend(noted.started.into_iter().map(|started| Entry::Started {
            number: started.number,
            group: started.group,
            collective: started.collective,
            category,
            microbatch,
            layer,
        }));
        let awaited = noted.awaited.into_iter();
        entries.extend(awaited.map(|number| Entry::Awaited { number }));
    }
}
