//! Processes that have until a deadline to end.

use std::io::{self, Read};
use std::process::{Child, Output};
use std::thread;
use std::time::{Duration, Instant};

/// What a process printed; one that takes longer is killed and an error.
pub(crate) fn wait_at_most(mut child: Child, deadline: Duration) -> io::Result<Output> {
    let pipes = (child.stdout.take(), child.stderr.take());
    let read = |pipe: Option<Box<dyn Read + Send>>| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            // What came before a broken pipe is all there is.
            let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
            bytes
        })
    };
    let stdout = read(pipes.0.map(|pipe| Box::new(pipe) as Box<dyn Read + Send>));
    let stderr = read(pipes.1.map(|pipe| Box::new(pipe) as Box<dyn Read + Send>));
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begun.elapsed() > deadline {
            child.kill()?;
            child.wait()?;
            let why = format!("no end after {} s: killed", deadline.as_secs());
            return Err(io::Error::other(why));
        }
        thread::sleep(Duration::from_millis(50));
    };
    Ok(Output {
        status,
        stdout: stdout.join().unwrap_or_default(),
        stderr: stderr.join().unwrap_or_default(),
    })
}
