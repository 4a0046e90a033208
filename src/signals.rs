//! What SIGINT and SIGTERM do to training: the first asks for its end, with a checkpoint; the second is one.
//!
//! A handler only sets numbers. The ranks read them after each step, so all of them end after the same one. A process
//! that does not come to that in time is ended by a thread that waits beside it.

use std::io::{self, Write as _};
use std::process;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// How long what runs at a process's end may take.
const GRACE: Duration = Duration::from_secs(5);

/// Between two looks at the number.
const PAUSE: Duration = Duration::from_millis(20);

/// The first signal; 0 before it.
static TOLD: LazyLock<Arc<AtomicUsize>> = LazyLock::new(Arc::default);

/// The number that a signal sets, 0 before it.
pub(crate) fn told() -> Arc<AtomicUsize> {
    Arc::clone(&TOLD)
}

/// Tells this process what its parent was told.
pub(crate) fn tell(signal: usize) {
    TOLD.store(signal, Ordering::Relaxed);
}

/// From here on the first signal sets the number, and the second ends the process at once.
pub(crate) fn catch() -> io::Result<()> {
    let is_second = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag unset.
        flag::register_conditional_shutdown(signal, code(signal as usize), Arc::clone(&is_second))?;
        flag::register(signal, Arc::clone(&is_second))?;
        flag::register_usize(signal, told(), signal as usize)?;
    }
    Ok(())
}

/// Whether training is over, and a signal has nothing to wait for.
static OVER: AtomicBool = AtomicBool::new(false);

/// Training is over: what it leaves is written, whatever signal has come.
pub(crate) fn over() {
    OVER.store(true, Ordering::Relaxed);
}

/// Waits for a signal beside training. Says what happens then, and ends the process where that has not happened within
/// so long.
pub(crate) fn watch(within: Duration, say: impl Fn(&str) + Send + 'static) -> io::Result<()> {
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            let signal = loop {
                match TOLD.load(Ordering::Relaxed) {
                    0 => thread::sleep(PAUSE),
                    signal => break signal,
                }
            };
            if OVER.load(Ordering::Relaxed) {
                return;
            }
            let (name, seconds) = (name(signal), within.as_secs());
            say(&format!(
                "{name}: saving a checkpoint after this step, within {seconds} s (--stop-within); a second signal ends \
                 the run at once"
            ));
            thread::sleep(within);
            if OVER.load(Ordering::Relaxed) {
                return;
            }
            let _ = writeln!(
                io::stderr(),
                "error: {name}: no checkpoint could be saved within {seconds} s (--stop-within): give it more; the run \
                 can be continued from one that was saved before, if there is one"
            );
            end(code(signal));
        })?;
    Ok(())
}

/// The exit code of a process that a signal ended, as shells have it.
pub(crate) fn code(signal: usize) -> i32 {
    128 + signal as i32
}

/// What a signal is called.
pub(crate) fn name(signal: usize) -> &'static str {
    match signal as i32 {
        SIGINT => "SIGINT",
        _ => "SIGTERM",
    }
}

/// The signal that an exit code tells of.
pub(crate) fn of_code(code: i32) -> Option<usize> {
    let signal = code - 128;
    [SIGINT, SIGTERM]
        .contains(&signal)
        .then_some(signal as usize)
}

/// Ends this process, also where what runs at its end waits for a device that hangs.
pub(crate) fn end(code: i32) -> ! {
    thread::spawn(|| {
        thread::sleep(GRACE);
        process::abort();
    });
    process::exit(code)
}
