//! Threads that help another with its work where they come in time.
//!
//! Who shares work does it too, and waits for those that came to it and for no others: a helper that the system wakes
//! late, or whose core something else has, costs nothing. Between two pieces of work helpers stay awake for a moment
//! ([`AWAKE`]), since to wake one takes as long as a small op.
#![expect(
    unsafe_code,
    reason = "work borrows from who shares it, and who shares it outlasts those that came"
)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long threads look for what they wait for before they sleep.
const AWAKE: Duration = Duration::from_micros(50);

/// What is shared: every thread that calls it takes of it until nothing is left.
type Work<'a> = &'a (dyn Fn() + Sync);

/// Threads that wait for work.
pub(super) struct Helpers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// How much work has been shared so far; changes under the lock.
    pieces: AtomicU64,
    /// Helpers that are at the work; changes under the lock.
    busy: AtomicUsize,
    /// Work is there, or will never be.
    came: Condvar,
    /// The last helper has left it.
    left: Condvar,
}

#[derive(Default)]
struct State {
    work: Option<Work<'static>>,
    /// How many helpers may still come to it.
    room: usize,
    /// Helpers that sleep.
    asleep: usize,
    /// What one of them panicked with.
    panic: Option<Box<dyn Any + Send>>,
    ended: bool,
}

impl Helpers {
    /// As many of so many as the system gives.
    pub(super) fn new(helpers: usize) -> Self {
        let shared = Arc::new(Shared::default());
        let spawn = |_| {
            let shared = Arc::clone(&shared);
            let named = thread::Builder::new().name("helper".to_owned());
            named.spawn(move || shared.help()).ok()
        };
        let threads = (0..helpers).map_while(spawn).collect();
        Self { shared, threads }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.threads.len()
    }

    /// Calls `work` here and on up to so many helpers, and returns when all that began have returned. Where another
    /// thread shares work now, it is called here alone. A helper's panic goes on here.
    pub(super) fn share(&self, helpers: usize, work: Work<'_>) {
        let mut state = self.shared.lock();
        if state.work.is_some() || self.shared.busy.load(Ordering::Relaxed) > 0 {
            drop(state);
            return work();
        }
        // SAFETY: only the lifetime changes. Helpers take the work under the lock and count as busy from then on;
        // `leaving` takes it away and waits for them before this function returns or unwinds.
        let lent = unsafe { std::mem::transmute::<Work<'_>, Work<'static>>(work) };
        (state.work, state.room, state.panic) = (Some(lent), helpers, None);
        let leaving = Leaving(&self.shared);
        self.shared.pieces.fetch_add(1, Ordering::Release);
        if state.asleep > 0 {
            self.shared.came.notify_all();
        }
        drop(state);
        work();
        drop(leaving);
        let panic = self.shared.lock().panic.take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.pieces.fetch_add(1, Ordering::Release);
        self.shared.came.notify_all();
        for thread in self.threads.drain(..) {
            // Its panics went to who shared the work.
            let _ = thread.join();
        }
    }
}

/// Takes shared work away when it is dropped, and waits for those that came to it.
struct Leaving<'a>(&'a Shared);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        let Self(shared) = self;
        shared.lock().work = None;
        let all_left = || shared.busy.load(Ordering::Acquire) == 0;
        if seen(all_left) {
            return;
        }
        let mut state = shared.lock();
        while !all_left() {
            state = wait(&shared.left, state);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a helper does until the end.
    fn help(&self) {
        let mut state = self.lock();
        while !state.ended {
            if state.room > 0
                && let Some(work) = state.work
            {
                state.room -= 1;
                self.busy.fetch_add(1, Ordering::Relaxed);
                drop(state);
                let result = catch_unwind(AssertUnwindSafe(work));
                state = self.lock();
                if let Err(panic) = result {
                    state.panic.get_or_insert(panic);
                }
                if self.busy.fetch_sub(1, Ordering::Release) == 1 {
                    self.left.notify_one();
                }
                continue;
            }
            let heard = self.pieces.load(Ordering::Acquire);
            let is_new = || self.pieces.load(Ordering::Acquire) != heard;
            drop(state);
            let awake = seen(is_new);
            state = self.lock();
            if !awake && !is_new() {
                state.asleep += 1;
                state = wait(&self.came, state);
                state.asleep -= 1;
            }
        }
    }
}

