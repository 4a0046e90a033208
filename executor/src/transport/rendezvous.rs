//! How the processes of a run find each other: rank 0 listens, the others come.
//!
//! Whoever connects says [`MAGIC`], which job it is of, how many ranks it expects and which one it is.
//! A stranger, or a rank of another job, is turned away and remembered for the error message; a rank
//! that expects another number of ranks, or one that was there already, or one that says that it failed
//! before it could come ([`decline`]), ends the run, since waiting would mend nothing. When all have come
//! they are welcomed together, and each connection becomes that rank's door to rank 0's mailbox
//! ([`super::remote`]). Nothing waits longer than the deadline.

use std::io::{self, Read as _, Write as _};
use std::net::{
    IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _,
};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::launched::Launched;
use super::mailbox::Mailbox;
use super::remote;
use super::wire::{self, MAGIC};
use crate::error::Error;

/// Between two tries to connect.
const PAUSE: Duration = Duration::from_millis(50);

/// How long a connection may take to say who it is.
const GREETING: Duration = Duration::from_secs(5);

/// How long rank 0 stays for ranks that should be leaving.
const GOODBYE: Duration = Duration::from_secs(5);

/// How long a rank that failed tries to tell.
const DECLINING: Duration = Duration::from_secs(2);

/// Turned away and remembered at most this many.
const REMEMBERED: usize = 4;

/// Who a rank says it is.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    job: String,
    ranks: u32,
    rank: u32,
    /// Why it will not take part.
    failed: Option<String>,
}

/// What it is told.
#[derive(Debug, Serialize, Deserialize)]
enum Welcome {
    Come,
    Refused(String),
}

/// Rank 0's side.
#[derive(Debug)]
pub(super) struct Server {
    shared: Arc<Shared>,
    /// Where the others look for it.
    address: String,
}

#[derive(Debug)]
struct Shared {
    job: String,
    ranks: u32,
    /// From when all have come.
    mailbox: OnceLock<Arc<Mailbox>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    came: Vec<bool>,
    refused: Vec<String>,
    /// Why there will be no run.
    failure: Option<String>,
    /// Whether the run has begun.
    begun: bool,
    /// Whether nobody else is let in.
    closed: bool,
    /// Connections of those who said who they are that have not ended.
    open: usize,
}

impl Server {
    /// Listens and lets ranks come.
    pub(super) fn start(launched: &Launched) -> Result<Self, Error> {
        let listener = listen(launched)?;
        let failed = |cause: io::Error| rendezvous(launched, &format!("could not listen: {cause}"));
        listener.set_nonblocking(true).map_err(failed)?;
        let mut came = vec![false; launched.ranks as usize];
        came[0] = true;
        let shared = Arc::new(Shared {
            job: launched.job.clone(),
            ranks: launched.ranks,
            mailbox: OnceLock::new(),
            state: Mutex::new(State {
                came,
                ..State::default()
            }),
            changed: Condvar::new(),
        });
        let accepting = Arc::clone(&shared);
        thread::Builder::new()
            .name("rendezvous".to_owned())
            .spawn(move || accept(&listener, &accepting))
            .map_err(failed)?;
        let address = format!("{}:{}", launched.host, launched.port);
        Ok(Self { shared, address })
    }

    /// Waits until all ranks are there, and lets the run begin, by this mailbox; where there will be
    /// none, those that came have been told why when this returns. To be called once.
    pub(super) fn wait(&self, mailbox: &Arc<Mailbox>, deadline: Duration) -> Result<(), Error> {
        self.shared.mailbox.get_or_init(|| Arc::clone(mailbox));
        self.all_come(deadline).inspect_err(|_| self.tell_all())
    }

    /// Whether another rank has come.
    #[cfg(test)]
    pub(super) fn is_awaited(&self) -> bool {
        self.shared.lock().came[1..].contains(&true)
    }

    /// Lets ranks come a little longer where one has failed, so that they are told at once.
    fn tell_all(&self) {
        let begun = Instant::now();
        let mut state = self.shared.lock();
        while !state.closed && state.came.contains(&false) && begun.elapsed() < GOODBYE {
            state = self.shared.wait(state, PAUSE);
        }
        drop(state);
        self.stay(GOODBYE);
    }

