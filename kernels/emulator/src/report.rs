//! What is wrong, as whoever reads it knows the kernel: block, thread, line, argument.

use std::fmt::Write as _;

use crate::clock::Agent;
use crate::fault::{Fault, Kind};
use crate::machine::{Machine, State, Wait};
use crate::shadow::{Access, Conflict, Previous};

impl Machine<'_> {
    pub(crate) fn deadlock(&self, why: &str) -> Fault {
        let mut waits: Vec<(State, Vec<usize>)> = Vec::new();
        for (number, thread) in self.threads.iter().enumerate() {
            if thread.state == State::Done {
                continue;
            }
            match waits.iter_mut().find(|(state, _)| *state == thread.state) {
                Some((_, threads)) => threads.push(number),
                None => waits.push((thread.state, vec![number])),
            }
        }
        let mut text = format!("{}: {why}", self.place(None));
        for (state, threads) in waits.iter().take(8) {
            let (what, site) = match state {
                State::Waiting(wait, site) => (self.describe_wait(wait), Some(*site)),
                _ => ("a loop that asks an mbarrier or an atomic".to_owned(), None),
            };
            let line = site.map_or(String::new(), |site| self.line(site));
            let _ = write!(text, "\n  {} in {what}{line}", ranges(threads));
        }
        Fault {
            kind: Kind::Deadlock,
            detail: text,
        }
    }

    fn describe_wait(&self, wait: &Wait) -> String {
        match wait {
            Wait::Gate(0) => "__syncthreads".to_owned(),
            Wait::Gate(id) => {
                let gate = &self.gates[*id as usize];
                format!(
                    "named_sync({id}, {}), {} arrived",
                    gate.expected, gate.arrived
                )
            }
            Wait::Collective(what) => what.to_string(),
            Wait::Mbarrier { at, parity } => {
                let state = self
                    .mbarriers
                    .get(at)
                    .map_or(String::new(), ToString::to_string);
                format!("mbar_wait of shared memory + {at}, parity {parity}: {state}")
            }
            Wait::Bulk => "bulk_wait".to_owned(),
        }
    }

    /// Kernel, block, thread and line.
    fn place(&self, thread: Option<usize>) -> String {
        let [x, y, z] = self.block;
        let thread = thread.map_or(String::new(), |thread| format!(", thread {thread}"));
        format!(
            "{}, block ({x}, {y}, {z}){thread}, MOEFOLD_SEED={}",
            self.setup.entry, self.setup.seed
        )
    }

    fn line(&self, site: u32) -> String {
        let line = self.setup.library.line(site);
        line.map_or(String::new(), |line| format!(" ({line})"))
    }

    /// A fault of the running thread.
    pub(crate) fn fault(&self, kind: Kind, site: u32, what: impl AsRef<str>) -> Fault {
        self.fault_of(self.current, kind, site, what)
    }

    pub(crate) fn fault_of(
        &self,
        thread: usize,
        kind: Kind,
        site: u32,
        what: impl AsRef<str>,
    ) -> Fault {
        let (place, line) = (self.place(Some(thread)), self.line(site));
        Fault {
            kind,
            detail: format!("{place}{line}: {}", what.as_ref()),
        }
    }

    fn describe_agent(&self, agent: Agent) -> String {
        let agent = usize::from(agent);
        let threads = self.threads.len();
        if agent < threads {
            format!("thread {agent}")
        } else if agent < threads + self.warps.len() {
            format!("the wgmma of warp {}", agent - threads)
        } else {
            "a bulk copy".to_owned()
        }
    }

    /// An address as whoever reads the report knows it.
    pub(crate) fn describe_address(&self, address: u64) -> String {
        if let Some(offset) = self.shared.offset(address) {
            return format!("shared memory + {offset} (of {} bytes)", self.shared.bytes);
        }
        if let Some(owner) = self.threads.iter().position(|t| t.stack.contains(&address)) {
            return format!("a local variable of thread {owner}");
        }
        if let Some((start, bytes)) = self.memory.nearest(address) {
            let arguments = self.setup.addresses.iter();
            let inside = |(_, a): &&(usize, u64)| (start..=start + bytes as u64).contains(a);
            let arguments: Vec<_> = arguments
                .filter(inside)
                .map(|(i, _)| i.to_string())
                .collect();
            let offset = address - start;
            if arguments.is_empty() {
                return format!(
                    "byte {offset} of an allocation of {bytes} bytes that is no argument"
                );
            }
            let arguments = arguments.join(" and ");
            return format!("byte {offset} of the {bytes} that argument {arguments} points to");
        }
        format!("{address:#x}, in no allocation")
    }

    #[expect(clippy::too_many_arguments, reason = "a report has this many sides")]
    pub(crate) fn explain(
        &self,
        wrong: Option<(usize, Conflict)>,
        thread: usize,
        agent: Agent,
        address: u64,
        bytes: usize,
        access: Access,
        site: u32,
    ) -> Fault {
        let verb = match access {
            Access::Read => "reads",
            Access::Write => "writes",
            Access::Atomic => "atomically changes",
            Access::AtomicRead => "atomically reads",
            Access::AtomicWrite => "atomically writes",
        };
        let who = if agent as usize == thread {
            String::new()
        } else {
            format!("{} ", self.describe_agent(agent))
        };
        let Some((at, conflict)) = wrong else {
            let place = self.describe_address(address);
            let what = format!("{who}{verb} {bytes} bytes at {place}, out of bounds");
            return self.fault_of(thread, Kind::OutOfBounds, site, what);
        };
        let place = self.describe_address(at as u64);
        let head = format!("{who}{verb} {bytes} bytes, and at {place}");
        let previous = |p: Previous| {
            let who = self.describe_agent(p.who);
            let verb = if p.wrote { "written" } else { "read" };
            let line = p.site.map_or(String::new(), |site| self.line(site));
            let block = if p.elsewhere { " of another block" } else { "" };
            format!("{verb} by {who}{block}{line}")
        };
        let (kind, rest) = match conflict {
            Conflict::Uninitialized => (Kind::Uninitialized, "nothing was ever written".to_owned()),
            Conflict::Adopted => {
                let rest = "it is another rank's memory, which may only be read";
                (Kind::OutOfBounds, rest.to_owned())
            }
            Conflict::Race(p) => {
                let remedy = if p.elsewhere {
                    "nothing orders the two: blocks of a launch are ordered by thread_fence and an \
                     atomic on one side, an atomic and thread_fence on the other"
                } else {
                    "nothing orders the two"
                };
                (Kind::Race, format!("it was {}; {remedy}", previous(p)))
            }
            Conflict::Unfenced(p) => {
                let remedy = if self.shared.offset(at as u64).is_some() {
                    "fence_async between that write and the barrier that let this copy or wgmma start"
                } else {
                    "fence_async_global between that write and the start of this copy, by one of the \
                     two threads"
                };
                let what = format!("it was {} without {remedy}", previous(p));
                (Kind::Unfenced, what)
            }
        };
        self.fault_of(thread, kind, site, format!("{head} {rest}"))
    }
}

/// Numbers as ranges: `threads 0-127, 130`.
fn ranges(numbers: &[usize]) -> String {
    let mut all: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match all.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => all.push((number, number)),
        }
    }
    let shown = all.iter().take(6).map(|&(first, last)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    });
    let more = if all.len() > 6 { ", and others" } else { "" };
    format!("threads {}{more}", shown.collect::<Vec<_>>().join(", "))
}
