//! wgmma: issued by the threads of a warp, done beside it, waited for by groups.
//!
//! A warp's 16 rows of a product are computed when the warp waits for its group, which is the latest
//! that they may be; operands in shared memory are read then, by an agent of its own that knows what
//! the lanes knew when they issued it. So an operand that is overwritten too early is both computed
//! with and reported.
#![expect(
    unsafe_code,
    reason = "accumulators are local variables of fibers that wait in the collective in which they are \
              read and written, at the addresses that those fibers gave"
)]

use std::collections::VecDeque;
use std::rc::Rc;

use crate::clock::{Agent, Clock, Timestamp, join};
use crate::fault::{Fault, Kind};
use crate::machine::{Machine, Operation};
use crate::matrix::{self, COLUMNS_MAX, DEPTH, Descriptor, ROWS};
use crate::shadow::Access;

/// What one thread has issued.
#[derive(Default)]
pub(crate) struct Wgmma {
    open: Vec<Part>,
    groups: VecDeque<Vec<Part>>,
    /// Count of the warp's agent for the group that is open.
    count: u32,
    fenced: bool,
    /// Accumulators ever used, and whether they were touched since the last fence.
    known: Vec<(u64, u64, bool)>,
}

/// A thread's part in one wgmma.
#[derive(Debug, Clone)]
struct Part {
    shape: Shape,
    /// Address of its accumulators.
    d: u64,
    a: A,
    b: u64,
    accumulate: bool,
    timestamp: Timestamp,
    site: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    columns: usize,
    transpose_a: bool,
    transpose_b: bool,
}

#[derive(Debug, Clone, Copy)]
enum A {
    Shared(u64),
    Registers([u32; 4]),
}

/// What lanes knew when they issued (address of the clock, and count, of each), and what that is
/// together.
type Snapshot = (Vec<(usize, u32)>, Rc<Clock>);

/// Operands of a wgmma.
pub(crate) struct Issue {
    /// As the prelude packs it.
    pub(crate) shape: u32,
    pub(crate) d: u64,
    pub(crate) a: u64,
    /// Address of four registers, or 0.
    pub(crate) a_registers: u64,
    pub(crate) b: u64,
    pub(crate) accumulate: bool,
    pub(crate) site: u32,
}

impl Wgmma {
    pub(crate) fn start(&mut self, base: u32) {
        self.count = base + 1;
    }

    /// The last count in use.
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// Whether there are registers to watch.
    pub(crate) fn watches(&self) -> bool {
        !self.known.is_empty()
    }

    /// Where something was issued that was not waited for.
    pub(crate) fn flying(&self) -> Option<u32> {
        self.parts().next().map(|part| part.site)
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        self.groups.iter().flatten().chain(&self.open)
    }
}

