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

use moefold_executor::error::Blame;
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
    attempt(ranks, &[], None).map_err(|broken| broken.failure)
}

/// How processes came to no good end.
pub(crate) struct Broken {
    /// What a user hears.
    pub(crate) failure: Failure,
    /// The ranks that it is because of, as far as that is known.
    pub(crate) culprits: Vec<u32>,
    /// Whether the same command again would come to the same, or was not asked for.
    pub(crate) is_final: bool,
}

impl From<Failure> for Broken {
    fn from(failure: Failure) -> Self {
        Self {
            failure,
            culprits: Vec::new(),
            is_final: true,
        }
    }
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        Failure::from(error).into()
    }
}

/// Runs this command on `ranks` processes, with `added` flags and the GPUs that are `shown`, else all.
pub(crate) fn attempt(ranks: u32, added: &[OsString], shown: Option<&str>) -> Result<(), Broken> {
    let program = std::env::current_exe()?;
    let arguments = of_rank(std::env::args_os().skip(1), added);
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
        if let Some(shown) = shown {
            command.env("CUDA_VISIBLE_DEVICES", shown);
        }
        if rank > 0 {
            command.stdout(Stdio::null());
        }
        let mut process = command
            .spawn()
            .with_context(|| format!("could not start rank {rank} of {ranks}"))
            .map_err(Failure::Runtime)?;
        let errors = process.stderr.take().expect("it was piped");
        family.0.push(Member {
            errors: Some(thread::spawn(move || listen(errors, rank == 0))),
            said: Said::default(),
            process,
            ended: None,
        });
    }
    family.wait()
}

/// The arguments of a rank: `--launch env`, `added` flags in place of those of the same name, and none that are the
/// parent's alone.
fn of_rank(mut arguments: impl Iterator<Item = OsString>, added: &[OsString]) -> Vec<OsString> {
    let is_added = |name: &str| added.iter().any(|flag| flag == name);
    let mut kept = Vec::new();
    let mut added_at = None;
    while let Some(argument) = arguments.next() {
        let text = argument.to_string_lossy();
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (&*text, None),
        };
        match name {
            "--launch" if value.is_none() => {
                kept.extend(["--launch".into(), "env".into()]);
                drop(arguments.next());
            }
            "--launch" => kept.push("--launch=env".into()),
            "--restarts" => drop(value.is_none().then(|| arguments.next())),
            "--elastic" => {}
            "--out" if is_added(name) => drop(value.is_none().then(|| arguments.next())),
            "--continue" if is_added(name) => {}
            _ => {
                kept.push(argument.clone());
                if added_at.is_none() && !name.starts_with('-') {
                    added_at = Some(kept.len());
                }
            }
        }
    }
    // After the verb, where no list of values can take them.
    let at = added_at.unwrap_or(kept.len());
    kept.splice(at..at, added.iter().cloned());
    kept
}

/// A port that nobody listened at a moment ago.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
        .local_addr()?
        .port())
}

/// What a rank says of its end.
#[derive(Default)]
struct Said {
    /// The error that it ends with.
    error: String,
    blame: Option<Blame>,
}

/// Before the line of an error: who is to blame for it, said to the process that started this one.
const BLAMED: &str = "blamed: ";

/// Before the number of a rank that hangs.
const SILENT: &str = "silent ";

/// Tells the parent, where there is one, who is to blame for what this process ends with.
pub(crate) fn blame(failure: &Failure) {
    if std::env::var_os(PARENT_VARIABLE).is_none() {
        return;
    }
    let who = match failure.blame() {
        Blame::Own => return,
        Blame::Rank(rank) => rank.to_string(),
        Blame::Silent(rank) => format!("{SILENT}{rank}"),
        Blame::Others => "others".to_owned(),
        Blame::Run => "run".to_owned(),
    };
    // Nothing is left to do when stderr is gone.
    let _ = writeln!(io::stderr(), "{BLAMED}{who}");
}

/// The same read again.
fn blamed(line: &str) -> Option<Blame> {
    match line.strip_prefix(BLAMED)? {
        "others" => Some(Blame::Others),
        "run" => Some(Blame::Run),
        other => match other.strip_prefix(SILENT) {
            Some(rank) => rank.parse().ok().map(Blame::Silent),
            None => other.parse().ok().map(Blame::Rank),
        },
    }
}

