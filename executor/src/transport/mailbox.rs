//! The mailbox: how rank threads of one process hand data to each other.
//!
//! Each member of a group posts its data for collective number `sequence` and goes on; whoever waits
//! for the collective collects the posts of all members. Nothing is overwritten and nothing is shared
//! mutably, so safe Rust suffices and a started collective needs no progress thread. A failed rank,
//! a rank that left, a mismatched call and a deadline each end every wait with an error that says
//! who, where and what. It moves vectors of numbers, and what ranks of one GPU tell each other of its
//! memory, and knows no tensors (see [`super::threads`]). A collective on a GPU meets several times,
//! each time at a [`Step`] of its own; who waits for one looks ([`Mailbox::look`]) and listens
//! ([`Mailbox::listen`]), so that it can go on with others meanwhile.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use moefold_kernels::cuda::Stream;
use moefold_kernels::{Event, Offer};
use moefold_planner::mesh::GroupKind;
use serde::{Deserialize, Serialize};

use super::shelf::Numbers;
use super::{Place, TransportError, words};

/// What a post takes beside its numbers, and for each member of its group, at most.
const POST_BYTES: u64 = 512;
const MEMBER_BYTES: u64 = 64;

/// What is on its way between ranks.
#[derive(Debug, Clone)]
pub(crate) enum Payload {
    F32(Numbers),
    I32(Vec<i32>),
    U64(Vec<u64>),
    /// Memory of the GPU that the ranks share.
    Offer(Offer),
    /// How far the member has come there.
    Event(Event),
}

impl Payload {
    /// Bytes of its numbers.
    fn bytes(&self) -> u64 {
        let bytes = match self {
            Self::F32(numbers) => size_of_val(&numbers[..]),
            Self::I32(numbers) => size_of_val(&numbers[..]),
            Self::U64(numbers) => size_of_val(&numbers[..]),
            Self::Offer(_) | Self::Event(_) => 0,
        };
        bytes as u64
    }
}

#[cfg(test)]
impl PartialEq for Payload {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::F32(a), Self::F32(b)) => a[..] == b[..],
            (Self::I32(a), Self::I32(b)) => a == b,
            (Self::U64(a), Self::U64(b)) => a == b,
            _ => false,
        }
    }
}

/// Where members of a group meet: at a collective, and at which of its meetings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Step {
    /// The collective's number in its group.
    pub(super) sequence: u64,
    /// From 0; only collectives on a GPU meet more than once.
    pub(super) meeting: u32,
}

impl From<u64> for Step {
    /// The first meeting of a collective.
    fn from(sequence: u64) -> Self {
        Self {
            sequence,
            meeting: 0,
        }
    }
}

/// What a member asks of its group; equal at all members, or the collective is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Call {
    /// Name of the collective, with what makes it that one (`all_reduce(max)`, `broadcast from 2`).
    pub(super) what: &'static str,
    /// Type of an element.
    pub(super) element: &'static str,
    /// A size that all members must agree on: elements, or the width of exchanged rows.
    pub(super) size: usize,
    /// The member that sends, in a broadcast.
    pub(super) root: usize,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} {}", self.what, self.size, self.element)?;
        if self.root > 0 {
            write!(f, " from member {}", self.root)?;
        }
        Ok(())
    }
}

/// One member's part of a collective.
#[derive(Debug)]
pub(super) struct Post {
    pub(super) call: Call,
    pub(super) data: Payload,
    /// Rows meant for each member, in an all-to-all.
    pub(super) rows: Vec<usize>,
    /// Whether the member collects the others' parts; who sends a message does not.
    pub(super) collects: bool,
}

/// All parts of a collective, in member order.
#[derive(Debug)]
pub(super) struct Collected {
    pub(super) posts: Vec<Arc<Post>>,
    /// Reduced shards, each computed once by whichever member comes to it first.
    pub(super) shards: Arc<Vec<OnceLock<Numbers>>>,
}

/// Identity of a group: members that create several of one name and ranks get several.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct GroupKey {
    pub(super) name: String,
    pub(super) ranks: Vec<u32>,
    pub(super) instance: u32,
}

