//! How the processes of a run find each other: rank 0 listens, the others come.
//!
//! Whoever connects says [`MAGIC`] and a number; rank 0 answers with a number of its own and proves that it
//! knows the run's [`Secret`]; then the other proves it too, with which job it is of, how many ranks it expects,
//! which one it is and under what terms it would train. A stranger learns nothing, costs at most
//! [`GREETING`], and is remembered for the error message, as is a rank of another job. A rank that expects
//! another number of ranks or other terms, or one that another process was already, or one that says that it
//! failed before it could come ([`decline`]), ends the run, since waiting would mend nothing. A process that
//! gave up and comes again takes its own place. Each comes with a second connection, for its pulse ([`pulse`]). When all have come they are welcomed together, and each
//! connection becomes that rank's door to rank 0's mailbox ([`super::remote`]). Nothing waits longer than the
//! deadline.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, Read, Write};
use std::net::{
    IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _,
};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::launched::Launched;
use super::mailbox::Mailbox;
use super::pulse::{self, Pulse};
use super::remote;
use super::secret::{Nonce, PROOF, Secret, Side, nonce};
use super::wire::{self, MAGIC};
use super::words::{self, printable};
use crate::error::Error;

/// Between two tries to connect.
const PAUSE: Duration = Duration::from_millis(50);

/// How long a connection may take to say who it is, and how long rank 0 may be silent meanwhile.
const GREETING: Duration = Duration::from_secs(5);

/// Connections that have not said who they are, beside one a rank: of more the oldest is closed.
const UNKNOWN: usize = 64;

/// How long rank 0 stays for ranks that should be leaving.
const GOODBYE: Duration = Duration::from_secs(5);

/// How long a rank that failed tries to tell.
const DECLINING: Duration = Duration::from_secs(2);

/// Turned away and remembered at most this many.
const REMEMBERED: usize = 4;

/// What must be the same on all ranks, by name.
pub(super) type Terms = BTreeMap<String, String>;

/// Who a rank says it is.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    job: String,
    ranks: u32,
    rank: u32,
    /// A number of its process.
    process: Nonce,
    /// Whether the connection is for its pulse.
    pulse: bool,
    /// Under what terms it would train.
    terms: Terms,
    /// Why it will not take part.
    failed: Option<String>,
}

/// A [`Hello`] as JSON, and the proof that who says it knows the secret.
#[derive(Debug, Serialize, Deserialize)]
struct Proven {
    hello: String,
    proof: [u8; PROOF],
}

/// What it is told.
#[derive(Debug, Serialize, Deserialize)]
enum Welcome {
    Come,
    Refused(#[serde(deserialize_with = "words::heard")] String),
}

/// How ranks meet.
#[derive(Debug, Clone)]
pub(super) struct Meeting {
    /// What must be the same on all.
    pub(super) terms: Terms,
    /// How long one waits for the others.
    pub(super) deadline: Duration,
    /// How long one may be silent afterwards.
    pub(super) heartbeat: Duration,
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
    secret: Secret,
    /// How rank 0 meets the others, from when it does.
    meeting: OnceLock<Meeting>,
    /// From when all have come.
    mailbox: OnceLock<Arc<Mailbox>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    came: Vec<Option<Guest>>,
    /// Connections that have not said who they are, the oldest first, with their numbers.
    unknown: VecDeque<(u64, TcpStream)>,
    /// Connections that were let in.
    connections: u64,
    refused: Vec<String>,
    /// Why there will be no run.
    failure: Option<String>,
    /// Whether the run has begun.
    begun: bool,
    /// Whether nobody else is let in.
    closed: bool,
    /// Who said who they are on connections that have not ended, by the number of the connection.
    open: BTreeMap<u64, u32>,
}

/// A rank that has come, or said that it will not.
#[derive(Debug)]
struct Guest {
    process: Nonce,
    /// The number of its last connection.
    connection: u64,
    terms: Terms,
}

impl State {
    fn missing(&self) -> Vec<usize> {
        let ranks = 1..self.came.len();
        ranks.filter(|&rank| self.came[rank].is_none()).collect()
    }

