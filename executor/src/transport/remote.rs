//! The mailbox of rank 0's process, seen from the processes of the other ranks.
//!
//! A rank asks and waits for the answer; at the other end a thread a rank puts what it is asked to
//! that very [`Mailbox`], so that all that can go wrong between threads goes wrong between processes
//! with the same words: a deadline, a rank that failed or left, calls that do not match. A connection
//! that ends without a goodbye is the failure of its rank, and so is a request that the run has no use for: a body is
//! read only where the request before it has one, and the rank no more on its way than the run needs.
//!
//! All data passes through rank 0. That is right for what a run needs of it, a few words (group
//! members, counts, what is written at the end), and for CPU ranks it is simple and slow.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{self, BufReader, Read};
use std::net::{Shutdown, TcpStream};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::mail::{Mail, TO_FIRST};
use super::mailbox::{Call, Collected, Failure, Group, GroupKey, Mailbox, Payload, Post};
use super::pulse::Pulse;
use super::words::{self, printable};
use super::{Place, TransportError, wire};

/// Groups that one rank may name.
const GROUPS: usize = 1 << 16;

/// Bytes of a group's name.
const NAME: usize = 64;

/// What a rank asks. Groups are numbers in the order they were named in.
#[derive(Debug, Serialize, Deserialize)]
enum Request {
    Name(GroupKey),
    Post {
        group: usize,
        sequence: u64,
        member: usize,
        call: SentCall,
        post: SentPost,
    },
    Collect {
        group: usize,
        sequence: u64,
        member: usize,
        call: SentCall,
    },
    Failure,
    Poison(#[serde(deserialize_with = "words::heard")] String),
    Leave,
}

/// What it is answered.
#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    Done,
    Collected(Vec<(SentCall, SentPost)>),
    Failure(Option<Failure>),
    Refused(TransportError),
}

impl Reply {
    /// Bytes of the numbers that follow.
    fn body_bytes(&self) -> u64 {
        match self {
            Self::Collected(parts) => {
                let bytes = parts.iter().map(|(_, post)| post.bytes as u64);
                bytes.fold(0, u64::saturating_add)
            }
            Self::Done | Self::Failure(_) | Self::Refused(_) => 0,
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct SentCall {
    what: String,
    element: String,
    size: usize,
    root: usize,
}

/// A post without its numbers, which are in the body.
#[derive(Debug, Serialize, Deserialize)]
struct SentPost {
    element: String,
    bytes: usize,
    rows: Vec<usize>,
    collects: bool,
}

/// One rank's end of the connection to rank 0's process.
#[derive(Debug)]
pub(super) struct Remote {
    rank: u32,
    connection: RefCell<BufReader<TcpStream>>,
    groups: RefCell<HashMap<GroupKey, usize>>,
    pulse: Pulse,
}

impl Remote {
    /// Over a connection that has been welcomed.
    pub(super) fn new(rank: u32, connection: TcpStream, pulse: Pulse) -> Self {
        Self {
            rank,
            connection: RefCell::new(BufReader::new(connection)),
            groups: RefCell::default(),
            pulse,
        }
    }

    fn ask(&self, request: &Request, body: &[&Payload]) -> io::Result<(Reply, Vec<u8>)> {
        let connection = &mut *self.connection.borrow_mut();
        let sent = wire::write(connection.get_mut(), request, body);
        let answer = sent.and_then(|()| {
            let (reply, announced) = wire::head::<Reply>(connection)?;
            wire::expect(announced, reply.body_bytes())?;
            Ok((reply, wire::body(connection, announced)?))
        });
        answer.map_err(|cause| {
            // What comes late would be taken for the answer to another question, and nothing is to
            // wait a second time.
            let _ = connection.get_ref().shutdown(Shutdown::Both);
            if let Some(silence) = self.pulse.silence() {
                return io::Error::new(io::ErrorKind::TimedOut, silence);
            }
            match cause.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    io::Error::new(io::ErrorKind::TimedOut, "it has been silent for too long")
                }
                _ => cause,
            }
        })
    }

    /// Asks for a collective; where the connection breaks, rank 0 is the one that failed.
    fn exchange(
        &self,
        group: &Group,
        sequence: u64,
        call: &Call,
        request: impl FnOnce(usize) -> Request,
        body: &[&Payload],
    ) -> Result<(Reply, Vec<u8>), TransportError> {
        let place = || Place {
            op: call.to_string(),
            group: group.key.to_string(),
            sequence,
        };
        let broken = |cause: io::Error| TransportError::Stopped {
            rank: self.rank,
            place: place(),
            failed_rank: 0,
            is_silent: is_silence(&cause),
            failure: format!("the connection to it broke ({cause})"),
        };
        let named = self.groups.borrow().get(&group.key).copied();
        let number = if let Some(number) = named {
            number
        } else {
            let name = Request::Name(group.key.clone());
            let _ = self.ask(&name, &[]).map_err(broken)?;
            let mut groups = self.groups.borrow_mut();
            let number = groups.len();
            groups.insert(group.key.clone(), number);
            number
        };
        match self.ask(&request(number), body).map_err(broken)? {
            (Reply::Refused(error), _) => Err(error),
            answer => Ok(answer),
        }
    }
}

impl Mail for Remote {
    fn group(&self, key: &GroupKey) -> Arc<Group> {
        Arc::new(Group::new(key))
    }

