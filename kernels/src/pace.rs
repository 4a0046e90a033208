//! [`pace_s`]: how fast the machine's processor is at the moment.

use std::hint::black_box;
use std::num::NonZero;
use std::thread;
use std::time::Instant;

use moefold_profiles::statistics::median;

/// Times that it is done after a first one; the median counts.
const TIMES: usize = 9;

/// Seconds that a fixed piece of work takes on all cores that the process may use at once. Clocks show in it, and what else
/// runs on the machine or on the host of a virtual one. The work is sums of products in the first cache that keep a core some
/// thousandths of a second, ten times over. Panics where no thread can be started.
pub fn pace_s() -> f64 {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let work = || {
        let mut sums = [1.0_f32; 4096];
        for _ in 0..5000 {
            for sum in black_box(&mut sums).iter_mut() {
                *sum = *sum * 0.999 + 0.001;
            }
        }
        black_box(&sums);
    };
    let timed = |_| {
        let start = Instant::now();
        thread::scope(|scope| {
            for _ in 0..cores {
                scope.spawn(work);
            }
        });
        start.elapsed().as_secs_f64()
    };
    timed(0);
    median((0..TIMES).map(timed).collect()).expect("some times")
}