impl GroupKey {
    /// Where the collectives of the group go: those over replicas of weights hold up no others, nor do tokens on
    /// their way.
    pub(super) fn stream(&self) -> Stream {
        if GroupKind::over_replicas(&self.name) {
            Stream::Replicas
        } else if GroupKind::sends_tokens(&self.name) {
            Stream::Tokens
        } else {
            Stream::Communication
        }
    }
}

/// The collectives in flight of one group.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) key: GroupKey,
    slots: Mutex<HashMap<Step, Slot>>,
    changed: Condvar,
}

impl Group {
    /// A group that nobody has posted to.
    pub(super) fn new(key: &GroupKey) -> Self {
        Self {
            key: key.clone(),
            slots: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// What is kept of a post with so many bytes of numbers: those, and what holds them.
    fn kept_bytes(&self, numbers: u64) -> u64 {
        (POST_BYTES + MEMBER_BYTES * self.key.ranks.len() as u64).saturating_add(numbers)
    }

    /// Whether a member has posted its part of collective `sequence`, and not all have collected it.
    pub(super) fn has_posted(&self, sequence: u64, member: usize) -> bool {
        let slots = lock(&self.slots);
        let slot = slots.get(&Step::from(sequence));
        slot.is_some_and(|slot| slot.posts[member].is_some())
    }
}

#[derive(Debug)]
struct Slot {
    posts: Vec<Option<Arc<Post>>>,
    shards: Arc<Vec<OnceLock<Numbers>>>,
    num_collected: usize,
}

/// The first failure of a world.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Failure {
    pub(super) rank: u32,
    #[serde(deserialize_with = "words::heard")]
    pub(super) message: String,
    /// Whether the rank was given up because it said nothing, so that it may never end by itself.
    pub(super) is_silent: bool,
}

/// Posts of a rank that are on their way: not all who collect them have.
#[derive(Debug, Default)]
struct OnTheWay {
    posts: u64,
    /// What is kept of them.
    bytes: u64,
}

/// What the ranks of one world share.
#[derive(Debug)]
pub(super) struct Mailbox {
    groups: Mutex<HashMap<GroupKey, Arc<Group>>>,
    failure: OnceLock<Failure>,
    left: Vec<AtomicBool>,
    /// Ranks that were given up because they said nothing.
    silent: Vec<AtomicBool>,
    /// By rank.
    on_the_way: Vec<Mutex<OnTheWay>>,
    /// Bytes that one rank may have there.
    limit: u64,
    /// Ranks of this process that have not parted.
    present: Mutex<u32>,
    parted: Condvar,
    deadline: Duration,
    /// How often something happened that somebody may wait for.
    events: Mutex<u64>,
    happened: Condvar,
}

impl Mailbox {
    pub(super) fn new(ranks: u32, deadline: Duration) -> Self {
        Self {
            groups: Mutex::default(),
            failure: OnceLock::new(),
            left: (0..ranks).map(|_| AtomicBool::new(false)).collect(),
            silent: (0..ranks).map(|_| AtomicBool::new(false)).collect(),
            on_the_way: (0..ranks).map(|_| Mutex::default()).collect(),
            limit: u64::MAX,
            present: Mutex::new(ranks),
            parted: Condvar::new(),
            deadline,
            events: Mutex::default(),
            happened: Condvar::new(),
        }
    }

    /// The same for ranks of which each has so many bytes on their way at most.
    pub(super) fn with_limit(self, limit: u64) -> Self {
        Self { limit, ..self }
    }

    /// Refuses a post of a rank to a group, with so many bytes of numbers, where it would have too much on its way.
    pub(super) fn admit(&self, rank: u32, group: &Group, numbers: u64) -> Result<(), String> {
        let own = lock(&self.on_the_way[rank as usize]);
        let bytes = own.bytes.saturating_add(group.kept_bytes(numbers));
        if bytes <= self.limit {
            return Ok(());
        }
        Err(format!(
            "it posted {numbers} bytes: with {} posts before them {bytes} bytes would be on their way, and a rank of \
             this run has at most {}",
            own.posts, self.limit
        ))
    }

    /// Ranks of the world.
    pub(super) fn ranks(&self) -> u32 {
        self.left.len() as u32
    }

    /// The group of a key, made by its first member.
    pub(super) fn group(&self, key: &GroupKey) -> Arc<Group> {
        let mut groups = lock(&self.groups);
        let new = || Arc::new(Group::new(key));
        Arc::clone(groups.entry(key.clone()).or_insert_with(new))
    }

