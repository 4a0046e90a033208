//! [`Later`]: work that only adds to gradients of weights, at once or kept until a schedule asks for it.
//!
//! Nothing of a backward pass waits for it, so that a pipeline may run it where it would idle (Qi et al., Zero Bubble
//! Pipeline Parallelism, arXiv 2401.10241, section 2). Layers hand it to their rank's `Context` and do not know when
//! it runs. What is kept holds the tensors that it reads, which nothing changes meanwhile, and runs in the order that
//! it came in: additions into a gradient are in the same order either way, and so are its bits.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use moefold_profiles::trace::Category;

use crate::record::Recorder;

/// Whether work is kept now, and what is. Clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Later(Rc<RefCell<Option<Keeping>>>);

/// What has been kept so far.
#[derive(Default)]
struct Keeping {
    left: WeightGradients,
    /// Whether the pass itself asks for it, or whoever runs the pass.
    delays: bool,
}

/// What a backward pass has left of gradients of weights, in order.
#[derive(Default)]
pub struct WeightGradients(Vec<Left>);

struct Left {
    category: Category,
    layer: Option<u32>,
    work: Box<dyn FnOnce()>,
}

impl Later {
    /// Runs work that may wait, or keeps it.
    pub(crate) fn run(
        &self,
        recorder: &Recorder,
        category: Category,
        work: impl FnOnce() + 'static,
    ) {
        if let Some(kept) = &mut *self.0.borrow_mut() {
            kept.left.0.push(Left {
                category,
                layer: recorder.layer(),
                work: Box::new(work),
            });
            return;
        }
        recorder.of_weights(|| recorder.counting(category, work));
    }

    /// Keeps what may wait from here on, until it is [asked for](Later::settle).
    pub(crate) fn delay(&self) {
        self.begin(true);
    }

    fn begin(&self, delays: bool) {
        let keeping = Keeping {
            delays,
            ..Keeping::default()
        };
        let before = self.0.replace(Some(keeping));
        assert!(before.is_none(), "one backward pass runs at a time");
    }

    /// Runs what is delayed so far.
    pub(crate) fn settle(&self, recorder: &Recorder) {
        let mut keeping = self.0.borrow_mut();
        let delayed = keeping.as_mut().filter(|keeping| keeping.delays);
        let left = delayed.map(|keeping| std::mem::take(&mut keeping.left));
        drop(keeping);
        if let Some(left) = left {
            left.run(recorder);
        }
    }

    /// Whether something is delayed.
    pub(crate) fn is_delayed(&self) -> bool {
        let keeping = self.0.borrow();
        keeping
            .as_ref()
            .is_some_and(|keeping| keeping.delays && !keeping.left.0.is_empty())
    }

    /// Keeps nothing from here on, and gives what is kept.
    pub(crate) fn end(&self) -> WeightGradients {
        self.0.take().expect("it has begun").left
    }

    /// Runs a backward pass and keeps what of it may wait.
    pub(crate) fn keeping<T>(&self, pass: impl FnOnce() -> T) -> (T, WeightGradients) {
        self.begin(false);
        let result = pass();
        (result, self.end())
    }
}

impl WeightGradients {
    /// Runs all of it, and lets go of each tensor behind the last that reads it.
    pub fn run(self, recorder: &Recorder) {
        let before = recorder.layer();
        for left in self.0 {
            recorder.at_layer(left.layer);
            recorder.of_weights(|| recorder.counting(left.category, left.work));
        }
        recorder.at_layer(before);
    }
}

impl fmt::Debug for Later {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Later")
    }
}

impl fmt::Debug for WeightGradients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pieces of work", self.0.len())
    }
}
