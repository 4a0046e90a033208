//! The CPU as a backend: how many threads its ops use, and how work is dealt to them.
//!
//! Work is cut by rows or by task, never inside a sum, so results do not depend on the number of
//! threads. Small work stays on the calling thread.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Elements touched below which handing work to other threads costs more than it saves.
const WORTH_SHARING: usize = 1 << 18;

/// The CPU with a bound on threads.
pub(crate) struct Cpu {
    threads: usize,
    /// The threads besides the one that calls.
    helpers: Option<rayon::ThreadPool>,
    /// Whether work is shared however small it is, so that tests reach every path.
    shares_all: bool,
}

impl Cpu {
    pub(crate) fn new(threads: usize, shares_all: bool) -> Self {
        let threads = threads.max(1);
        let helpers = (threads > 1)
            .then(|| {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(threads - 1)
                    .build()
                    .ok()
            })
            .flatten();
        Self {
            threads: if helpers.is_some() { threads } else { 1 },
            helpers,
            shares_all,
        }
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// In how many parts to cut work of this size, where `enough` is worth sharing.
    pub(crate) fn parts(&self, work: usize, enough: usize) -> usize {
        if work >= enough || self.shares_all {
            self.threads
        } else {
            1
        }
    }

    /// Runs `body` on ranges of rows that cover `0..num_rows`, each with its part of the outputs,
    /// given as a slice and the width of its rows. `work` is about how many elements are touched.
    pub(crate) fn rows<const O: usize>(
        &self,
        num_rows: usize,
        work: usize,
        outputs: [(&mut [f32], usize); O],
        body: impl Fn(Range<usize>, [&mut [f32]; O]) + Sync,
    ) {
        for (output, width) in &outputs {
            debug_assert_eq!(output.len(), num_rows * width);
        }
        let parts = self.parts(work, WORTH_SHARING).min(num_rows).max(1);
        if parts == 1 {
            return body(0..num_rows, outputs.map(|(output, _)| output));
        }
        let mut tasks = Vec::with_capacity(parts);
        let mut rest = outputs;
        let mut start = 0;
        for part in 0..parts {
            let end = num_rows * (part + 1) / parts;
            let (now, later) = split(rest, end - start);
            tasks.push((start..end, now));
            rest = later;
            start = end;
        }
        self.tasks(tasks, |(range, outputs)| {
            body(range, outputs.map(|(output, _)| output));
        });
    }

    /// Runs `body` on every task. The calling thread works too; each thread takes the next task when
    /// it is done with one.
    pub(crate) fn tasks<T: Send>(&self, tasks: Vec<T>, body: impl Fn(T) + Sync) {
        let num_helpers = self.threads.min(tasks.len()).saturating_sub(1);
        let Some(helpers) = self.helpers.as_ref().filter(|_| num_helpers > 0) else {
            return tasks.into_iter().for_each(body);
        };
        let stream = Mutex::new(tasks.into_iter());
        let next = || stream.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || {
            while let Some(task) = next() {
                body(task);
            }
        };
        helpers.in_place_scope(|scope| {
            for _ in 0..num_helpers {
                scope.spawn(|_| work());
            }
            work();
        });
    }
}

type Rows<'a, const O: usize> = [(&'a mut [f32], usize); O];

/// The first `rows` rows of every output, and the others.
fn split<const O: usize>(outputs: Rows<'_, O>, rows: usize) -> (Rows<'_, O>, Rows<'_, O>) {
    let mut parts = outputs.map(|(output, width)| {
        let (now, later) = output.split_at_mut(rows * width);
        (Some((now, width)), Some((later, width)))
    });
    let now = parts
        .each_mut()
        .map(|part| part.0.take().expect("taken once"));
    let later = parts
        .each_mut()
        .map(|part| part.1.take().expect("taken once"));
    (now, later)
}