    /// The failure that ended the world, if any.
    pub(super) fn failure(&self) -> Option<&Failure> {
        self.failure.get()
    }

    /// Records the first failure and wakes every rank that waits.
    pub(super) fn poison(&self, rank: u32, message: String) {
        self.fail(Failure {
            rank,
            message,
            is_silent: false,
        });
    }

    /// The same of a rank that says nothing any more, which nobody is to wait for.
    pub(super) fn give_up(&self, rank: u32, message: String) {
        self.silent[rank as usize].store(true, Ordering::SeqCst);
        self.fail(Failure {
            rank,
            message,
            is_silent: true,
        });
    }

    fn fail(&self, failure: Failure) {
        if self.failure.set(failure).is_ok() {
            self.wake_all();
        }
    }

    /// Whether a rank was given up.
    pub(super) fn is_silent(&self, rank: u32) -> bool {
        let silent = self.silent.get(rank as usize);
        silent.is_some_and(|silent| silent.load(Ordering::SeqCst))
    }

    /// A rank has returned: it will post nothing more.
    pub(super) fn leave(&self, rank: u32) {
        self.left[rank as usize].store(true, Ordering::SeqCst);
        self.wake_all();
    }

    /// A rank has ended, whether it left or failed, and will not touch what another offered.
    pub(super) fn part(&self) {
        *lock(&self.present) -= 1;
        self.parted.notify_all();
    }

    /// Waits until all ranks, which are threads of this process, have parted.
    pub(super) fn wait_for_all_to_part(&self) {
        let someone = |present: &mut u32| *present > 0;
        drop(self.parted.wait_while(lock(&self.present), someone));
    }

    fn wake_all(&self) {
        for group in lock(&self.groups).values() {
            // Taking the lock orders the wake-up after any check a waiter has begun.
            drop(lock(&group.slots));
            group.changed.notify_all();
        }
        self.ring();
    }

    /// What [`Mailbox::listen`] goes by.
    pub(super) fn events(&self) -> u64 {
        *lock(&self.events)
    }

    fn ring(&self) {
        *lock(&self.events) += 1;
        self.happened.notify_all();
    }

    /// Waits until something happens that had not when there were `heard` events, or, where nothing
    /// does, until who has waited for so long has to give up.
    pub(super) fn listen(&self, heard: u64, waited: Duration) {
        let rest = self.deadline.saturating_sub(waited);
        let events = lock(&self.events);
        let quiet = |events: &mut u64| *events == heard;
        drop(self.happened.wait_timeout_while(events, rest, quiet));
    }

    /// Posts one member's part of collective `sequence`. Never blocks on other ranks.
    pub(super) fn post(
        &self,
        group: &Group,
        sequence: u64,
        member: usize,
        post: Post,
    ) -> Result<(), TransportError> {
        self.post_at(group, sequence.into(), member, post)
    }

    /// Posts one member's part of one meeting.
    pub(super) fn post_at(
        &self,
        group: &Group,
        step: Step,
        member: usize,
        post: Post,
    ) -> Result<(), TransportError> {
        let size = group.key.ranks.len();
        let mut slots = lock(&group.slots);
        let slot = slots.entry(step).or_insert_with(|| Slot {
            posts: vec![None; size],
            shards: Arc::new((0..size).map(|_| OnceLock::new()).collect()),
            num_collected: 0,
        });
        let other = slot.posts.iter().position(Option::is_some);
        if let Some((other, theirs)) = other.and_then(|i| Some((i, slot.posts[i].as_ref()?)))
            && theirs.call != post.call
        {
            let error = TransportError::Mismatch {
                rank: group.key.ranks[member],
                place: Place {
                    op: post.call.to_string(),
                    group: group.key.to_string(),
                    sequence: step.sequence,
                },
                other_rank: group.key.ranks[other],
                other_call: theirs.call.to_string(),
            };
            drop(slots);
            self.poison(group.key.ranks[member], error.to_string());
            return Err(error);
        }
        assert!(
            slot.posts[member].is_none(),
            "member {member} of {} posts collective {} twice",
            group.key,
            step.sequence
        );
        let mut own = lock(&self.on_the_way[group.key.ranks[member] as usize]);
        own.posts += 1;
        own.bytes += group.kept_bytes(post.data.bytes());
        drop(own);
        slot.posts[member] = Some(Arc::new(post));
        let complete = slot.posts.iter().all(Option::is_some);
        drop(slots);
        if complete {
            group.changed.notify_all();
            self.ring();
        }
        Ok(())
    }