    fn all_come(&self, deadline: Duration) -> Result<(), Error> {
        let until = Instant::now() + deadline;
        let mut state = self.shared.lock();
        loop {
            if let Some(failure) = &state.failure {
                return Err(Error::Rendezvous(format!("at {}: {failure}", self.address)));
            }
            let missing: Vec<usize> = (0..state.came.len()).filter(|&r| !state.came[r]).collect();
            if missing.is_empty() {
                state.begun = true;
                state.closed = true;
                drop(state);
                self.shared.changed.notify_all();
                return Ok(());
            }
            let Some(rest) = until.checked_duration_since(Instant::now()) else {
                let mut why = format!(
                    "rank 0 waited {:.1} s at {} for ranks {missing:?} of {}, which did not come; where \
                     one failed before that, its own output says why",
                    deadline.as_secs_f64(),
                    self.address,
                    self.shared.ranks
                );
                if !state.refused.is_empty() {
                    why = format!("{why}; turned away: {}", state.refused.join("; "));
                }
                state.failure = Some(why.clone());
                state.closed = true;
                drop(state);
                self.shared.changed.notify_all();
                return Err(Error::Rendezvous(why));
            };
            state = self.shared.wait(state, rest);
        }
    }

    /// Stays while other ranks are still at work, and a little for those that should be leaving.
    pub(super) fn stay(&self, deadline: Duration) {
        let begun = Instant::now();
        let mut state = self.shared.lock();
        while state.open > 0 {
            let failure = self
                .shared
                .mailbox
                .get()
                .and_then(|mailbox| mailbox.failure());
            let patience = match failure {
                None => deadline,
                Some(_) => deadline.min(GOODBYE),
            };
            let Some(rest) = patience.checked_sub(begun.elapsed()) else {
                return;
            };
            // A failure shortens the patience; it is looked for now and then.
            state = self.shared.wait(state, rest.min(PAUSE));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closed = true;
        if !state.begun {
            let why = || "rank 0 failed before all had come; its own output says why".to_owned();
            state.failure.get_or_insert_with(why);
        }
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, rest: Duration) -> MutexGuard<'a, State> {
        self.changed
            .wait_timeout(state, rest)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }
}

/// A socket for whoever is sent to the launcher's address; where that is not this machine's (behind a
/// translated address), at its port on all of its own.
fn listen(launched: &Launched) -> Result<TcpListener, Error> {
    let port = launched.port;
    let addresses = addresses(&launched.host, port);
    let mut outcome = TcpListener::bind(&*addresses);
    let elsewhere = |cause: &io::Error| {
        matches!(
            cause.kind(),
            io::ErrorKind::AddrNotAvailable | io::ErrorKind::InvalidInput
        )
    };
    if outcome.as_ref().is_err_and(elsewhere) {
        outcome = TcpListener::bind((IpAddr::V4(Ipv4Addr::UNSPECIFIED), port));
    }
    outcome.map_err(|cause| {
        let why = if cause.kind() == io::ErrorKind::AddrInUse {
            "the port is in use by another program: choose a free one with MASTER_PORT or \
             MOEFOLD_PORT, the same for all ranks"
                .to_owned()
        } else {
            format!("rank 0 cannot listen: {cause}")
        };
        rendezvous(launched, &why)
    })
}

/// Where to listen under this name. One that is no address may mean another here than elsewhere (to
/// itself a machine is often its loopback address), so all addresses of this machine serve it.
fn addresses(host: &str, port: u16) -> Vec<SocketAddr> {
    if host == "localhost" || host.parse::<IpAddr>().is_ok() {
        let addresses = (host, port).to_socket_addrs();
        return addresses.map(Iterator::collect).unwrap_or_default();
    }
    // The first takes connections of both kinds, where the machine has the newer one.
    vec![
        (Ipv6Addr::UNSPECIFIED, port).into(),
        (Ipv4Addr::UNSPECIFIED, port).into(),
    ]
}

