//! Asynchronous copies: cp.async and bulk tensor copies.
//!
//! A cp.async happens when its thread waits for it, which is the latest that it may. A bulk copy
//! happens some random time after it was started, all of it at once, in no order with others; what it
//! may see is what the thread that started it knew then.
#![expect(
    unsafe_code,
    reason = "copies between global memory, which is addressed, and shared memory; every address was \
              found to lie in a live allocation by the access check just before"
)]

use std::rc::Rc;

use moefold_kernels::bf16;
use moefold_profiles::Dtype;

use crate::clock::{Agent, Clock, Timestamp};
use crate::fault::{Fault, Kind};
use crate::machine::{Machine, Operation, State, Wait};
use crate::shadow::Access;
use crate::tensor_map::Map;

/// A cp.async that has not happened yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CpAsync {
    to: u32,
    from: u64,
    valid: u32,
    site: u32,
}

/// Direction of a bulk copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Load,
    Store,
    ReduceAdd,
}

/// A bulk copy in flight.
pub(crate) struct BulkCopy {
    number: u64,
    direction: Direction,
    map: Map,
    shared: u32,
    at: [i64; 5],
    barrier: Option<u32>,
    pub(crate) issuer: usize,
    /// The agents that read the source and write the destination, and their counts.
    reads: (Agent, u32),
    writes: (Agent, u32),
    clock: Rc<Clock>,
    device_fence: Option<Rc<Clock>>,
    pub(crate) site: u32,
}

/// Stores of one thread that are waited for together.
#[derive(Debug, Default)]
pub(crate) struct Group {
    stores: Vec<Store>,
}

#[derive(Debug)]
struct Store {
    number: u64,
    reads: (Agent, u32),
    writes: (Agent, u32),
    done: bool,
    /// Whether the thread has waited until shared memory was read.
    waited: bool,
    site: u32,
}

/// The bulk copies of a block.
#[derive(Default)]
pub(crate) struct Copies {
    flying: Vec<BulkCopy>,
    number: u64,
    first_agent: Agent,
    counts: Vec<u32>,
    next: usize,
}

impl Copies {
    /// Agents that copies take in turn.
    pub(crate) const SLOTS: usize = 64;

    pub(crate) fn start(&mut self, first_agent: Agent, base: u32) {
        self.flying.clear();
        self.first_agent = first_agent;
        self.counts = vec![base; Self::SLOTS];
        self.next = 0;
    }

    pub(crate) fn any(&self) -> bool {
        !self.flying.is_empty()
    }

    pub(crate) fn first(&self) -> Option<&BulkCopy> {
        self.flying.first()
    }

    pub(crate) fn counts(&self) -> impl Iterator<Item = u32> {
        self.counts.iter().copied()
    }

    fn agent(&mut self) -> (Agent, u32) {
        let slot = self.next;
        self.next = (slot + 1) % Self::SLOTS;
        self.counts[slot] += 1;
        (self.first_agent + slot as Agent, self.counts[slot])
    }
}