    /// Waits until all members have posted collective `sequence`, and returns their parts.
    pub(super) fn collect(
        &self,
        group: &Group,
        sequence: u64,
        member: usize,
        call: &Call,
    ) -> Result<Collected, TransportError> {
        let start = Instant::now();
        let mut slots = lock(&group.slots);
        loop {
            let waited = start.elapsed();
            match self.examine(&mut slots, group, sequence.into(), member, call, waited) {
                Ok(Some(collected)) => return Ok(collected),
                Ok(None) => {
                    let rest = self.deadline.saturating_sub(waited);
                    let waiting = group.changed.wait_timeout(slots, rest);
                    slots = waiting.unwrap_or_else(PoisonError::into_inner).0;
                }
                Err(error) => {
                    drop(slots);
                    self.poison(group.key.ranks[member], error.to_string());
                    return Err(error);
                }
            }
        }
    }

    /// All members' parts of a meeting, if they have posted them; an error where this member has
    /// waited for too long, or some cannot come any more.
    pub(super) fn look(
        &self,
        group: &Group,
        step: Step,
        member: usize,
        call: &Call,
        waited: Duration,
    ) -> Result<Option<Collected>, TransportError> {
        let found = self.examine(&mut lock(&group.slots), group, step, member, call, waited);
        found.inspect_err(|error| self.poison(group.key.ranks[member], error.to_string()))
    }

    fn examine(
        &self,
        slots: &mut HashMap<Step, Slot>,
        group: &Group,
        step: Step,
        member: usize,
        call: &Call,
        waited: Duration,
    ) -> Result<Option<Collected>, TransportError> {
        let rank = group.key.ranks[member];
        // Whether a rank has left is read before what it posted: it posts first, then leaves.
        let left: Vec<bool> = group
            .key
            .ranks
            .iter()
            .map(|&r| self.left[r as usize].load(Ordering::SeqCst))
            .collect();
        let slot = slots
            .get_mut(&step)
            .expect("a member waits only for what it has posted");
        let missing: Vec<usize> = (0..slot.posts.len())
            .filter(|&i| slot.posts[i].is_none())
            .collect();
        if missing.is_empty() {
            let collected = Collected {
                posts: slot.posts.iter().flatten().cloned().collect(),
                shards: Arc::clone(&slot.shards),
            };
            slot.num_collected += 1;
            let collecting = collected.posts.iter().filter(|post| post.collects);
            if slot.num_collected == collecting.count() {
                slots.remove(&step);
                for (post, &rank) in collected.posts.iter().zip(&group.key.ranks) {
                    let mut own = lock(&self.on_the_way[rank as usize]);
                    own.posts -= 1;
                    own.bytes -= group.kept_bytes(post.data.bytes());
                }
            }
            return Ok(Some(collected));
        }
        let place = || Place {
            op: call.to_string(),
            group: group.key.to_string(),
            sequence: step.sequence,
        };
        let ranks_of = |members: &[usize]| members.iter().map(|&i| group.key.ranks[i]).collect();
        if let Some(failure) = self.failure.get() {
            return Err(TransportError::Stopped {
                rank,
                place: place(),
                failed_rank: failure.rank,
                failure: failure.message.clone(),
                is_silent: failure.is_silent,
            });
        }
        let gone: Vec<usize> = missing.iter().copied().filter(|&i| left[i]).collect();
        if !gone.is_empty() {
            return Err(TransportError::Absent {
                rank,
                place: place(),
                missing: ranks_of(&gone),
            });
        }
        if waited >= self.deadline {
            return Err(TransportError::Deadline {
                rank,
                place: place(),
                waited_s: waited.as_secs_f64(),
                missing: ranks_of(&missing),
            });
        }
        Ok(None)
    }
}

impl fmt::Display for GroupKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.name, self.ranks)
    }
}

/// A mutex is never left inconsistent here: nothing panics while one is held.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