/// What a rank says on stderr; the parent says it again at once where `pass` asks for it, up to the
/// error that it ends with.
fn listen(errors: ChildStderr, pass: bool) -> Said {
    let mut said = Said::default();
    let mut ended = false;
    for line in BufReader::new(errors).lines().map_while(Result::ok) {
        if !ended && let Some(blame) = blamed(&line) {
            said.blame = Some(blame);
            continue;
        }
        ended |= line.starts_with("error: ");
        if pass && !ended {
            // Nothing is left to do when stderr is gone.
            let _ = writeln!(io::stderr(), "{line}");
        }
        if ended {
            said.error.push_str(&line);
            said.error.push('\n');
        }
    }
    said
}

/// A rank; its number is its place in the family.
struct Member {
    /// With its stdin, which stays open as long as it is not waited for.
    process: Child,
    /// Until it has ended.
    errors: Option<JoinHandle<Said>>,
    said: Said,
    ended: Option<ExitStatus>,
}

impl Member {
    /// Takes what it has said; its end closes its stderr.
    fn hear(&mut self) {
        if let Some(Ok(said)) = self.errors.take().map(JoinHandle::join) {
            self.said = said;
        }
    }
}

/// The ranks, ended with whoever holds them.
#[derive(Default)]
struct Family(Vec<Member>);

impl Family {
    /// Waits for all; the error is that of the rank that failed on its own account.
    fn wait(mut self) -> Result<(), Broken> {
        let mut until: Option<Instant> = None;
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
                if member.ended.is_some_and(|status| !status.success()) {
                    member.hear();
                    until.get_or_insert_with(|| Instant::now() + GRACE);
                }
            }
            let running = self.is_awaited();
            if !running || until.is_some_and(|until| Instant::now() > until) {
                break;
            }
            thread::sleep(PAUSE);
        }
        let mut ends: Vec<End> = self.0.iter().map(|member| End::of(member.ended)).collect();
        self.end();
        let mut words = vec![String::new(); ends.len()];
        for (member, (end, word)) in self.0.iter_mut().zip(ends.iter_mut().zip(&mut words)) {
            member.hear();
            let said = &member.said;
            let error = said.error.trim().trim_start_matches("error: ");
            error.clone_into(word);
            if let End::Code(_, blame) = end {
                *blame = said.blame.unwrap_or(*blame);
            }
        }
        // A rank that stops because of another exits with 1, and by then that other has failed too.
        let order = |end: &End| match end {
            End::Signal(_) => 0,
            End::Code(1, Blame::Own | Blame::Run) => 2,
            End::Code(1, _) => 3,
            End::Code(..) => 1,
            End::Hung | End::Fine => 4,
        };
        let of = |rank: &usize| (order(&ends[*rank]), *rank);
        let first = (0..ends.len())
            .min_by_key(of)
            .filter(|&rank| order(&ends[rank]) < 4);
        let Some(rank) = first else {
            return Ok(());
        };
        let error = match ends[rank] {
            End::Signal(signal) => anyhow!("rank {rank} was ended by signal {signal}"),
            End::Code(code, _) if words[rank].is_empty() => {
                anyhow!("rank {rank} ended with exit code {code}")
            }
            _ => anyhow!("{}", words[rank]),
        };
        let failure = match ends[rank] {
            End::Code(2, _) => Failure::Request(error),
            End::Code(3, _) => Failure::Infeasible(error),
            End::Code(code, _) => match signals::of_code(code) {
                Some(signal) => Failure::Signalled(signal, error),
                None => Failure::Runtime(error),
            },
            _ => Failure::Runtime(error),
        };
        let of_run = ends
            .iter()
            .any(|end| matches!(end, End::Code(_, Blame::Run)));
        Err(Broken {
            culprits: culprits(&ends),
            // Rank 0 says what became of the run as the last it does.
            is_final: of_run || !matches!(failure, Failure::Runtime(_)) || ends[0] == End::Fine,
            failure,
        })
    }

    /// Whether one is still to end; those that others have given up may never.
    fn is_awaited(&self) -> bool {
        let blamed = self.0.iter().filter_map(|member| member.said.blame);
        let given_up: Vec<u32> = blamed
            .filter_map(|blame| match blame {
                Blame::Silent(rank) => Some(rank),
                _ => None,
            })
            .collect();
        let mut members = (0..).zip(&self.0);
        members.any(|(rank, member)| member.ended.is_none() && !given_up.contains(&rank))
    }

    /// Ends those that have not.
    fn end(&mut self) {
        for member in self.0.iter_mut().filter(|member| member.ended.is_none()) {
            // One that has just ended by itself is as good.
            let _ = member.process.kill();
            member.ended = member.process.wait().ok();
        }
    }
}

