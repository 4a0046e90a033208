//! `--launch processes`: every rank a process of this machine.
//!
//! The parent starts this program once a rank with `--launch env` and what torchrun would say, on a
//! free port of the loopback address. It passes on what rank 0 prints and the first failure, and ends
//! the ranks that do not end by themselves. However it ends itself, by a signal too, they end with it:
//! each reads from a pipe, which closes with the parent. A signal that training ends at with a checkpoint goes to the
//! ranks through that pipe, as its number, for it may have come to the parent alone.

use std::ffi::OsString;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{self, Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, anyhow};

use moefold_executor::transport::{Launched, SECRET_VARIABLE, new_secret};

use crate::cli::Launch;
use crate::failure::{Failure, failure};
use crate::signals;

/// Set where stdin is a pipe of the process that started this one.
const PARENT_VARIABLE: &str = "MOEFOLD_PARENT_ON_STDIN";

/// How long ranks have to end by themselves once one has failed.
const GRACE: Duration = Duration::from_secs(5);

/// Between two looks at the ranks.
const PAUSE: Duration = Duration::from_millis(20);

/// This process's place in a run, as its launcher says it; a rank that [`processes`] started ends with
/// its parent from here on.
pub(crate) fn from_environment() -> Result<Launched, Failure> {
    if std::env::var_os(PARENT_VARIABLE).is_some() {
        thread::Builder::new()
            .name("parent".to_owned())
            .spawn(end_with_parent)?;
    }
    Launched::from_environment().map_err(failure)
}

/// Runs a command; where it is one rank and fails before the ranks have met, the others are told why.
pub(crate) fn as_rank(
    launch: Launch,
    command: impl FnOnce() -> Result<(), Failure>,
) -> Result<(), Failure> {
    command().inspect_err(|failure| {
        if launch == Launch::Env
            && let Ok(launched) = Launched::from_environment()
        {
            launched.decline(&failure.to_string());
        }
    })
}

/// Waits until the parent's end of the pipe closes, and ends this process; hears of signals meanwhile.
fn end_with_parent() {
    let mut stdin = io::stdin();
    let mut signal = [0];
    loop {
        match stdin.read(&mut signal) {
            Ok(1..) => signals::tell(signal[0].into()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => signals::end(1),
        }
    }
}

/// Whether a parent hands signals on to its ranks, or ends with its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnSignal {
    End,
    Tell,
}

/// Runs this very command on `ranks` processes.
pub(crate) fn processes(ranks: u32, on_signal: OnSignal) -> Result<(), Failure> {
    if on_signal == OnSignal::Tell {
        signals::catch()?;
    }
    let program = std::env::current_exe()?;
    let arguments = with_env(std::env::args_os().skip(1));
    let port = free_port()?.to_string();
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let secret = new_secret();
    let job = format!("{}-{}", process::id(), now.unwrap_or_default().as_nanos());
    let mut family = Family::default();
    for rank in 0..ranks {
        let mut command = Command::new(&program);
        command
            .args(&arguments)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("LOCAL_WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string())
            .env("MASTER_PORT", &port)
            .env("MOEFOLD_JOB", &job)
            .env(SECRET_VARIABLE, &secret)
            .env_remove("MOEFOLD_PORT")
            .env_remove("TORCHELASTIC_USE_AGENT_STORE")
            .env(PARENT_VARIABLE, "1")
            .stdin(Stdio::piped())
            .stderr(Stdio::piped());
        if rank > 0 {
            command.stdout(Stdio::null());
        }
        let mut process = command
            .spawn()
            .with_context(|| format!("could not start rank {rank} of {ranks}"))
            .map_err(Failure::Runtime)?;
        let errors = process.stderr.take().expect("it was piped");
        family.0.push(Member {
            rank,
            errors: Some(thread::spawn(move || listen(errors, rank == 0))),
            process,
            ended: None,
        });
    }
    family.wait()
}

/// The arguments of a rank: `--launch env`, the rest as it is.
fn with_env(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut replaced = Vec::new();
    let mut is_value = false;
    for argument in arguments {
        let text = argument.to_string_lossy();
        if is_value {
            replaced.push("env".into());
        } else if text.starts_with("--launch=") {
            replaced.push("--launch=env".into());
        } else {
            replaced.push(argument.clone());
        }
        is_value = !is_value && text == "--launch";
    }
    replaced
}

/// A port that nobody listened at a moment ago.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
        .local_addr()?
        .port())
}

