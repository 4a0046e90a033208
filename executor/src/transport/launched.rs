//! [`Launched`]: what a launcher tells a process of its place in a run, by environment variables.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::secret::{Nonce, SHORTEST, Secret, new_secret, nonce};
use crate::error::Error;

/// How long a rank waits for others, in seconds, at most 30 days; ten minutes where it is not set.
pub const TIMEOUT_VARIABLE: &str = "MOEFOLD_TIMEOUT_S";

/// No run waits longer for a rank.
const LONGEST_TIMEOUT: Duration = Duration::from_hours(30 * 24);

/// The port at which rank 0 listens, where the launcher's own does not do.
const PORT_VARIABLE: &str = "MOEFOLD_PORT";

/// A job of ours, so that ranks of two jobs on one port are told apart.
const JOB_VARIABLE: &str = "MOEFOLD_JOB";

/// The secret by which ranks of a run know each other, the same for all of them.
pub const SECRET_VARIABLE: &str = "MOEFOLD_SECRET";

/// A file that holds it, where it is not in the environment.
const SECRET_FILE_VARIABLE: &str = "MOEFOLD_SECRET_FILE";

/// Whether this process, which is one rank, has gone to meet the others.
static HAS_BEGUN: AtomicBool = AtomicBool::new(false);

/// One process of a run, as its launcher started it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launched {
    /// Its rank.
    pub rank: u32,
    /// Ranks of the run.
    pub ranks: u32,
    /// Its number among the ranks of its machine.
    pub local_rank: u32,
    /// Ranks of its machine.
    pub local_ranks: u32,
    /// The GPU it takes, of those it sees: that of its number, or the only one it is shown.
    pub gpu: u32,
    /// The machine of rank 0.
    pub host: String,
    /// The port at which rank 0 listens.
    pub port: u16,
    /// What the launcher calls the job; the same for all its ranks.
    pub job: String,
    /// By which ranks of this run know each other.
    pub(super) secret: Secret,
    /// A number of this process, among those that may come as one rank.
    pub(super) process: Nonce,
    slurm: bool,
}

impl Launched {
    /// What torchrun, or else Slurm, says in this process's environment.
    pub fn from_environment() -> Result<Self, Error> {
        Self::from(&|name| std::env::var(name).ok())
    }

    /// What the variables that `get` gives say.
    fn from(get: &dyn Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let launched = if get("RANK").is_some() || get("WORLD_SIZE").is_some() {
            Self::of_torchrun(get)
        } else if get("SLURM_PROCID").is_some() {
            Self::of_slurm(get)
        } else {
            Err(refuse(
                "neither RANK (torchrun) nor SLURM_PROCID (Slurm) is set: start the ranks with \
                 torchrun or srun, or have this program launch processes",
            ))
        }?;
        let shown = get("CUDA_VISIBLE_DEVICES").unwrap_or_default();
        let gpu = if shown.is_empty() || shown.contains(',') {
            launched.local_rank
        } else {
            0
        };
        Self { gpu, ..launched }.consistent()
    }

    /// This process goes to meet the others.
    pub(super) fn begin() {
        HAS_BEGUN.store(true, Ordering::SeqCst);
    }

    /// Whether it has.
    pub(super) fn has_begun() -> bool {
        HAS_BEGUN.load(Ordering::SeqCst)
    }