    fn remember(&mut self, refused: String) {
        if self.refused.len() < REMEMBERED {
            self.refused.push(refused);
        }
    }
}

impl Server {
    /// Listens and lets ranks come.
    pub(super) fn start(launched: &Launched) -> Result<Self, Error> {
        let listener = listen(launched)?;
        let failed = |cause: io::Error| rendezvous(launched, &format!("could not listen: {cause}"));
        listener.set_nonblocking(true).map_err(failed)?;
        let secret = launched.secret.clone();
        let shared = Arc::new(Shared::new(launched.job.clone(), launched.ranks, secret));
        let accepting = Arc::clone(&shared);
        thread::Builder::new()
            .name("rendezvous".to_owned())
            .spawn(move || accept(&listener, &accepting))
            .map_err(failed)?;
        let address = format!("{}:{}", launched.host, launched.port);
        Ok(Self { shared, address })
    }

    /// Waits until all ranks are there under these terms, and lets the run begin, by this mailbox; where
    /// there will be none, those that came have been told why when this returns. To be called once.
    pub(super) fn wait(&self, mailbox: &Arc<Mailbox>, meeting: &Meeting) -> Result<(), Error> {
        self.shared.mailbox.get_or_init(|| Arc::clone(mailbox));
        self.shared.meeting.get_or_init(|| meeting.clone());
        self.all_come(meeting.deadline)
            .inspect_err(|_| self.tell_all())
    }

    /// Whether another rank has come.
    #[cfg(test)]
    pub(super) fn is_awaited(&self) -> bool {
        self.shared.lock().came.iter().any(Option::is_some)
    }

    /// Lets ranks come a little longer where one has failed, so that they are told at once.
    fn tell_all(&self) {
        let begun = Instant::now();
        let mut state = self.shared.lock();
        while !state.closed && !state.missing().is_empty() && begun.elapsed() < GOODBYE {
            state = self.shared.wait(state, PAUSE);
        }
        drop(state);
        self.stay(GOODBYE);
    }

