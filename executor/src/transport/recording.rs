//! The recording transport: passes every collective on and writes down that it was called.
//!
//! For tests and reviews: which collectives a step makes, of what size, in which group.

use std::cell::RefCell;
use std::rc::Rc;

use super::{Exchange, Pending, Transport, TransportError};

/// One collective as it was called on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Name of the group.
    pub group: String,
    /// Members of the group.
    pub size: usize,
    /// Name of the collective.
    pub stem: &'static str,
    /// Bytes of the rank's full buffer, counted as in `moefold_profiles::Collective`.
    pub bytes: u64,
}

/// Calls of one rank, in order. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct CallLog(Rc<RefCell<Vec<Call>>>);

impl CallLog {
    /// Takes the calls so far.
    pub fn take(&self) -> Vec<Call> {
        self.0.take()
    }
}

/// A transport around another one.
#[derive(Debug)]
pub(super) struct Recording {
    inner: Rc<dyn Transport>,
    group: String,
    size: usize,
    log: CallLog,
}

impl Recording {
    pub(super) fn new(inner: Rc<dyn Transport>, group: &str, size: usize, log: CallLog) -> Self {
        Self {
            inner,
            group: group.to_owned(),
            size,
            log,
        }
    }

    fn write(&self, stem: &'static str, bytes: u64) {
        self.log.0.borrow_mut().push(Call {
            group: self.group.clone(),
            size: self.size,
            stem,
            bytes,
        });
    }
}

impl Transport for Recording {
    fn start(&self, exchange: Exchange) -> Result<Pending, TransportError> {
        self.write(exchange.stem(), exchange.full().bytes().0);
        self.inner.start(exchange)
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<Rc<[u64]>>, TransportError> {
        self.write("gather_words", 8 * (words.len() * self.size) as u64);
        self.inner.gather_words(words)
    }
}
