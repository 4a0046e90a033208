//! [`Mbarrier`]: the barriers in shared memory that threads and bulk loads arrive at.

use std::fmt;
use std::rc::Rc;

use crate::clock::{Clock, Timestamp, join};
use crate::fault::{Fault, Kind};
use crate::machine::{Machine, Wait};
use crate::shadow::Access;

/// A barrier in shared memory.
pub(crate) struct Mbarrier {
    arrivals: u32,
    pending: u32,
    /// Bytes announced and not yet arrived.
    bytes: i64,
    parity: u32,
    timestamps: Vec<Timestamp>,
    /// What those knew who completed the last phase.
    finished: Option<Rc<Clock>>,
    waiting: Vec<usize>,
    init: Timestamp,
}

impl fmt::Display for Mbarrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "in a phase of parity {} it lacks {} of {} arrivals and {} bytes",
            self.parity, self.pending, self.arrivals, self.bytes
        )
    }
}

impl Machine<'_> {
    // ---- mbarriers ----

    /// The offset of a barrier's address, checked.
    fn barrier_at(&self, address: u64, site: u32) -> Result<u32, Fault> {
        match self.shared.offset(address) {
            Some(offset) if offset + 8 <= self.shared.bytes && offset.is_multiple_of(8) => {
                Ok(offset as u32)
            }
            Some(offset) if !offset.is_multiple_of(8) => {
                let what = format!("an mbarrier at shared memory + {offset}, no multiple of 8");
                Err(self.fault(Kind::Misaligned, site, what))
            }
            _ => {
                let what = format!("an mbarrier at {}", self.describe_address(address));
                Err(self.fault(Kind::OutOfBounds, site, what))
            }
        }
    }

    pub(crate) fn mbar_init(
        &mut self,
        address: u64,
        arrivals: u32,
        site: u32,
    ) -> Result<(), Fault> {
        let at = self.barrier_at(address, site)?;
        if arrivals == 0 || arrivals > (1 << 20) - 1 {
            let what = format!("mbar_init with {arrivals} arrivals, 1 to 2^20 - 1 are possible");
            return Err(self.fault(Kind::Barrier, site, what));
        }
        if self
            .mbarriers
            .remove(&at)
            .is_some_and(|old| !old.waiting.is_empty())
        {
            let what = format!("mbar_init of shared memory + {at} while threads wait on it");
            return Err(self.fault(Kind::Barrier, site, what));
        }
        self.access_as(self.current, address, 8, Access::Write, site)?;
        let init = self.threads[self.current].timestamp.clone();
        self.mbarriers.insert(
            at,
            Mbarrier {
                arrivals,
                pending: arrivals,
                bytes: 0,
                parity: 0,
                timestamps: Vec::new(),
                finished: None,
                waiting: Vec::new(),
                init,
            },
        );
        Ok(())
    }

    /// The barrier, initialized as far as the running thread can know.
    pub(crate) fn barrier(&mut self, address: u64, site: u32) -> Result<u32, Fault> {
        let at = self.barrier_at(address, site)?;
        let Some(barrier) = self.mbarriers.get(&at) else {
            let what = format!("shared memory + {at} is no initialized mbarrier");
            return Err(self.fault(Kind::Barrier, site, what));
        };
        let (timestamp, init) = (&self.threads[self.current].timestamp, &barrier.init);
        if timestamp.who != init.who && timestamp.clock.known(init.who) < init.now {
            let what = format!(
                "uses the mbarrier at shared memory + {at}, and nothing orders that after its \
                 mbar_init by thread {}",
                init.who
            );
            return Err(self.fault(Kind::Race, site, what));
        }
        Ok(at)
    }

    /// Arrives, after announcing `bytes`.
    pub(crate) fn mbar_arrive(&mut self, address: u64, bytes: u32, site: u32) -> Result<(), Fault> {
        let at = self.barrier(address, site)?;
        let barrier = self.mbarriers.get_mut(&at).expect("found just now");
        if barrier.pending == 0 {
            let what = format!(
                "an arrival more than the {} that the mbarrier at shared memory + {at} was \
                 initialized with, while it still waits for {} bytes",
                barrier.arrivals, barrier.bytes
            );
            return Err(self.fault(Kind::Barrier, site, what));
        }
        barrier.bytes += i64::from(bytes);
        barrier.pending -= 1;
        let timestamp = &mut self.threads[self.current].timestamp;
        barrier.timestamps.push(timestamp.clone());
        timestamp.tick();
        if barrier.bytes >= 1 << 20 {
            let what = format!(
                "{} bytes announced, an mbarrier counts below 2^20",
                barrier.bytes
            );
            return Err(self.fault(Kind::Barrier, site, what));
        }
        self.settle(at);
        self.pause(8);
        Ok(())
    }

    /// The bytes of a bulk load arrive, copied by `copier`; false where the barrier is gone.
    pub(crate) fn mbar_complete(&mut self, at: u32, bytes: u32, copier: Timestamp) -> bool {
        let Some(barrier) = self.mbarriers.get_mut(&at) else {
            return false;
        };
        barrier.bytes -= i64::from(bytes);
        barrier.timestamps.push(copier);
        self.settle(at);
        true
    }

    /// Ends the phase of a barrier that everything has arrived at.
    fn settle(&mut self, at: u32) {
        let barrier = self.mbarriers.get_mut(&at).expect("the caller found it");
        if barrier.pending > 0 || barrier.bytes != 0 {
            return;
        }
        barrier.parity ^= 1;
        barrier.pending = barrier.arrivals;
        let timestamps = std::mem::take(&mut barrier.timestamps);
        barrier.finished = Some(join(timestamps.iter()));
        for thread in std::mem::take(&mut barrier.waiting) {
            self.wake(thread);
        }
    }

    /// Whether the phase of this parity is over; if not and `until_done`, the thread is put to wait
    /// and has to ask again.
    pub(crate) fn mbar_wait(
        &mut self,
        address: u64,
        parity: u32,
        until_done: bool,
        site: u32,
    ) -> Result<bool, Fault> {
        let at = self.barrier(address, site)?;
        if parity > 1 {
            let what = format!("a wait for parity {parity}; there are 0 and 1");
            return Err(self.fault(Kind::Operand, site, what));
        }
        let barrier = self.mbarriers.get_mut(&at).expect("found just now");
        if barrier.parity != parity {
            // Of a barrier that no phase has ended on yet, nothing is to be learned.
            if let Some(finished) = barrier.finished.clone() {
                let clock = &self.threads[self.current].timestamp.clock;
                self.threads[self.current].timestamp.clock = self.joiner.join(clock, &finished);
            }
            return Ok(true);
        }
        if until_done {
            barrier.waiting.push(self.current);
            self.wait(Wait::Mbarrier { at, parity }, site);
        } else {
            self.poll_again();
        }
        Ok(false)
    }

    /// The copy engine sees a barrier whose initialization was fenced.
    pub(crate) fn check_init_fenced(&self, at: u32, site: u32) -> Result<(), Fault> {
        let init = &self.mbarriers[&at].init;
        let who = usize::from(init.who);
        let mut fences = self.fences[who].iter().chain(&self.init_fences[who]);
        if fences.any(|&fence| fence >= init.now) {
            return Ok(());
        }
        let what = format!(
            "a bulk copy reports to the mbarrier at shared memory + {at}, whose mbar_init was not \
             followed by mbar_fence_init"
        );
        Err(self.fault(Kind::Unfenced, site, what))
    }
}
