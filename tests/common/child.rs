//! Programs that a test starts, waits for and ends.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

/// A process that ends with the test, however that ends.
pub(crate) struct Guarded(pub(crate) Child);

impl Guarded {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.spawn().expect("the program starts"))
    }

    /// Ends it from outside.
    pub(crate) fn kill(&mut self) {
        self.0.kill().expect("it runs");
        self.0.wait().expect("it ended");
    }

    /// Waits for it, not for ever.
    pub(crate) fn ended(mut self) -> (i32, String, String) {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.0.try_wait().expect("it is ours") {
                break status;
            }
            assert!(
                begun.elapsed() < Duration::from_mins(1),
                "a rank does not end"
            );
            thread::sleep(Duration::from_millis(10));
        };
        let text = |pipe: &mut dyn Read| {
            let mut text = String::new();
            pipe.read_to_string(&mut text).expect("what it said");
            text
        };
        let stdout = text(self.0.stdout.as_mut().expect("it is piped"));
        let stderr = text(self.0.stderr.as_mut().expect("it is piped"));
        (status.code().expect("no signal ended it"), stdout, stderr)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // One that has ended by itself is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until a run that writes to `out` has taken some steps.
pub(crate) fn await_steps(out: &str) {
    let steps = Path::new(out).join("steps.jsonl");
    let begun = Instant::now();
    while !fs::read_to_string(&steps).is_ok_and(|text| text.lines().count() > 2) {
        assert!(
            begun.elapsed() < Duration::from_mins(1),
            "no step was taken"
        );
        thread::sleep(Duration::from_millis(10));
    }
}

/// Sends a signal.
pub(crate) fn signal(name: &str, process: u32) {
    let script = format!("kill -{name} {process}");
    let done = Command::new("sh").args(["-c", &script]).status();
    assert!(done.expect("there is a shell").success(), "{script}");
}

/// State and parent of a process; none where it is gone.
pub(crate) fn state(process: u32) -> Option<(char, u32)> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name before it may hold anything.
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// The processes that one has started and that are there.
pub(crate) fn children(parent: u32) -> Vec<u32> {
    let all = fs::read_dir("/proc").expect("Linux");
    let numbers = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    numbers
        .filter(|&process| state(process).is_some_and(|(_, of)| of == parent))
        .collect()
}