/// How a rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Fine,
    /// It did not, in time.
    Hung,
    Signal(i32),
    Code(i32, Blame),
}

impl End {
    /// What its status says, if it has ended.
    fn of(status: Option<ExitStatus>) -> Self {
        let Some(status) = status else {
            return Self::Hung;
        };
        match (status.code(), status.signal()) {
            (Some(0), _) => Self::Fine,
            (Some(code), _) => Self::Code(code, Blame::Own),
            (None, signal) => Self::Signal(signal.unwrap_or(0)),
        }
    }
}

/// The ranks that others ended because of: those that a signal ended, else those that others name, else those that failed
/// on their own account, else those that did not end.
fn culprits(ends: &[End]) -> Vec<u32> {
    let ranks = |is: &dyn Fn(&End) -> bool| -> Vec<u32> {
        let all = ends.iter().zip(0..);
        all.filter(|(end, _)| is(end))
            .map(|(_, rank)| rank)
            .collect()
    };
    let named = || {
        let names = |rank: u32| {
            let mut ends = ends.iter();
            ends.any(|end| {
                matches!(end, End::Code(_, Blame::Rank(named) | Blame::Silent(named)) if *named == rank)
            })
        };
        // One that went because of another is named by those that it left.
        let mut found = ranks(&|end| matches!(end, End::Hung | End::Code(_, Blame::Own)));
        found.retain(|&rank| names(rank));
        found
    };
    let groups: [&dyn Fn() -> Vec<u32>; 4] = [
        &|| ranks(&|end| matches!(end, End::Signal(_))),
        &named,
        &|| ranks(&|end| matches!(end, End::Code(_, Blame::Own))),
        &|| ranks(&|end| *end == End::Hung),
    ];
    let found = groups.iter().map(|group| group());
    found
        .into_iter()
        .find(|found| !found.is_empty())
        .unwrap_or_default()
}

impl Drop for Family {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_get_the_same_arguments_but_for_how_they_are_started() {
        let check = |given: &[&str], added: &[&str], expected: &[&str]| {
            let added: Vec<OsString> = added.iter().map(OsString::from).collect();
            let replaced = of_rank(given.iter().map(OsString::from), &added);
            assert_eq!(replaced, expected);
        };
        check(
            &["execute", "p", "--launch", "processes", "--out", "d"],
            &[],
            &["execute", "p", "--launch", "env", "--out", "d"],
        );
        check(
            &["-q", "execute", "--launch=processes", "p"],
            &[],
            &["-q", "execute", "--launch=env", "p"],
        );
        let given = "-q execute p --text a b --restarts 3 --elastic=1 --continue --launch processes --out=d";
        check(
            &given.split(' ').collect::<Vec<_>>(),
            &["--out", "d", "--continue"],
            &[
                "-q",
                "execute",
                "--out",
                "d",
                "--continue",
                "p",
                "--text",
                "a",
                "b",
                "--launch",
                "env",
            ],
        );
    }

    #[test]
    fn who_is_to_blame_is_told_from_who_goes_with_them() {
        let of = |rank| End::Code(1, Blame::Rank(rank));
        let (own, others) = (End::Code(1, Blame::Own), End::Code(1, Blame::Others));
        for (ends, expected) in [
            (&[of(1), End::Signal(9), of(0)][..], &[1][..]),
            (&[of(1), End::Signal(9), End::Signal(6)], &[1, 2]),
            // Rank 0 leaves because of a rank that hangs, and others because of rank 0.
            (&[End::Code(1, Blame::Silent(2)), of(0), End::Hung], &[2]),
            (&[End::Hung, End::Hung, of(1)], &[1]),
            (&[of(1), own, of(0)], &[1]),
            (&[own, own], &[0, 1]),
            (&[others, End::Hung], &[1]),
            (&[others, others], &[]),
            (&[others, of(0)], &[]),
        ] {
            assert_eq!(culprits(ends), expected, "{ends:?}");
        }
        for blame in [Blame::Rank(12), Blame::Silent(3), Blame::Others, Blame::Run] {
            let word = match blame {
                Blame::Rank(rank) => rank.to_string(),
                Blame::Silent(rank) => format!("silent {rank}"),
                Blame::Others => "others".to_owned(),
                _ => "run".to_owned(),
            };
            assert_eq!(blamed(&format!("{BLAMED}{word}")), Some(blame));
        }
        assert_eq!(blamed("error: blamed"), None);
    }
}