    fn all_come(&self, deadline: Duration) -> Result<(), Error> {
        let until = Instant::now() + deadline;
        let mut state = self.shared.lock();
        loop {
            if state.failure.is_none()
                && let Some(differ) = self.shared.differ(&state)
            {
                state.failure = Some(differ);
                self.shared.changed.notify_all();
            }
            if let Some(failure) = &state.failure {
                return Err(Error::Rendezvous(format!("at {}: {failure}", self.address)));
            }
            let missing = state.missing();
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

    /// Stays while other ranks are still at work, and a little for those that should be leaving; not for those that
    /// were given up.
    pub(super) fn stay(&self, deadline: Duration) {
        let begun = Instant::now();
        let mailbox = self.shared.mailbox.get();
        let is_awaited = |rank: &u32| mailbox.is_none_or(|mailbox| !mailbox.is_silent(*rank));
        let mut state = self.shared.lock();
        while state.open.values().any(is_awaited) {
            let patience = match mailbox.and_then(|mailbox| mailbox.failure()) {
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
    fn new(job: String, ranks: u32, secret: Secret) -> Self {
        Self {
            job,
            ranks,
            secret,
            meeting: OnceLock::new(),
            mailbox: OnceLock::new(),
            state: Mutex::new(State {
                came: (0..ranks).map(|_| None).collect(),
                ..State::default()
            }),
            changed: Condvar::new(),
        }
    }

    /// In what the terms of a rank that has come are not rank 0's.
    fn differ(&self, state: &State) -> Option<String> {
        let ours = &self.meeting.get()?.terms;
        let mut guests = state.came.iter().enumerate();
        guests.find_map(|(rank, guest)| {
            let theirs = &guest.as_ref()?.terms;
            let names: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
            let said = |terms: &Terms, name| terms.get(name).map_or("nothing", |said| said).to_owned();
            let differ: Vec<String> = names
                .into_iter()
                .filter(|&name| ours.get(name) != theirs.get(name))
                .map(|name| format!("{name} is {} there and {} here", said(theirs, name), said(ours, name)))
                .collect();
            (!differ.is_empty()).then(|| {
                format!(
                    "rank {rank} would train otherwise than rank 0: {}: give all ranks the same plan, data \
                     and flags",
                    differ.join(", ")
                )
            })
        })
    }

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
    let addresses = addresses(launched);
    let mut outcome = TcpListener::bind(&*addresses);
    let elsewhere = |cause: &io::Error| {
        matches!(
            cause.kind(),
            io::ErrorKind::AddrNotAvailable | io::ErrorKind::InvalidInput
        )
    };
    if outcome.as_ref().is_err_and(elsewhere) {
        outcome = TcpListener::bind(&*everywhere(port));
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

/// Where to listen: at what the launcher's address means here, and no more, where that serves the others.
/// A name may be a machine's loopback address to itself and another to others; then all addresses serve it.
fn addresses(launched: &Launched) -> Vec<SocketAddr> {
    let (host, port) = (launched.host.as_str(), launched.port);
    let found = (host, port).to_socket_addrs();
    let found: Vec<SocketAddr> = found.map(Iterator::collect).unwrap_or_default();
    let is_address = host == "localhost" || host.parse::<IpAddr>().is_ok();
    let is_seen = !found.is_empty() && found.iter().all(|address| !address.ip().is_loopback());
    if is_address || is_seen || (launched.local_ranks == launched.ranks && !found.is_empty()) {
        return found;
    }
    everywhere(port)
}

/// All addresses of this machine. The first takes connections of both kinds, where it has the newer one.
fn everywhere(port: u16) -> Vec<SocketAddr> {
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
                let Ok(number) = shared.note(&connection) else {
                    continue;
                };
                // Where no thread can be had the connection closes, and its rank tries again.
                let _ = thread::Builder::new()
                    .name(format!("peer {peer}"))
                    .spawn(move || receive(connection, number, peer, &shared));
            }
            // None there, or one that went away again.
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// One connection, from its greeting to its end.
fn receive(mut connection: TcpStream, number: u64, peer: SocketAddr, shared: &Shared) {
    let greeted = greeting(&mut connection, &shared.secret);
    let mut state = shared.lock();
    state.unknown.retain(|(other, _)| *other != number);
    let hello = match greeted {
        Ok(hello) => hello,
        Err(cause) => {
            state.remember(format!("{peer}: {cause}"));
            return;
        }
    };
    state.open.insert(number, hello.rank);
    drop(state);
    attend(connection, number, hello, peer, shared);
    shared.lock().open.remove(&number);
    shared.changed.notify_all();
}

/// A connection whose other end has proven who it is.
fn attend(mut connection: TcpStream, number: u64, hello: Hello, peer: SocketAddr, shared: &Shared) {
    let rank = hello.rank;
    if hello.pulse {
        return shared.watch(connection, &hello);
    }
    if let Err(why) = shared.admit(hello, number, peer) {
        let _ = wire::write(&mut connection, &Welcome::Refused(why), &[]);
        return;
    }
    // All begin together.
    let mut state = shared.lock();
    let is_last = |state: &State| {
        let guest = state.came[rank as usize].as_ref();
        guest.is_some_and(|guest| guest.connection == number)
    };
    while !state.begun && state.failure.is_none() && is_last(&state) {
        state = shared.wait(state, GREETING);
    }
    if !is_last(&state) {
        // Its process gave it up, and came again.
        return;
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
fn greeting(connection: &mut TcpStream, secret: &Secret) -> io::Result<Hello> {
    connection.set_nonblocking(false)?;
    connection.set_nodelay(true)?;
    let mut hasty = Hasty {
        connection,
        until: Instant::now() + GREETING,
    };
    greet(&mut hasty, nonce(), secret)
}

/// The same over anything, with this number of rank 0's.
fn greet(other: &mut (impl Read + Write), own: Nonce, secret: &Secret) -> io::Result<Hello> {
    let mut magic = [0; MAGIC.len()];
    other.read_exact(&mut magic)?;
    if magic != MAGIC {
        let name = MAGIC.len() - 1;
        let why = if magic[..name] == MAGIC[..name] {
            "it is another version of moefold"
        } else {
            "it is not moefold"
        };
        return Err(io::Error::other(why));
    }
    let mut nonces = [[0; PROOF], own];
    other.read_exact(&mut nonces[0])?;
    let ours = secret.proof(Side::First, &nonces, "");
    other.write_all(&[&MAGIC[..], &nonces[1], ours.as_bytes()].concat())?;
    let proven: Proven = wire::read(other).map_err(|cause| match cause.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            io::Error::other("it left where it was to prove that it knows the secret of this run")
        }
        _ => cause,
    })?;
    if secret.proof(Side::Other, &nonces, &proven.hello) != proven.proof {
        let why = "it does not know the secret of this run";
        return Err(io::Error::other(why));
    }
    Ok(serde_json::from_str(&proven.hello)?)
}

/// A connection that is read until a time, however slowly its bytes come.
struct Hasty<'a> {
    connection: &'a mut TcpStream,
    until: Instant,
}

impl Read for Hasty<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let rest = self.until.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.connection.set_read_timeout(Some(rest))?;
        self.connection.read(into)
    }
}

impl Write for Hasty<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.connection.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.connection.flush()
    }
}

/// A connection on which all was said before anybody answered.
struct Recorded<'a>(&'a [u8]);

impl Read for Recorded<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Recorded<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        Ok(from.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Rank 0's number in what is recorded.
const RECORDED: Nonce = [7; PROOF];

/// The secret there.
fn recorded_secret() -> Secret {
    Secret::of("a secret that was recorded")
}

/// What a process says to a rank 0 with [`RECORDED`] that knows the secret and says `hello` of itself.
fn recorded(hello: &str) -> Vec<u8> {
    let theirs = [1; PROOF];
    let proof = recorded_secret().proof(Side::Other, &[theirs, RECORDED], hello);
    let proven = Proven {
        hello: hello.to_owned(),
        proof: *proof.as_bytes(),
    };
    let mut said = [&MAGIC[..], &theirs].concat();
    wire::write(&mut said, &proven, &[]).expect("memory takes all");
    said
}

/// Whether rank 0 of two lets in who says `sent` on a connection, or why not; where that is an object of JSON, who
/// says that of itself and knows the secret.
pub fn greeted(sent: &[u8]) -> Result<(), String> {
    let proven = match str::from_utf8(sent) {
        Ok(hello) if hello.starts_with('{') => Some(recorded(hello)),
        _ => None,
    };
    let mut other = Recorded(proven.as_deref().unwrap_or(sent));
    let hello =
        greet(&mut other, RECORDED, &recorded_secret()).map_err(|cause| cause.to_string())?;
    let shared = Shared::new("a job".to_owned(), 2, recorded_secret());
    shared.admit(hello, 1, (Ipv4Addr::LOCALHOST, 1).into())
}

impl Shared {
    /// Takes note of a connection whose other end nobody knows yet; its number.
    fn note(&self, connection: &TcpStream) -> io::Result<u64> {
        let other = connection.try_clone()?;
        let mut state = self.lock();
        state.connections += 1;
        let number = state.connections;
        state.unknown.push_back((number, other));
        if state.unknown.len() > UNKNOWN + self.ranks as usize
            && let Some((_, oldest)) = state.unknown.pop_front()
        {
            // Its thread hears of it, and ends.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        Ok(number)
    }

    /// Listens to the pulse of a rank, once all are there.
    fn watch(&self, connection: TcpStream, hello: &Hello) {
        let mut state = self.lock();
        while !state.begun && !state.closed && state.failure.is_none() {
            state = self.wait(state, GREETING);
        }
        let guest = state.came.get(hello.rank as usize).and_then(Option::as_ref);
        let is_guest = guest.is_some_and(|guest| guest.process == hello.process);
        let begun = state.begun && is_guest && hello.job == self.job;
        drop(state);
        if let (true, Some(meeting), Some(mailbox)) =
            (begun, self.meeting.get(), self.mailbox.get())
        {
            pulse::watch(connection, hello.rank, mailbox, meeting.heartbeat);
        }
    }

    /// Lets a rank in, or says why not.
    fn admit(&self, hello: Hello, connection: u64, peer: SocketAddr) -> Result<(), String> {
        let Hello {
            job,
            ranks,
            rank,
            process,
            pulse: _,
            terms,
            failed,
        } = hello;
        let mut state = self.lock();
        if job != self.job {
            let why = format!(
                "{peer} is rank {rank} of job {job:?}, this is job {:?}",
                self.job
            );
            state.remember(why.clone());
            return Err(why);
        }
        let place = rank as usize;
        let is_other = |guest: &Guest| guest.process != process;
        let wrong = if ranks != self.ranks {
            Some(format!(
                "rank {rank} at {peer} was started as one of {ranks} ranks, rank 0 as one of {}: \
                 start all with the same number",
                self.ranks
            ))
        } else if !(1..self.ranks).contains(&rank)
            || state.came[place].as_ref().is_some_and(is_other)
        {
            Some(format!(
                "rank {rank} came twice, now from {peer}: every process needs a rank of its own"
            ))
        } else {
            failed.as_ref().map(|why| {
                format!(
                    "rank {rank} failed before it could take part: {}",
                    printable(why)
                )
            })
        };
        let is_place = wrong.is_none() || failed.is_some();
        if let Some(place) = state.came.get_mut(place).filter(|_| is_place) {
            let terms = terms
                .iter()
                .map(|(name, said)| (printable(name), printable(said)));
            // Of one that failed, too: the others may still come and be told.
            *place = Some(Guest {
                process,
                connection,
                terms: terms.collect(),
            });
        }
        if let Some(why) = &wrong {
            state.failure.get_or_insert_with(|| why.clone());
            state.closed |= !is_place;
        }
        drop(state);
        self.changed.notify_all();
        wrong.map_or(Ok(()), Err)
    }
}

/// The connection of a rank other than 0, and its pulse, once all are there. Neither asking nor waiting for an
/// answer takes longer on it than the deadline and a little: rank 0 answers whatever it is asked by then.
pub(super) fn connect(launched: &Launched, meeting: &Meeting) -> Result<(TcpStream, Pulse), Error> {
    let begun = Instant::now();
    let waited = || begun.elapsed() < meeting.deadline;
    loop {
        let failed = match come(launched, meeting) {
            Ok(Ok(come)) => return Ok(come),
            Ok(Err(why)) => return Err(rendezvous(launched, &why)),
            // Something else may hold the port that rank 0 is about to take.
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

/// One try: the connections, or why rank 0 will not have this rank.
fn come(launched: &Launched, meeting: &Meeting) -> io::Result<Result<(TcpStream, Pulse), String>> {
    let patience = Some(meeting.deadline + GREETING);
    let mut hello = launched.hello();
    hello.terms.clone_from(&meeting.terms);
    let mut beats = try_connect(launched)?;
    hello.pulse = true;
    if let Err(why) = introduce(&mut beats, &launched.secret, &hello)? {
        return Ok(Err(why));
    }
    let mut calls = try_connect(launched)?;
    hello.pulse = false;
    if let Err(why) = introduce(&mut calls, &launched.secret, &hello)? {
        return Ok(Err(why));
    }
    if let Welcome::Refused(why) = welcome(&mut calls, meeting.deadline) {
        return Ok(Err(why));
    }
    let ready = || {
        calls.set_read_timeout(patience)?;
        calls.set_write_timeout(patience)?;
        Pulse::start(beats, calls.try_clone()?, meeting.heartbeat)
    };
    Ok(ready()
        .map(|pulse| (calls, pulse))
        .map_err(|cause| cause.to_string()))
}

impl Launched {
    /// Who this process says it is.
    fn hello(&self) -> Hello {
        Hello {
            job: self.job.clone(),
            ranks: self.ranks,
            rank: self.rank,
            process: self.process,
            pulse: false,
            terms: Terms::new(),
            failed: None,
        }
    }

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
        let hello = Hello {
            failed: Some(why.to_owned()),
            ..launched.hello()
        };
        if let Ok(mut connection) = try_connect(launched)
            && introduce(&mut connection, &launched.secret, &hello).is_ok()
        {
            welcome(&mut connection, Duration::ZERO);
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

/// Says who this is to rank 0; else why what listens is not rank 0.
fn introduce(
    connection: &mut TcpStream,
    secret: &Secret,
    hello: &Hello,
) -> io::Result<Result<(), String>> {
    let nonces = meet(connection)?;
    let mut proof = [0; PROOF];
    connection.read_exact(&mut proof)?;
    if secret.proof(Side::First, &nonces, "") != proof {
        return Ok(Err(
            "who listens there does not know the secret of this run: it is another run, or \
             MOEFOLD_SECRET is not the same for all ranks"
                .to_owned(),
        ));
    }
    let hello = serde_json::to_string(hello)?;
    let proof = *secret.proof(Side::Other, &nonces, &hello).as_bytes();
    wire::write(connection, &Proven { hello, proof }, &[])?;
    Ok(Ok(()))
}

/// What rank 0 says to a rank that it knows; the others may take as long to come as this one may.
fn welcome(connection: &mut TcpStream, deadline: Duration) -> Welcome {
    let heard = connection
        .set_read_timeout(Some(deadline + GREETING))
        .and_then(|()| wire::read(connection));
    match heard {
        Ok(welcome) => welcome,
        // Rank 0 was found: another try would find no other.
        Err(cause) => Welcome::Refused(format!(
            "the connection to rank 0 broke before all were there ({cause})"
        )),
    }
}

/// Gives and takes numbers with what answers, where that is this version of moefold.
fn meet(connection: &mut TcpStream) -> io::Result<[Nonce; 2]> {
    connection.set_nodelay(true)?;
    connection.set_read_timeout(Some(GREETING))?;
    let mut nonces = [nonce(), [0; PROOF]];
    connection.write_all(&[&MAGIC[..], &nonces[0]].concat())?;
    let mut magic = [0; MAGIC.len()];
    connection.read_exact(&mut magic)?;
    if magic != MAGIC {
        return Err(io::Error::other(
            "what answers is not this version of moefold",
        ));
    }
    connection.read_exact(&mut nonces[1])?;
    Ok(nonces)
}

#[cfg(test)]
pub(super) mod tests;
