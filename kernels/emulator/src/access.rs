//! Accesses to memory, plain, atomic and by asynchronous operations, and the fences between them.
#![expect(
    unsafe_code,
    reason = "atomics on addresses of kernels; each was found to lie in a live allocation by the access \
              check just before"
)]

use std::rc::Rc;

use crate::clock::{Agent, Foreign, Timestamp};
use crate::fault::{Fault, Kind};
use crate::machine::{Machine, Operation};
use crate::memory::Memory;
use crate::shadow::{Access, Conflict, Fences, View};
use crate::shared::Shared;

impl Machine<'_> {
    /// A plain access of the running thread.
    pub(crate) fn touch(
        &mut self,
        address: u64,
        bytes: usize,
        alignment: u64,
        access: Access,
        site: u32,
    ) -> Result<(), Fault> {
        let thread = &self.threads[self.current];
        if thread.stack.contains(&address) {
            return if thread.wgmma.watches() {
                self.touch_registers(address, bytes, site)
            } else {
                Ok(())
            };
        }
        if alignment > 1 && !address.is_multiple_of(alignment) {
            return self.misaligned(address, alignment, site);
        }
        if access == Access::Read && self.setup.library.contains(address) {
            return Ok(());
        }
        self.access_as(self.current, address, bytes, access, site)
    }

    /// The running thread follows a pointer whose type asks for more.
    pub(crate) fn misaligned<R>(
        &self,
        address: u64,
        alignment: u64,
        site: u32,
    ) -> Result<R, Fault> {
        let place = self.describe_address(address);
        let what = format!("an access at {place}, which is no multiple of {alignment}");
        Err(self.fault(Kind::Misaligned, site, what))
    }

    /// An access of a thread.
    pub(crate) fn access_as(
        &mut self,
        thread: usize,
        address: u64,
        bytes: usize,
        access: Access,
        site: u32,
    ) -> Result<(), Fault> {
        self.check_shared(thread, address, bytes, access, site)?;
        let by = &self.threads[thread];
        let view = View {
            who: by.timestamp.who,
            now: by.timestamp.now,
            clock: &by.timestamp.clock,
            turns: &self.turns,
            fences: None,
            site,
            coin: self.random.next() & 1 == 1,
        };
        let outcome = checked(&mut self.shared, self.memory, address, bytes, access, &view);
        outcome.map_err(|wrong| {
            self.explain(wrong, thread, thread as Agent, address, bytes, access, site)
        })?;
        Ok(())
    }

    /// An access of an asynchronous operation.
    pub(crate) fn access_async(
        &mut self,
        operation: &Operation<'_>,
        address: u64,
        bytes: usize,
        access: Access,
    ) -> Result<(), Fault> {
        let Operation {
            issuer,
            timestamp,
            device_fence,
            site,
        } = *operation;
        let fences = if self.shared.offset(address).is_some() {
            Fences::Shared(&self.fences)
        } else {
            Fences::Device(&self.device_fences, device_fence)
        };
        let view = View {
            who: timestamp.who,
            now: timestamp.now,
            clock: &timestamp.clock,
            turns: &self.turns,
            fences: Some(fences),
            site,
            coin: self.random.next() & 1 == 1,
        };
        let outcome = checked(&mut self.shared, self.memory, address, bytes, access, &view);
        outcome.map_err(|wrong| {
            self.explain(wrong, issuer, timestamp.who, address, bytes, access, site)
        })
    }

    // ---- Atomics and fences of global memory ----

    /// `kind` as numbered in the prelude; gives the value before.
    pub(crate) fn atomic(
        &mut self,
        kind: u32,
        address: u64,
        value: u32,
        expected: u32,
        site: u32,
    ) -> Result<u32, Fault> {
        if !address.is_multiple_of(4) {
            let place = self.describe_address(address);
            return Err(self.fault(Kind::Misaligned, site, format!("an atomic at {place}")));
        }
        self.access_as(self.current, address, 4, Access::Atomic, site)?;
        let word = address as *mut u32;
        // SAFETY: aligned, and inside a live allocation, as the access found.
        let before = unsafe { word.read() };
        let after = match kind {
            0 => before.wrapping_add(value),
            1 => (f32::from_bits(before) + f32::from_bits(value)).to_bits(),
            2 => (before as i32).max(value as i32) as u32,
            3 => before.max(value),
            4 => value,
            _ if before == expected => value,
            _ => before,
        };
        // SAFETY: as above.
        unsafe { word.write(after) };
        if let Some(timestamp) = self.threads[self.current].fence.clone() {
            self.publish(address, timestamp);
        }
        let published = self.published.get(&address).map_or(0, Vec::len);
        self.threads[self.current].seen.push((address, published));
        self.stream.progress();
        self.pause(4);
        Ok(before)
    }

    pub(crate) fn load_acquire(&mut self, address: u64, site: u32) -> Result<u32, Fault> {
        self.access_as(self.current, address, 4, Access::AtomicRead, site)?;
        // SAFETY: inside a live allocation, as the access found.
        let value = unsafe { (address as *const u32).read_unaligned() };
        let published = self.published.get(&address).map_or(0, Vec::len);
        self.acquire(address, published);
        self.poll_again();
        Ok(value)
    }

    pub(crate) fn store_release(
        &mut self,
        address: u64,
        value: u32,
        site: u32,
    ) -> Result<(), Fault> {
        self.access_as(self.current, address, 4, Access::AtomicWrite, site)?;
        // SAFETY: inside a live allocation, as the access found.
        unsafe { (address as *mut u32).write_unaligned(value) };
        let timestamp = self.threads[self.current].timestamp.clone();
        self.publish(address, timestamp);
        self.threads[self.current].timestamp.tick();
        self.stream.progress();
        self.pause(4);
        Ok(())
    }

    /// A fence before an atomic publishes what came before it; one after an atomic takes in what was
    /// published there.
    pub(crate) fn thread_fence(&mut self) {
        for (address, published) in std::mem::take(&mut self.threads[self.current].seen) {
            self.acquire(address, published);
        }
        let thread = &mut self.threads[self.current];
        thread.fence = Some(thread.timestamp.clone());
        thread.timestamp.tick();
    }

    fn publish(&mut self, address: u64, timestamp: Timestamp) {
        let turn = self.turns.len() - 1;
        let all = self.published.entry(address).or_default();
        let foreign = Foreign { turn, timestamp };
        if all.last() != Some(&foreign) {
            all.push(foreign);
        }
    }

    fn acquire(&mut self, address: u64, published: usize) {
        let Some(all) = self.published.get(&address) else {
            return;
        };
        let turn = self.turns.len() - 1;
        let (here, elsewhere): (Vec<_>, Vec<_>) = all[..published]
            .iter()
            .cloned()
            .partition(|foreign| foreign.turn == turn);
        let mut clock = Rc::clone(&self.threads[self.current].timestamp.clock);
        for Foreign { timestamp, .. } in here {
            clock = self.joiner.join(&clock, &timestamp.clock);
            clock = clock.with(&[(timestamp.who, timestamp.now)]);
        }
        if !elsewhere.is_empty() {
            clock = clock.with_foreign(&elsewhere.into());
        }
        self.threads[self.current].timestamp.clock = clock;
    }

    pub(crate) fn fence_async(&mut self) {
        let timestamp = &mut self.threads[self.current].timestamp;
        self.fences[self.current].push(timestamp.now);
        timestamp.tick();
    }

    pub(crate) fn fence_async_global(&mut self) {
        let thread = &mut self.threads[self.current];
        let timestamp = &mut thread.timestamp;
        thread.device_fence = Some(timestamp.clock.with(&[(timestamp.who, timestamp.now)]));
        self.device_fences[self.current].push(timestamp.now);
        timestamp.tick();
    }

    pub(crate) fn mbar_fence_init(&mut self) {
        let now = self.threads[self.current].timestamp.now;
        self.init_fences[self.current].push(now);
    }
}

/// Checks an access in the shadow of whatever the address is in; `Err(None)` when it is in nothing.
/// Conflicts are given with their address.
fn checked(
    shared: &mut Shared,
    memory: &mut Memory,
    address: u64,
    bytes: usize,
    access: Access,
    view: &View<'_>,
) -> Result<(), Option<(usize, Conflict)>> {
    let checked = if let Some(offset) = shared.offset(address) {
        if offset + bytes > shared.bytes {
            return Err(None);
        }
        // What earlier blocks did with it is of no concern.
        let turns = &view.turns[view.turns.len() - 1..];
        let view = View { turns, ..*view };
        let shadow = &mut shared.shadow;
        (offset, shadow.access(offset, bytes, access, &view))
    } else {
        let (allocation, offset) = memory.find(address, bytes).ok_or(None)?;
        if access.writes() && allocation.is_adopted() {
            return Err(Some((address as usize, Conflict::Adopted)));
        }
        let shadow = &mut allocation.shadow;
        shadow.set_used(offset, bytes, access.writes());
        (offset, shadow.access(offset, bytes, access, view))
    };
    let (offset, outcome) = checked;
    outcome.map_err(|(at, conflict)| Some((at - offset + address as usize, conflict)))
}
