//! A process that reads inputs until one ends it.

use std::fs::File;
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};

use crate::mutate::Corpus;
use crate::target::Target;

/// What an input may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Computing.
    pub(crate) seconds: f64,
    /// Memory beside what the process begins with.
    pub(crate) bytes: u64,
}

/// What is read.
#[derive(Debug)]
pub(crate) enum Inputs<'a> {
    /// Those of a seed with these numbers.
    Drawn { seed: u64, numbers: Range<u64> },
    /// This one.
    File(&'a Path),
}

/// In the folder of notes: the number of the input that is read, eight bytes.
pub(crate) const NUMBER: &str = "number";
/// In the folder of notes: how many inputs were accepted, eight bytes.
pub(crate) const ACCEPTED: &str = "accepted";
/// What stderr says of an input that computes for too long.
pub(crate) const HANGS: &str = "hangs:";
/// Exit code of a panic, as of any Rust program.
const PANICKED: i32 = 101;
/// Wall seconds after which an input hangs however little it computes.
const STUCK: Duration = Duration::from_mins(1);

/// When an input began.
static BEGAN: Began = Began {
    number: AtomicU64::new(u64::MAX),
    computed: AtomicU64::new(0),
};

struct Began {
    number: AtomicU64,
    /// Nanoseconds that the process had computed for.
    computed: AtomicU64,
}

/// Reads inputs in this process.
pub(crate) fn run(
    target: &Target,
    inputs: &Inputs<'_>,
    limits: Limits,
    notes: &Path,
) -> io::Result<()> {
    let place = notes.join("place");
    std::fs::create_dir_all(&place)?;
    let number = File::create(notes.join(NUMBER))?;
    let accepted = File::create(notes.join(ACCEPTED))?;
    let corpus = match inputs {
        Inputs::Drawn { .. } => Some(target.corpus()?),
        Inputs::File(_) => None,
    };
    // What all inputs share, such as tables of the program, is no input's.
    (target.prepare)(&place);
    let limit = data_bytes() + limits.bytes;
    setrlimit(
        Resource::Data,
        Rlimit {
            current: Some(limit),
            maximum: Some(limit),
        },
    )?;
    let begun = Instant::now();
    thread::spawn(move || watch(limits.seconds, begun));
    let mut count = 0_u64;
    let alone = matches!(inputs, Inputs::File(_));
    let mut read = |at: u64, input: &[u8]| -> io::Result<()> {
        number.write_all_at(&at.to_le_bytes(), 0)?;
        BEGAN.computed.store(computed(), Ordering::SeqCst);
        BEGAN.number.store(at, Ordering::SeqCst);
        // A panic that nobody catches ends a process by itself only where no thread waits for it.
        let outcome = std::panic::catch_unwind(|| (target.read)(&place, input));
        match outcome {
            Ok(Ok(())) => count += 1,
            Ok(Err(why)) if alone => writeln!(io::stdout(), "{why}")?,
            Ok(Err(_)) => {}
            Err(_) => std::process::exit(PANICKED),
        }
        Ok(())
    };
    match inputs {
        Inputs::File(file) => read(0, &std::fs::read(file)?)?,
        Inputs::Drawn { seed, numbers } => {
            let corpus: Corpus = corpus.expect("it was read");
            for at in numbers.clone() {
                read(at, &corpus.input(*seed, at))?;
            }
        }
    }
    accepted.write_all_at(&count.to_le_bytes(), 0)
}

/// Ends the process where an input takes too long.
fn watch(seconds: f64, begun: Instant) {
    let limit = (seconds * 1e9) as u64;
    let (mut seen, mut since) = (u64::MAX, begun);
    loop {
        thread::sleep(Duration::from_millis(50));
        let before = BEGAN.number.load(Ordering::SeqCst);
        let taken = computed().saturating_sub(BEGAN.computed.load(Ordering::SeqCst));
        if before != seen {
            (seen, since) = (before, Instant::now());
            continue;
        }
        let stays = BEGAN.number.load(Ordering::SeqCst) == before && before != u64::MAX;
        if stays && (taken > limit || since.elapsed() > STUCK) {
            // The parent goes by the message.
            let _ = writeln!(io::stderr(), "{HANGS} over {seconds} s");
            std::process::exit(PANICKED);
        }
    }
}

/// Nanoseconds that this process has computed for.
fn computed() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Private memory that this process may write, bytes: what the limit counts.
fn data_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:"));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}