    fn of_torchrun(get: &dyn Fn(&str) -> Option<String>) -> Result<Self, Error> {
        const LAUNCHER: &str = "torchrun";
        let ranks = number(get, "WORLD_SIZE", LAUNCHER)?;
        let master: u16 = number(get, "MASTER_PORT", LAUNCHER)?;
        // Its agent may hold that port for a store of its own and says so.
        let held = get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|said| said == "True");
        let port = match port(get)? {
            Some(port) => port,
            None if held => master.checked_add(1).unwrap_or(master - 1),
            None => master,
        };
        Ok(Self {
            rank: number(get, "RANK", LAUNCHER)?,
            ranks,
            local_rank: number(get, "LOCAL_RANK", LAUNCHER)?,
            gpu: 0,
            local_ranks: match get("LOCAL_WORLD_SIZE") {
                Some(_) => number(get, "LOCAL_WORLD_SIZE", LAUNCHER)?,
                None => ranks,
            },
            host: text(get, "MASTER_ADDR", LAUNCHER)?,
            port,
            job: get(JOB_VARIABLE)
                .or_else(|| get("TORCHELASTIC_RUN_ID"))
                .unwrap_or_default(),
            secret: secret(get, ranks)?,
            process: nonce(),
            slurm: false,
        })
    }

    fn of_slurm(get: &dyn Fn(&str) -> Option<String>) -> Result<Self, Error> {
        const LAUNCHER: &str = "Slurm";
        let ranks = number(get, "SLURM_NTASKS", LAUNCHER)?;
        let lists = [
            "SLURM_STEP_NODELIST",
            "SLURM_NODELIST",
            "SLURM_JOB_NODELIST",
        ];
        let nodes = lists.iter().find_map(|name| first_host(&get(name)?));
        // Where srun was typed, which may be a node of no rank: the last resort.
        let host = get("MASTER_ADDR")
            .or(nodes)
            .or_else(|| get("SLURM_LAUNCH_NODE_IPADDR"))
            .ok_or_else(|| {
                refuse(
                    "neither SLURM_NODELIST nor SLURM_LAUNCH_NODE_IPADDR is set, and no MASTER_ADDR \
                     says where rank 0 is",
                )
            })?;
        let id = get("SLURM_JOB_ID").unwrap_or_default();
        let port = match (port(get)?, get("MASTER_PORT")) {
            (Some(port), _) => port,
            (None, Some(_)) => number(get, "MASTER_PORT", LAUNCHER)?,
            (None, None) => {
                let id: u64 = number(get, "SLURM_JOB_ID", "Slurm, or MASTER_PORT")?;
                // Below the ports that systems hand out by themselves, one a job.
                16_384 + (id % 16_384) as u16
            }
        };
        let step = get("SLURM_STEP_ID").unwrap_or_default();
        Ok(Self {
            rank: number(get, "SLURM_PROCID", LAUNCHER)?,
            ranks,
            local_rank: number(get, "SLURM_LOCALID", LAUNCHER)?,
            gpu: 0,
            local_ranks: slurm_tasks_here(get).unwrap_or(ranks),
            host,
            port,
            job: get(JOB_VARIABLE).unwrap_or_else(|| format!("{id}.{step}")),
            secret: secret(get, ranks)?,
            process: nonce(),
            slurm: true,
        })
    }

    /// Rank `rank` of `ranks` on this machine's `port`.
    #[cfg(test)]
    pub(super) fn here(rank: u32, ranks: u32, port: u16) -> Self {
        Self {
            rank,
            ranks,
            local_rank: rank,
            gpu: rank,
            local_ranks: ranks,
            host: "127.0.0.1".to_owned(),
            port,
            job: "a job".to_owned(),
            secret: Secret::of("a secret of the tests"),
            process: nonce(),
            slurm: false,
        }
    }

    fn consistent(self) -> Result<Self, Error> {
        let [rank, ranks, local_rank] = if self.slurm {
            ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"]
        } else {
            ["RANK", "WORLD_SIZE", "LOCAL_RANK"]
        };
        let expect = |name: &str, found: u32, below: u32, of: &str| {
            if found < below {
                return Ok(());
            }
            Err(refuse(&format!("{name} is {found} and {of} is {below}")))
        };
        expect(rank, self.rank, self.ranks, ranks)?;
        expect(
            local_rank,
            self.local_rank,
            self.local_ranks,
            "the number of ranks of this machine",
        )?;
        Ok(self)
    }

    /// How long ranks wait for each other, as [`TIMEOUT_VARIABLE`] says.
    pub fn timeout() -> Result<Option<Duration>, Error> {
        let Ok(said) = std::env::var(TIMEOUT_VARIABLE) else {
            return Ok(None);
        };
        timeout_of(&said).map(Some)
    }
}