impl Machine<'_> {
    pub(crate) fn wgmma_fence(&mut self) {
        let wgmma = &mut self.threads[self.current].wgmma;
        wgmma.fenced = true;
        for (_, _, touched) in &mut wgmma.known {
            *touched = false;
        }
    }

    /// The running thread touches a local variable.
    pub(crate) fn touch_registers(
        &mut self,
        address: u64,
        bytes: usize,
        site: u32,
    ) -> Result<(), Fault> {
        let end = address + bytes as u64;
        let wgmma = &mut self.threads[self.current].wgmma;
        let mut accumulator = false;
        for (start, stop, touched) in &mut wgmma.known {
            if address < *stop && *start < end {
                *touched = true;
                accumulator = true;
            }
        }
        let own = |part: &Part| part.d..part.d + 2 * part.shape.columns as u64;
        let meets = |own: std::ops::Range<u64>| address < own.end && own.start < end;
        let in_flight = accumulator && wgmma.parts().map(own).any(meets);
        if in_flight {
            let what = "touches accumulators of a wgmma before wgmma_wait";
            return Err(self.fault(Kind::InFlight, site, what));
        }
        Ok(())
    }

    pub(crate) fn wgmma(&mut self, issue: &Issue) -> Result<(), Fault> {
        let site = issue.site;
        let shape = Shape {
            columns: (issue.shape & 0xffff) as usize,
            transpose_a: issue.shape >> 16 & 1 == 1,
            transpose_b: issue.shape >> 17 & 1 == 1,
        };
        let timestamp = self.threads[self.current].timestamp.clone();
        let a = if issue.a_registers == 0 {
            A::Shared(issue.a)
        } else {
            let at = issue.a_registers;
            // SAFETY: an array of four registers of the running fiber.
            A::Registers(unsafe { (at as *const [u32; 4]).read() })
        };
        let range = (issue.d, issue.d + 2 * shape.columns as u64);
        let wgmma = &mut self.threads[self.current].wgmma;
        if !wgmma.fenced {
            let what = "wgmma without a wgmma_fence before it";
            return Err(self.fault(Kind::Unfenced, site, what));
        }
        match wgmma.known.iter().find(|k| k.0 < range.1 && range.0 < k.1) {
            Some((_, _, true)) => {
                let what = "wgmma on accumulators touched since the last wgmma_fence";
                return Err(self.fault(Kind::Unfenced, site, what));
            }
            Some(_) => {}
            None => wgmma.known.push((range.0, range.1, false)),
        }
        wgmma.open.push(Part {
            shape,
            d: issue.d,
            a,
            b: issue.b,
            accumulate: issue.accumulate,
            timestamp,
            site,
        });
        Ok(())
    }

    pub(crate) fn wgmma_commit(&mut self) {
        let wgmma = &mut self.threads[self.current].wgmma;
        let group = std::mem::take(&mut wgmma.open);
        wgmma.groups.push_back(group);
        wgmma.count += 1;
    }

    /// All lanes of a warp wait until at most `groups` are in flight.
    pub(crate) fn retire_wgmma(
        &mut self,
        warp: usize,
        groups: usize,
        site: u32,
    ) -> Result<(), Fault> {
        let lanes = 32 * warp..(32 * warp + 32).min(self.threads.len());
        if self.warps[warp].live < 32 {
            let what = "wgmma_wait without lanes of the warp that have returned";
            return Err(self.fault_of(lanes.start, Kind::Divergence, site, what));
        }
        let agent = (self.threads.len() + warp) as Agent;
        let mut snapshot: Option<Snapshot> = None;
        while self.threads[lanes.start].wgmma.groups.len() > groups {
            let flying = self.threads[lanes.start].wgmma.groups.len() as u32;
            let count = self.threads[lanes.start].wgmma.count - flying;
            let mut parts: Vec<Vec<Part>> = Vec::with_capacity(32);
            for thread in lanes.clone() {
                parts.push(
                    self.threads[thread]
                        .wgmma
                        .groups
                        .pop_front()
                        .unwrap_or_default(),
                );
            }
            for number in 0..parts[0].len() {
                self.check_agreement(lanes.start, &parts, number)?;
                let all = || parts.iter().map(|parts| &parts[number].timestamp);
                let key: Vec<_> = all()
                    .map(|m| (Rc::as_ptr(&m.clock) as usize, m.now))
                    .collect();
                if snapshot.as_ref().is_none_or(|(old, _)| *old != key) {
                    snapshot = Some((key, join(all())));
                }
                let (_, clock) = snapshot.as_ref().expect("set just now");
                let timestamp = Timestamp {
                    who: agent,
                    now: count,
                    clock: Rc::clone(clock),
                };
                self.multiply(warp, &parts, number, &timestamp)?;
            }
            if let Some(odd) = parts.iter().position(|other| other.len() != parts[0].len()) {
                let what = "the lanes of a warp issued different numbers of wgmma";
                return Err(self.fault_of(lanes.start + odd, Kind::Divergence, site, what));
            }
            let learned = Clock::with;
            let mut last: Option<[Rc<Clock>; 2]> = None;
            for thread in lanes.clone() {
                let clock = &mut self.threads[thread].timestamp.clock;
                let new = match &last {
                    Some([old, new]) if Rc::ptr_eq(old, clock) => Rc::clone(new),
                    _ => learned(clock, &[(agent, count)]),
                };
                last = Some([std::mem::replace(clock, Rc::clone(&new)), new]);
            }
        }
        Ok(())
    }

    fn check_agreement(
        &self,
        first: usize,
        parts: &[Vec<Part>],
        number: usize,
    ) -> Result<(), Fault> {
        let one = &parts[0][number];
        for (lane, parts) in parts.iter().enumerate() {
            let agrees = parts.get(number).is_some_and(|other| {
                let a = match (&one.a, &other.a) {
                    (A::Shared(a), A::Shared(b)) => a == b,
                    (A::Registers(..), A::Registers(..)) => true,
                    _ => false,
                };
                a && one.shape == other.shape
                    && one.b == other.b
                    && one.accumulate == other.accumulate
            });
            if !agrees {
                let what = format!("lane {lane} issued another wgmma than lane 0 of its warp");
                return Err(self.fault_of(first + lane, Kind::Divergence, one.site, what));
            }
        }
        Ok(())
    }

    /// One wgmma, the rows of this warp.
    fn multiply(
        &mut self,
        warp: usize,
        parts: &[Vec<Part>],
        number: usize,
        timestamp: &Timestamp,
    ) -> Result<(), Fault> {
        let one = parts[0][number].clone();
        let columns = one.shape.columns;
        let first = 32 * warp;
        let operation = Operation {
            issuer: first,
            timestamp,
            device_fence: None,
            site: one.site,
        };
        let a = match one.a {
            A::Registers(..) => matrix::gather_a(|lane| match parts[lane][number].a {
                A::Registers(words) => words,
                A::Shared(_) => unreachable!("the lanes agree"),
            }),
            A::Shared(bits) => {
                let mut a = [[0.0; DEPTH]; ROWS];
                let descriptor = self.descriptor(first, bits, one.site)?;
                let rows = 16 * (warp as u32 % 4);
                let elements = Elements {
                    descriptor,
                    mn_major: one.shape.transpose_a,
                    first: rows,
                    count: ROWS,
                };
                self.operand(&operation, &elements, |row, k, value| {
                    a[row][k] = value;
                })?;
                a
            }
        };
        let mut b = [0.0; DEPTH * COLUMNS_MAX];
        let elements = Elements {
            descriptor: self.descriptor(first, one.b, one.site)?,
            mn_major: one.shape.transpose_b,
            first: 0,
            count: columns,
        };
        self.operand(&operation, &elements, |column, k, value| {
            b[k * columns + column] = value;
        })?;
        let mut d = [0.0; ROWS * COLUMNS_MAX];
        let d = &mut d[..ROWS * columns];
        let registers = |lane: usize| parts[lane][number].d as *mut f32;
        if one.accumulate {
            for lane in 0..32 {
                for i in 0..columns / 2 {
                    let (row, column) = matrix::accumulator(lane, i);
                    // SAFETY: an array of `columns / 2` floats of a waiting fiber.
                    d[row * columns + column] = unsafe { registers(lane).add(i).read() };
                }
            }
        }
        matrix::multiply(d, &a, &b[..DEPTH * columns], columns);
        for lane in 0..32 {
            for i in 0..columns / 2 {
                let (row, column) = matrix::accumulator(lane, i);
                // SAFETY: as above.
                unsafe { registers(lane).add(i).write(d[row * columns + column]) };
            }
        }
        Ok(())
    }

    fn descriptor(&self, thread: usize, bits: u64, site: u32) -> Result<Descriptor, Fault> {
        Descriptor::decode(bits).map_err(|what| self.fault_of(thread, Kind::Operand, site, what))
    }

    /// Reads an operand from shared memory as row (or column), position along K, value.
    fn operand(
        &mut self,
        operation: &Operation<'_>,
        elements: &Elements,
        mut put: impl FnMut(usize, usize, f32),
    ) -> Result<(), Fault> {
        let Elements {
            descriptor,
            mn_major,
            first,
            count,
        } = *elements;
        let (rows, pieces) = if mn_major {
            (DEPTH, count / 8)
        } else {
            (count, DEPTH / 8)
        };
        for row in 0..rows {
            for piece in 0..pieces {
                let (from_row, from_piece) = if mn_major {
                    (row as u32, piece as u32 + first / 8)
                } else {
                    (row as u32 + first, piece as u32)
                };
                let offset = descriptor.chunk(mn_major, from_row, from_piece);
                let address = self.shared.base() as u64 + u64::from(offset);
                self.access_async(operation, address, 16, Access::Read)?;
                let values = matrix::widen_chunk(self.shared.chunk(offset));
                for (i, value) in values.into_iter().enumerate() {
                    if mn_major {
                        put(8 * piece + i, row, value);
                    } else {
                        put(row, 8 * piece + i, value);
                    }
                }
            }
        }
        Ok(())
    }
}

/// A part of an operand: `count` rows of A, or columns of B, from `first` on.
#[derive(Clone, Copy)]
struct Elements {
    descriptor: Descriptor,
    mn_major: bool,
    first: u32,
    count: usize,
}