impl Machine<'_> {
    // ---- cp.async ----

    pub(crate) fn cp_async(
        &mut self,
        to: u64,
        from: u64,
        valid: u32,
        site: u32,
    ) -> Result<(), Fault> {
        let Some(offset) = self.shared.offset(to) else {
            let what = format!("cp_async16 to {}", self.describe_address(to));
            return Err(self.fault(Kind::OutOfBounds, site, what));
        };
        for (address, name) in [(to, "to"), (from, "from")] {
            if !address.is_multiple_of(16) {
                let place = self.describe_address(address);
                let what = format!("cp_async16 {name} {place}, which is no multiple of 16");
                return Err(self.fault(Kind::Misaligned, site, what));
            }
        }
        if valid > 16 {
            let what = format!("cp_async16 of {valid} valid bytes, at most 16 are copied");
            return Err(self.fault(Kind::Operand, site, what));
        }
        self.threads[self.current].cp_open.push(CpAsync {
            to: offset as u32,
            from,
            valid,
            site,
        });
        Ok(())
    }

    pub(crate) fn cp_async_commit(&mut self) {
        let thread = &mut self.threads[self.current];
        let group = std::mem::take(&mut thread.cp_open);
        thread.cp_groups.push_back(group);
    }

    pub(crate) fn cp_async_wait(&mut self, groups: usize) -> Result<(), Fault> {
        while self.threads[self.current].cp_groups.len() > groups {
            let group = self.threads[self.current].cp_groups.pop_front();
            for copy in group.expect("there are more than were to stay") {
                let valid = copy.valid as usize;
                if valid > 0 {
                    self.access_as(self.current, copy.from, valid, Access::Read, copy.site)?;
                }
                let to = self.shared.base() as u64 + u64::from(copy.to);
                self.access_as(self.current, to, 16, Access::Write, copy.site)?;
                let mut chunk = [0; 16];
                // SAFETY: the range was found to lie in a live allocation just now.
                unsafe { (copy.from as *const u8).copy_to(chunk.as_mut_ptr(), valid) };
                self.shared.set_chunk(copy.to, chunk);
            }
        }
        Ok(())
    }

    /// What an access of a thread to shared memory must not touch: mbarriers, and places that a
    /// cp.async of its own will write.
    pub(crate) fn check_shared(
        &mut self,
        thread: usize,
        address: u64,
        bytes: usize,
        access: Access,
        site: u32,
    ) -> Result<(), Fault> {
        let Some(start) = self.shared.offset(address) else {
            return Ok(());
        };
        let start = start as u32;
        let end = start + bytes as u32;
        if access != Access::Read
            && let Some((at, _)) = self.mbarriers.range(start.saturating_sub(7)..end).next()
        {
            let what = format!("a write to shared memory + {start} hits the mbarrier at {at}");
            return Err(self.fault_of(thread, Kind::Barrier, site, what));
        }
        let by = &self.threads[thread];
        if by.cp_open.is_empty() && by.cp_groups.is_empty() {
            return Ok(());
        }
        let mut flying = by.cp_groups.iter().flatten().chain(&by.cp_open);
        if flying.any(|copy| copy.to < end && start < copy.to + 16) {
            let what = format!(
                "shared memory + {start} is touched before cp_async_wait, while a cp_async of the \
                 thread is on its way there"
            );
            return Err(self.fault_of(thread, Kind::InFlight, site, what));
        }
        Ok(())
    }

    // ---- Bulk tensor copies ----

    /// Starts a copy; `kind` as numbered in the prelude.
    pub(crate) fn bulk_copy(
        &mut self,
        kind: u32,
        shared: u64,
        map: &[u64; 16],
        barrier: u64,
        coordinates: &[i32],
        site: u32,
    ) -> Result<(), Fault> {
        let map = match Map::decode(map) {
            Ok(map) => map,
            Err(what) => return Err(self.fault(Kind::Operand, site, what)),
        };
        let rank = coordinates.len();
        if map.rank != rank {
            let what = format!("a copy of {rank} dims with a tensor map of {}", map.rank);
            return Err(self.fault(Kind::Operand, site, what));
        }
        let bytes = map.box_bytes() as usize;
        let offset = match self.shared.offset(shared) {
            Some(offset) if offset + bytes <= self.shared.bytes => offset as u32,
            _ => {
                let what = format!(
                    "a box of {bytes} bytes at {}",
                    self.describe_address(shared)
                );
                return Err(self.fault(Kind::OutOfBounds, site, what));
            }
        };
        if !offset.is_multiple_of(128) {
            let what = format!("a box at shared memory + {offset}, which is no multiple of 128");
            return Err(self.fault(Kind::Misaligned, site, what));
        }
        let direction = [Direction::Load, Direction::Store, Direction::ReduceAdd][kind as usize];
        let barrier = match direction {
            Direction::Load => Some(self.barrier(barrier, site)?),
            Direction::Store | Direction::ReduceAdd => None,
        };
        if let Some(barrier) = barrier {
            self.check_init_fenced(barrier, site)?;
        }
        let mut at = [0; 5];
        for (to, &from) in at.iter_mut().zip(coordinates) {
            *to = i64::from(from);
        }
        if !map.begins_at_a_piece(&at) {
            let what = format!("a box from element {} of a row on, not at 16 bytes", at[0]);
            return Err(self.fault(Kind::Misaligned, site, what));
        }
        // Hardware loads what lies before a tensor as zeros, and does not store there: an H100 ends the kernel.
        if direction != Direction::Load && at.iter().any(|&at| at < 0) {
            let what = format!("a box is stored from {:?} on", &at[..rank]);
            return Err(self.fault(Kind::OutOfBounds, site, what));
        }
        let reads = self.copies.agent();
        let writes = if direction == Direction::Load {
            reads
        } else {
            self.copies.agent()
        };
        let thread = &mut self.threads[self.current];
        let device_fence = thread.device_fence.clone();
        let timestamp = &mut thread.timestamp;
        let clock = timestamp.clock.with(&[(timestamp.who, timestamp.now)]);
        timestamp.tick();
        self.copies.number += 1;
        let number = self.copies.number;
        self.copies.flying.push(BulkCopy {
            number,
            direction,
            map,
            shared: offset,
            at,
            barrier,
            issuer: self.current,
            reads,
            writes,
            clock,
            device_fence,
            site,
        });
        if direction != Direction::Load {
            self.threads[self.current].bulk_open.stores.push(Store {
                number,
                reads,
                writes,
                done: false,
                waited: false,
                site,
            });
        }
        self.pause(8);
        Ok(())
    }

    /// Some copy in flight happens.
    pub(crate) fn complete_one(&mut self) -> Result<(), Fault> {
        let index = self.random.below(self.copies.flying.len());
        let copy = self.copies.flying.swap_remove(index);
        self.stream.progress();
        let as_agent = |(who, now): (Agent, u32)| Timestamp {
            who,
            now,
            clock: Rc::clone(&copy.clock),
        };
        let (reader, writer) = (as_agent(copy.reads), as_agent(copy.writes));
        let (issuer, site) = (copy.issuer, copy.site);
        let operation = |timestamp| Operation {
            issuer,
            timestamp,
            device_fence: copy.device_fence.as_deref(),
            site,
        };
        let (reading, writing) = (operation(&reader), operation(&writer));
        let base = self.shared.base() as u64;
        let mut outcome = Ok(());
        copy.map
            .pieces(copy.shared, &copy.at, |shared, global, valid| {
                if outcome.is_err() {
                    return;
                }
                let on_chip = base + u64::from(shared);
                outcome = if copy.direction == Direction::Load {
                    self.load_piece(&reading, shared, on_chip, (global, valid))
                } else if valid == 0 {
                    Ok(())
                } else {
                    // Where a row ends inside of a piece, hardware writes the whole of it.
                    let add = (copy.direction == Direction::ReduceAdd).then_some(copy.map.dtype);
                    self.store_piece([&reading, &writing], on_chip, (global, 16), add)
                };
            });
        outcome?;
        if let Some(at) = copy.barrier {
            if !self.mbar_complete(at, copy.map.box_bytes(), writer) {
                let what =
                    format!("the mbarrier at shared memory + {at} is gone before its bulk copy");
                return Err(self.fault_of(issuer, Kind::Barrier, site, what));
            }
            return Ok(());
        }
        let thread = &mut self.threads[issuer];
        let open = thread.bulk_open.stores.iter_mut();
        let all = open.chain(
            thread
                .bulk_groups
                .iter_mut()
                .flat_map(|group| &mut group.stores),
        );
        for store in all.filter(|store| store.number == copy.number) {
            store.done = true;
        }
        if matches!(thread.state, State::Waiting(Wait::Bulk, _)) {
            self.wake(issuer);
        }
        Ok(())
    }

    fn load_piece(
        &mut self,
        operation: &Operation<'_>,
        shared: u32,
        on_chip: u64,
        (global, bytes): (u64, usize),
    ) -> Result<(), Fault> {
        let mut chunk = [0; 16];
        if bytes > 0 {
            self.access_async(operation, global, bytes, Access::Read)?;
            // SAFETY: the range was found to lie in a live allocation just now.
            unsafe { (global as *const u8).copy_to(chunk.as_mut_ptr(), bytes) };
        }
        self.access_async(operation, on_chip, 16, Access::Write)?;
        self.shared.set_chunk(shared, chunk);
        Ok(())
    }

    fn store_piece(
        &mut self,
        [reading, writing]: [&Operation<'_>; 2],
        from: u64,
        (to, bytes): (u64, usize),
        add: Option<Dtype>,
    ) -> Result<(), Fault> {
        let access = if add.is_some() {
            Access::Atomic
        } else {
            Access::Write
        };
        self.access_async(reading, from, bytes, Access::Read)?;
        self.access_async(writing, to, bytes, access)?;
        let (from, to) = (from as *const u8, to as *mut u8);
        // SAFETY: both ranges were found to lie in live memory just now, and do not overlap.
        unsafe {
            match add {
                None => from.copy_to(to, bytes),
                Some(dtype) => add_elements(dtype, from, to, bytes),
            }
        }
        Ok(())
    }

    pub(crate) fn bulk_commit(&mut self) {
        let thread = &mut self.threads[self.current];
        let group = std::mem::take(&mut thread.bulk_open);
        thread.bulk_groups.push_back(group);
    }

    /// Whether all but the last `groups` are done; if not, the thread is put to wait and has to ask
    /// again. With `read_only`, as far as shared memory is concerned.
    pub(crate) fn bulk_wait(&mut self, groups: usize, read_only: bool, site: u32) -> bool {
        let thread = &mut self.threads[self.current];
        let old = thread.bulk_groups.len().saturating_sub(groups);
        let stores = || {
            thread
                .bulk_groups
                .iter()
                .take(old)
                .flat_map(|group| &group.stores)
        };
        if stores().any(|store| !store.done) {
            self.wait(Wait::Bulk, site);
            return false;
        }
        let passed: Vec<_> = stores()
            .flat_map(|store| [Some(store.reads), (!read_only).then_some(store.writes)])
            .flatten()
            .collect();
        if !passed.is_empty() {
            thread.timestamp.clock = thread.timestamp.clock.with(&passed);
        }
        if read_only {
            for group in thread.bulk_groups.iter_mut().take(old) {
                group
                    .stores
                    .iter_mut()
                    .for_each(|store| store.waited = true);
            }
        } else {
            thread.bulk_groups.drain(..old);
        }
        true
    }

    /// What a thread must have waited for before it returns.
    pub(crate) fn check_nothing_in_flight(&self) -> Result<(), Fault> {
        let thread = &self.threads[self.current];
        let groups = thread.bulk_groups.iter().chain([&thread.bulk_open]);
        let mut stores = groups.flat_map(|group| &group.stores);
        if let Some(store) = stores.find(|store| !store.waited) {
            let what = "the thread returned without waiting for its bulk store, which may still read \
                        shared memory (bulk_commit, then bulk_wait or bulk_wait_read)";
            return Err(self.fault(Kind::InFlight, store.site, what));
        }
        if let Some(site) = thread.wgmma.flying() {
            let what = "the thread returned without waiting for its wgmma";
            return Err(self.fault(Kind::InFlight, site, what));
        }
        Ok(())
    }
}

/// Adds elements one by one.
///
/// # Safety
/// Both ranges are inside live allocations and do not overlap.
unsafe fn add_elements(dtype: Dtype, from: *const u8, to: *mut u8, bytes: usize) {
    let size = if dtype == Dtype::Bf16 { 2 } else { 4 };
    for at in (0..bytes).step_by(size) {
        // SAFETY: the caller's word.
        unsafe {
            let (from, to) = (from.add(at), to.add(at));
            match dtype {
                Dtype::Bf16 => {
                    let a = bf16::widen(from.cast::<u16>().read_unaligned());
                    let b = bf16::widen(to.cast::<u16>().read_unaligned());
                    to.cast::<u16>().write_unaligned(bf16::narrow(a + b));
                }
                Dtype::I32 => {
                    let a = from.cast::<i32>().read_unaligned();
                    let b = to.cast::<i32>().read_unaligned();
                    to.cast::<i32>().write_unaligned(a.wrapping_add(b));
                }
                _ => {
                    let a = from.cast::<f32>().read_unaligned();
                    let b = to.cast::<f32>().read_unaligned();
                    to.cast::<f32>().write_unaligned(a + b);
                }
            }
        }
    }
}