/// Looks for a while whether something has happened; whether it has.
fn seen(happened: impl Fn() -> bool) -> bool {
    let begun = Instant::now();
    loop {
        if happened() {
            return true;
        }
        if begun.elapsed() >= AWAKE {
            return false;
        }
        thread::yield_now();
    }
}

fn wait<'a>(condition: &Condvar, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    let waited = condition.wait(state);
    waited.unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// What every call takes of, as [`super::super::Cpu::tasks`] does.
    fn each_once(helpers: &Helpers, invited: usize, tasks: usize) {
        let (next, done) = (AtomicUsize::new(0), Mutex::new(vec![0; tasks]));
        helpers.share(invited, &|| {
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                match done.lock().expect("nobody panics").get_mut(task) {
                    Some(count) => *count += 1,
                    None => return,
                }
            }
        });
        assert!(
            done.into_inner()
                .expect("nobody panics")
                .iter()
                .all(|&n| n == 1)
        );
    }

    #[test]
    fn law_every_task_is_done_once_when_the_work_returns() {
        for count in 0..4 {
            let helpers = Helpers::new(count);
            assert_eq!(helpers.len(), count);
            for round in 0..500 {
                each_once(&helpers, round % 4, round % 7);
                if round % 100 == 0 {
                    // Long enough for helpers to sleep.
                    thread::sleep(4 * AWAKE);
                }
            }
        }
    }

    #[test]
    fn at_most_as_many_help_as_are_invited() {
        let helpers = Helpers::new(3);
        for invited in 0..3 {
            let (came, own) = (AtomicUsize::new(0), thread::current().id());
            helpers.share(invited, &|| {
                if thread::current().id() == own {
                    thread::sleep(Duration::from_millis(5));
                } else {
                    came.fetch_add(1, Ordering::Relaxed);
                }
            });
            assert!(came.into_inner() <= invited);
        }
    }

    /// Of two threads that share at once the later one works alone, and neither waits for the other.
    #[test]
    fn who_finds_the_helpers_taken_works_alone() {
        let helpers = Helpers::new(1);
        let (both_at_it, go_on) = (Barrier::new(2), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                let first = AtomicBool::new(true);
                helpers.share(1, &|| {
                    if first.swap(false, Ordering::Relaxed) {
                        both_at_it.wait();
                        while !go_on.load(Ordering::Relaxed) {
                            thread::yield_now();
                        }
                    }
                });
            });
            both_at_it.wait();
            let own = thread::current().id();
            let elsewhere = AtomicBool::new(false);
            helpers.share(1, &|| {
                elsewhere.fetch_or(thread::current().id() != own, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(2));
            });
            assert!(!elsewhere.into_inner());
            go_on.store(true, Ordering::Relaxed);
        });
        each_once(&helpers, 1, 5);
    }

    #[test]
    fn a_panic_of_a_helper_or_of_who_shares_ends_the_work_and_not_the_helpers() {
        let helpers = Helpers::new(1);
        for of_helper in [true, false] {
            let (own, both) = (thread::current().id(), Barrier::new(2));
            let shared = catch_unwind(AssertUnwindSafe(|| {
                helpers.share(1, &|| {
                    both.wait();
                    let here = thread::current().id() == own;
                    assert!(here == of_helper, "planted");
                });
            }));
            let panic = shared.expect_err("one panics");
            assert_eq!(panic.downcast_ref::<&str>(), Some(&"planted"));
            each_once(&helpers, 1, 5);
        }
    }
}