    fn post(
        &self,
        group: &Group,
        sequence: u64,
        member: usize,
        post: Post,
    ) -> Result<(), TransportError> {
        let request = |group| Request::Post {
            group,
            sequence,
            member,
            call: SentCall::of(&post.call),
            post: SentPost::of(&post),
        };
        self.exchange(group, sequence, &post.call, request, &[&post.data])
            .map(drop)
    }

    fn collect(
        &self,
        group: &Group,
        sequence: u64,
        member: usize,
        call: &Call,
    ) -> Result<Collected, TransportError> {
        let request = |group| Request::Collect {
            group,
            sequence,
            member,
            call: SentCall::of(call),
        };
        let (reply, body) = self.exchange(group, sequence, call, request, &[])?;
        let Reply::Collected(parts) = reply else {
            panic!("rank 0 answers a collective with {reply:?}");
        };
        let size = parts.len();
        let posts = unpack(parts, &body).map(|posts| posts.into_iter().map(Arc::new).collect());
        Ok(Collected {
            posts: posts.expect("rank 0 sends posts as it was sent them"),
            // Shared by the threads of one process, of which there is one.
            shards: Arc::new((0..size).map(|_| std::sync::OnceLock::new()).collect()),
        })
    }

    fn poison(&self, _rank: u32, message: String) {
        // Where this fails, the connection's end says it.
        let _ = self.ask(&Request::Poison(message), &[]);
    }

    fn leave(&self, _rank: u32) {
        let _ = self.ask(&Request::Leave, &[]);
    }

    fn failure(&self) -> Option<Failure> {
        match self.ask(&Request::Failure, &[]) {
            Ok((Reply::Failure(failure), _)) => failure,
            Ok((other, _)) => panic!("rank 0 answers a question with {other:?}"),
            Err(cause) => Some(Failure {
                rank: 0,
                is_silent: is_silence(&cause),
                message: format!("the connection to it broke ({cause})"),
            }),
        }
    }

    fn shared(&self) -> &Mailbox {
        panic!("ranks that are processes do not share memory of a GPU");
    }
}

/// Whether a connection was given up because nothing came.
fn is_silence(cause: &io::Error) -> bool {
    cause.kind() == io::ErrorKind::TimedOut
}

/// Serves one rank until its connection ends; an end without a goodbye is its failure.
pub(super) fn serve(connection: TcpStream, rank: u32, mailbox: &Mailbox) {
    let mut connection = BufReader::new(connection);
    let mut groups: Vec<Arc<Group>> = Vec::new();
    let mut said = false;
    let cause = loop {
        let (request, body) = match next(&mut connection, rank, mailbox, &groups) {
            Ok(frame) => frame,
            Err(cause) => break cause,
        };
        said |= matches!(request, Request::Leave | Request::Poison(_));
        // What a request is not checked for must not leave the others waiting.
        let answered = AssertUnwindSafe(|| answer(request, &body, rank, mailbox, &mut groups));
        let answered = match panic::catch_unwind(answered).unwrap_or_default() {
            Some((reply, posts)) => {
                let body: Vec<&Payload> = posts.iter().map(|post| &post.data).collect();
                wire::write(connection.get_mut(), &reply, &body)
            }
            None => Err(no_request()),
        };
        if let Err(cause) = answered {
            break cause;
        }
    };
    if !said {
        let how = match cause.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => "its process ended without a word".to_owned(),
            _ => format!("the connection to it broke ({cause})"),
        };
        mailbox.poison(rank, how);
    }
}

/// How many of the requests in `sent` are answered, as rank 0 of two answers its peer's where nobody else
/// comes: what a connection may hold is read as on one, and what panics there panics here.
pub fn answered(mut sent: &[u8]) -> usize {
    let mailbox = Mailbox::new(2, Duration::ZERO).with_limit(1 << 20);
    let mut groups = Vec::new();
    let mut count = 0;
    while let Ok((request, body)) = next(&mut sent, 1, &mailbox, &groups) {
        let Some((reply, posts)) = answer(request, &body, 1, &mailbox, &mut groups) else {
            break;
        };
        let body: Vec<&Payload> = posts.iter().map(|post| &post.data).collect();
        let mut back = Vec::new();
        wire::write(&mut back, &reply, &body).expect("what came in goes out");
        count += 1;
    }
    count
}