/// What a rank says on stderr; the parent says it again at once where `pass` asks for it, up to the
/// error that it ends with.
fn listen(errors: ChildStderr, pass: bool) -> String {
    let mut said = String::new();
    let mut ended = false;
    for line in BufReader::new(errors).lines().map_while(Result::ok) {
        ended |= line.starts_with("error: ");
        if pass && !ended {
            // Nothing is left to do when stderr is gone.
            let _ = writeln!(io::stderr(), "{line}");
        }
        if ended {
            said.push_str(&line);
            said.push('\n');
        }
    }
    said
}

struct Member {
    rank: u32,
    /// With its stdin, which stays open as long as it is not waited for.
    process: Child,
    errors: Option<JoinHandle<String>>,
    ended: Option<ExitStatus>,
}

/// The ranks, ended with whoever holds them.
#[derive(Default)]
struct Family(Vec<Member>);

impl Family {
    /// Waits for all; the error is that of the rank that failed on its own account.
    fn wait(mut self) -> Result<(), Failure> {
        let mut until: Option<Instant> = None;
        let mut failed: Vec<(u32, ExitStatus)> = Vec::new();
        let mut is_told = false;
        loop {
            let signal = signals::told().load(Ordering::Relaxed);
            if signal > 0 && !is_told {
                is_told = true;
                for member in &mut self.0 {
                    // One that has ended hears nothing.
                    let _ =
                        (member.process.stdin.as_mut()).map(|pipe| pipe.write_all(&[signal as u8]));
                }
            }
            for member in self.0.iter_mut().filter(|member| member.ended.is_none()) {
                member.ended = member.process.try_wait()?;
                if let Some(status) = member.ended
                    && !status.success()
                {
                    failed.push((member.rank, status));
                    until.get_or_insert_with(|| Instant::now() + GRACE);
                }
            }
            let running = self.0.iter().any(|member| member.ended.is_none());
            if !running || until.is_some_and(|until| Instant::now() > until) {
                break;
            }
            thread::sleep(PAUSE);
        }
        // A rank that stops because of another exits with 1, and by then that other has failed too.
        let order = |status: &ExitStatus| match status.code() {
            None => 0,
            Some(1) => 2,
            Some(_) => 1,
        };
        let first = failed
            .iter()
            .min_by_key(|(rank, status)| (order(status), *rank));
        let Some(&(rank, status)) = first else {
            return Ok(());
        };
        let said = self.0[rank as usize].errors.take().map(JoinHandle::join);
        let said = said.and_then(Result::ok).unwrap_or_default();
        let said = said.trim().trim_start_matches("error: ");
        let error = match (status.signal(), status.code()) {
            (Some(signal), _) => anyhow!("rank {rank} was ended by signal {signal}"),
            (_, code) if said.is_empty() => {
                anyhow!("rank {rank} ended with exit code {}", code.unwrap_or(-1))
            }
            _ => anyhow!("{said}"),
        };
        Err(match status.code() {
            Some(2) => Failure::Request(error),
            Some(3) => Failure::Infeasible(error),
            code => match code.and_then(signals::of_code) {
                Some(signal) => Failure::Signalled(signal, error),
                None => Failure::Runtime(error),
            },
        })
    }
}

impl Drop for Family {
    fn drop(&mut self) {
        for member in self.0.iter_mut().filter(|member| member.ended.is_none()) {
            // One that has just ended by itself is as good.
            let _ = member.process.kill();
            let _ = member.process.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_get_the_same_arguments_but_for_how_they_are_started() {
        let check = |given: &[&str], expected: &[&str]| {
            let replaced = with_env(given.iter().map(OsString::from));
            assert_eq!(replaced, expected);
        };
        check(
            &["execute", "p", "--launch", "processes", "--out", "d"],
            &["execute", "p", "--launch", "env", "--out", "d"],
        );
        check(
            &["-q", "execute", "--launch=processes", "p"],
            &["-q", "execute", "--launch=env", "p"],
        );
    }
}