fn timeout_of(said: &str) -> Result<Duration, Error> {
    let seconds = said.trim().parse::<f64>().ok();
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|time| !time.is_zero() && *time <= LONGEST_TIMEOUT)
        .ok_or_else(|| {
            refuse(&format!(
                "{TIMEOUT_VARIABLE}: found {said:?}, expected seconds, more than 0 and at most {} \
                 (30 days)",
                LONGEST_TIMEOUT.as_secs()
            ))
        })
}

fn refuse(why: &str) -> Error {
    Error::Request(format!("launched by the environment: {why}"))
}

fn text(get: &dyn Fn(&str) -> Option<String>, name: &str, launcher: &str) -> Result<String, Error> {
    get(name)
        .filter(|said| !said.trim().is_empty())
        .ok_or_else(|| refuse(&format!("{name} is not set, which is {launcher}'s to set")))
}

fn number<T: std::str::FromStr>(
    get: &dyn Fn(&str) -> Option<String>,
    name: &str,
    launcher: &str,
) -> Result<T, Error> {
    let said = text(get, name, launcher)?;
    said.trim().parse().map_err(|_| {
        refuse(&format!(
            "{name}: found {said:?}, expected a whole number that fits"
        ))
    })
}

/// The secret of a run of several ranks; one alone needs none.
fn secret(get: &dyn Fn(&str) -> Option<String>, ranks: u32) -> Result<Secret, Error> {
    let (name, said) = match (get(SECRET_VARIABLE), get(SECRET_FILE_VARIABLE)) {
        (Some(said), _) => (SECRET_VARIABLE.to_owned(), said),
        (None, Some(file)) => {
            let name = format!("{SECRET_FILE_VARIABLE} {file}");
            let said = fs::read_to_string(&file);
            (
                name.clone(),
                said.map_err(|cause| refuse(&format!("{name}: {cause}")))?,
            )
        }
        (None, None) if ranks == 1 => return Ok(Secret::of(&new_secret())),
        (None, None) => {
            return Err(refuse(&format!(
                "{SECRET_VARIABLE} is not set, by which ranks know each other: before the launch, say \
                 export {SECRET_VARIABLE}=$(head -c 32 /dev/urandom | base64 -w 0), the same on every machine, \
                 or name a file that holds it with {SECRET_FILE_VARIABLE}"
            )));
        }
    };
    let said = said.trim();
    if said.len() < SHORTEST {
        return Err(refuse(&format!(
            "{name}: found {} bytes, expected at least {SHORTEST} that nobody can guess",
            said.len()
        )));
    }
    Ok(Secret::of(said))
}

fn port(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<u16>, Error> {
    match get(PORT_VARIABLE) {
        Some(_) => number(get, PORT_VARIABLE, "the user").map(Some),
        None => Ok(None),
    }
}

/// Tasks of this node: the step's, which may have fewer nodes and tasks than the job that it is of; else
/// the job's; else as many as were asked for.
fn slurm_tasks_here(get: &dyn Fn(&str) -> Option<String>) -> Option<u32> {
    let node = get("SLURM_NODEID").and_then(|said| said.trim().parse().ok());
    ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"]
        .iter()
        .find_map(|name| tasks_of_node(&get(name)?, node.unwrap_or(0)))
        .or_else(|| get("SLURM_NTASKS_PER_NODE")?.trim().parse().ok())
}

/// The number of a node in a list such as `4(x2),3`: 4 of nodes 0 and 1, 3 of node 2.
fn tasks_of_node(list: &str, mut node: u32) -> Option<u32> {
    for part in list.trim().split(',') {
        let (tasks, nodes) = match part.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        if node < nodes {
            return tasks.parse().ok();
        }
        node -= nodes;
    }
    None
}

/// The first host of a list such as `node[03-05,9]-ib,other`: `node03-ib`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find([',', '[']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        if !rest[end..].starts_with('[') {
            return (!host.is_empty()).then_some(host);
        }
        let (range, after) = rest[end + 1..].split_once(']')?;
        let first = range.split([',', '-']).next()?;
        host.push_str(first);
        rest = after;
    }
}

#[cfg(test)]
mod tests;