/// The next request of a rank, and the numbers that follow it. Only a post has any: they are read where they are
/// as many as it says and the rank may have so many on their way.
fn next(
    from: &mut impl Read,
    rank: u32,
    mailbox: &Mailbox,
    groups: &[Arc<Group>],
) -> io::Result<(Request, Vec<u8>)> {
    let (request, announced) = wire::head::<Request>(from)?;
    if let Request::Post {
        group,
        member,
        post,
        ..
    } = &request
    {
        wire::expect(announced, post.bytes as u64)?;
        let group = member_of(groups, *group, *member, rank).ok_or_else(no_request)?;
        let admitted = mailbox.admit(rank, group, announced);
        admitted.map_err(io::Error::other)?;
    } else {
        wire::expect(announced, 0)?;
    }
    Ok((request, wire::body(from, announced)?))
}

fn no_request() -> io::Error {
    io::Error::other("it sent what is no request")
}

/// The reply with the posts whose numbers follow it; none to what is no request.
fn answer(
    request: Request,
    body: &[u8],
    rank: u32,
    mailbox: &Mailbox,
    groups: &mut Vec<Arc<Group>>,
) -> Option<(Reply, Vec<Arc<Post>>)> {
    let reply = match request {
        Request::Name(key) => {
            let mut sorted = key.ranks.clone();
            sorted.sort_unstable();
            let is_group = sorted.is_sorted_by(|a, b| a < b)
                && sorted.last().is_some_and(|last| *last < mailbox.ranks())
                && sorted.contains(&rank)
                && key.name.len() <= NAME
                && printable(&key.name) == key.name
                && groups.len() < GROUPS;
            if !is_group {
                return None;
            }
            groups.push(mailbox.group(&key));
            Reply::Done
        }
        Request::Post {
            group,
            sequence,
            member,
            call,
            post,
        } => {
            let group = member_of(groups, group, member, rank)?;
            let post = unpack(vec![(call, post)], body)?.pop()?;
            if post.rows.len() > group.key.ranks.len() || group.has_posted(sequence, member) {
                return None;
            }
            match mailbox.post(group, sequence, member, post) {
                Ok(()) => Reply::Done,
                Err(error) => Reply::Refused(error),
            }
        }
        Request::Collect {
            group,
            sequence,
            member,
            call,
        } => {
            let (group, call) = (member_of(groups, group, member, rank)?, call.call()?);
            if !group.has_posted(sequence, member) {
                return None;
            }
            match mailbox.collect(group, sequence, member, &call) {
                Ok(collected) => {
                    let posts = collected.posts;
                    let parts = posts
                        .iter()
                        .map(|post| (SentCall::of(&post.call), SentPost::of(post)));
                    return Some((Reply::Collected(parts.collect()), posts));
                }
                Err(error) => Reply::Refused(error),
            }
        }
        Request::Failure => Reply::Failure(mailbox.failure().cloned()),
        Request::Poison(message) => {
            mailbox.poison(rank, message);
            Reply::Done
        }
        Request::Leave => {
            mailbox.leave(rank);
            Reply::Done
        }
    };
    Some((reply, Vec::new()))
}

/// A group that a rank named, if it is that member of it.
fn member_of(groups: &[Arc<Group>], group: usize, member: usize, rank: u32) -> Option<&Arc<Group>> {
    let group = groups.get(group)?;
    (group.key.ranks.get(member) == Some(&rank)).then_some(group)
}

impl SentCall {
    fn of(call: &Call) -> Self {
        Self {
            what: call.what.to_owned(),
            element: call.element.to_owned(),
            size: call.size,
            root: call.root,
        }
    }

    /// The call with names of this program; none where it is from another.
    fn call(self) -> Option<Call> {
        Some(Call {
            what: known(&self.what)?,
            element: known(&self.element)?,
            size: self.size,
            root: self.root,
        })
    }
}

impl SentPost {
    fn of(post: &Post) -> Self {
        Self {
            element: wire::element(&post.data).to_owned(),
            bytes: wire::bytes(&post.data).len(),
            rows: post.rows.clone(),
            collects: post.collects,
        }
    }
}

/// Posts out of their headers and the body with their numbers; none where the two do not fit.
fn unpack(parts: Vec<(SentCall, SentPost)>, mut body: &[u8]) -> Option<Vec<Post>> {
    let mut posts = Vec::with_capacity(parts.len());
    for (call, post) in parts {
        let (numbers, rest) = body.split_at_checked(post.bytes)?;
        body = rest;
        posts.push(Post {
            call: call.call()?,
            data: wire::payload(&post.element, numbers)?,
            rows: post.rows,
            collects: post.collects,
        });
    }
    body.is_empty().then_some(posts)
}

/// Names in calls, which are constants of the program.
fn known(name: &str) -> Option<&'static str> {
    use moefold_profiles::CollectiveKind as Kind;
    let stems = [
        Kind::AllReduce,
        Kind::AllGather,
        Kind::ReduceScatter,
        Kind::AllToAll,
        Kind::Broadcast,
        Kind::SendRecv,
    ];
    let own = [
        super::threads::ALL_REDUCE_MAX,
        super::threads::WORDS,
        TO_FIRST,
    ];
    let elements = ["f32", "bf16", "i32", "u64"];
    stems
        .map(Kind::stem)
        .into_iter()
        .chain(own)
        .chain(elements)
        .find(|known| *known == name)
}