fn rendezvous(launched: &Launched, why: &str) -> Error {
    Error::Rendezvous(format!("at {}:{}: {why}", launched.host, launched.port))
}

/// Lets connections in, a thread each, until nobody else is to come.
fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    while !shared.lock().closed {
        match listener.accept() {
            Ok((connection, peer)) => {
                let shared = Arc::clone(shared);
                // Where no thread can be had the connection closes, and its rank tries again.
                let _ = thread::Builder::new()
                    .name(format!("peer {peer}"))
                    .spawn(move || receive(connection, peer, &shared));
            }
            // None there, or one that went away again.
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// One connection, from its greeting to its end.
fn receive(mut connection: TcpStream, peer: SocketAddr, shared: &Shared) {
    let hello = match greeting(&mut connection) {
        Ok(hello) => hello,
        Err(cause) => {
            let mut state = shared.lock();
            if state.refused.len() < REMEMBERED {
                state.refused.push(format!("{peer}: {cause}"));
            }
            return;
        }
    };
    shared.lock().open += 1;
    attend(connection, &hello, peer, shared);
    shared.lock().open -= 1;
    shared.changed.notify_all();
}

/// A connection whose other end has said who it is.
fn attend(mut connection: TcpStream, hello: &Hello, peer: SocketAddr, shared: &Shared) {
    let rank = hello.rank;
    if let Err(why) = shared.admit(hello, peer) {
        let _ = wire::write(&mut connection, &Welcome::Refused(why), &[]);
        return;
    }
    // All begin together.
    let mut state = shared.lock();
    while !state.begun && state.failure.is_none() {
        state = shared.wait(state, GREETING);
    }
    let answer = match &state.failure {
        None => Welcome::Come,
        Some(why) => Welcome::Refused(why.clone()),
    };
    drop(state);
    let sent = wire::write(&mut connection, &answer, &[]);
    if matches!(answer, Welcome::Come) {
        let mailbox = shared.mailbox.get().expect("it was there before the run");
        match sent.and_then(|()| connection.set_read_timeout(None)) {
            Ok(()) => remote::serve(connection, rank, mailbox),
            Err(cause) => mailbox.poison(rank, format!("the connection to it broke ({cause})")),
        }
    }
}

/// Reads who is there, or what is wrong with what it says.
fn greeting(connection: &mut TcpStream) -> io::Result<Hello> {
    connection.set_nonblocking(false)?;
    connection.set_nodelay(true)?;
    connection.set_read_timeout(Some(GREETING))?;
    let mut magic = [0; MAGIC.len()];
    connection.read_exact(&mut magic)?;
    if magic != MAGIC {
        let name = MAGIC.len() - 1;
        let why = if magic[..name] == MAGIC[..name] {
            "it is another version of moefold"
        } else {
            "it is not moefold"
        };
        return Err(io::Error::other(why));
    }
    connection.write_all(&MAGIC)?;
    Ok(wire::read(connection, 0)?.0)
}

impl Shared {
    /// Lets a rank in, or says why not.
    fn admit(&self, hello: &Hello, peer: SocketAddr) -> Result<(), String> {
        let Hello {
            job,
            ranks,
            rank,
            failed,
        } = hello;
        let mut state = self.lock();
        if *job != self.job {
            let why = format!(
                "{peer} is rank {rank} of job {job:?}, this is job {:?}",
                self.job
            );
            if state.refused.len() < REMEMBERED {
                state.refused.push(why.clone());
            }
            return Err(why);
        }
        let place = *rank as usize;
        let wrong = if *ranks != self.ranks {
            Some(format!(
                "rank {rank} at {peer} was started as one of {ranks} ranks, rank 0 as one of {}: \
                 start all with the same number",
                self.ranks
            ))
        } else if place >= state.came.len() || state.came[place] {
            Some(format!(
                "rank {rank} came twice, now from {peer}: every process needs a rank of its own"
            ))
        } else {
            failed
                .as_ref()
                .map(|why| format!("rank {rank} failed before it could take part: {why}"))
        };
        if let Some(why) = wrong {
            state.failure.get_or_insert_with(|| why.clone());
            match state.came.get_mut(place) {
                // The others may still come and be told.
                Some(came) if failed.is_some() => *came = true,
                _ => state.closed = true,
            }
            drop(state);
            self.changed.notify_all();
            return Err(why);
        }
        state.came[place] = true;
        drop(state);
        self.changed.notify_all();
        Ok(())
    }
}

/// The connection of a rank other than 0, once all are there. Neither asking nor waiting for an answer
/// takes longer on it than the deadline and a little: rank 0 answers whatever it is asked by then.
pub(super) fn connect(launched: &Launched, deadline: Duration) -> Result<TcpStream, Error> {
    let begun = Instant::now();
    let waited = || begun.elapsed() < deadline;
    loop {
        let failed = match try_connect(launched) {
            Ok(mut connection) => match introduce(&mut connection, launched, None, deadline) {
                Ok(Welcome::Come) => {
                    let patience = Some(deadline + GREETING);
                    let ready = connection
                        .set_read_timeout(patience)
                        .and_then(|()| connection.set_write_timeout(patience));
                    let lost = |cause: io::Error| rendezvous(launched, &cause.to_string());
                    return ready.map(|()| connection).map_err(lost);
                }
                Ok(Welcome::Refused(why)) => return Err(rendezvous(launched, &why)),
                // Something else may hold the port that rank 0 is about to take.
                Err(cause) => cause,
            },
            Err(cause) => cause,
        };
        if !waited() {
            let why = format!(
                "rank {} waited {:.1} s for rank 0, which did not answer ({failed}); where it failed \
                 before that, its own output says why",
                launched.rank,
                begun.elapsed().as_secs_f64()
            );
            return Err(rendezvous(launched, &why));
        }
        thread::sleep(PAUSE);
    }
}

impl Launched {
    /// Tells the other ranks why this one will not take part. Nothing where it has begun to: a world tells
    /// them then; nor of rank 0, at which the others look: they hear from its [`World`](super::World) or miss
    /// it at their deadline.
    pub fn decline(&self, why: &str) {
        if self.rank > 0 && !Self::has_begun() {
            decline(self, why);
        }
    }
}

/// Tells rank 0, and by it the others, that this rank has failed before it could take part. Where rank 0
/// does not listen yet it is tried again for a moment; else the others miss this rank at their deadline.
fn decline(launched: &Launched, why: &str) {
    let begun = Instant::now();
    while begun.elapsed() < DECLINING {
        if let Ok(mut connection) = try_connect(launched)
            && introduce(&mut connection, launched, Some(why), Duration::ZERO).is_ok()
        {
            return;
        }
        thread::sleep(PAUSE);
    }
}

fn try_connect(launched: &Launched) -> io::Result<TcpStream> {
    let mut last = io::Error::other("the name has no address");
    for address in (launched.host.as_str(), launched.port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, GREETING) {
            Ok(connection) => return Ok(connection),
            Err(cause) => last = cause,
        }
    }
    Err(last)
}

fn introduce(
    connection: &mut TcpStream,
    launched: &Launched,
    failed: Option<&str>,
    deadline: Duration,
) -> io::Result<Welcome> {
    connection.set_nodelay(true)?;
    connection.set_read_timeout(Some(GREETING))?;
    connection.write_all(&MAGIC)?;
    let hello = Hello {
        job: launched.job.clone(),
        ranks: launched.ranks,
        rank: launched.rank,
        failed: failed.map(str::to_owned),
    };
    wire::write(connection, &hello, &[])?;
    let mut magic = [0; MAGIC.len()];
    connection.read_exact(&mut magic)?;
    if magic != MAGIC {
        return Err(io::Error::other(
            "what answers is not this version of moefold",
        ));
    }
    // The others may take as long as this one may.
    connection.set_read_timeout(Some(deadline + GREETING))?;
    // Rank 0 was found: another try would find no other.
    Ok(match wire::read(connection, 0) {
        Ok((welcome, _)) => welcome,
        Err(cause) => Welcome::Refused(format!(
            "the connection to rank 0 broke before all were there ({cause})"
        )),
    })
}

#[cfg(test)]
pub(super) mod tests;
