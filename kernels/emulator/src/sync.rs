//! Barriers of a block and collectives of a warp.
#![expect(
    unsafe_code,
    reason = "a collective reads and writes the registers of lanes that wait in it, which are local \
              variables of suspended fibers, at the addresses that those lanes gave"
)]

use std::fmt;

use crate::clock::{Timestamp, join};
use crate::fault::{Fault, Kind};
use crate::machine::{Machine, Wait};
use crate::matrix;
use crate::shadow::Access;

/// A barrier of threads.
#[derive(Default)]
pub(crate) struct Gate {
    /// Threads it waits for; of no meaning for `__syncthreads`, which waits for all.
    pub(crate) expected: u32,
    pub(crate) arrived: u32,
    timestamps: Vec<Timestamp>,
    waiting: Vec<usize>,
}

/// A warp, and the calls of those of its lanes that wait for the others.
#[derive(Default)]
pub(crate) struct Warp {
    pub(crate) live: u32,
    /// Lanes that have called, and the first that did.
    arrived: u32,
    first: usize,
    calls: [Option<Call>; 32],
}

/// A lane's part in a collective.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub(crate) what: Collective,
    pub(crate) value: u32,
    pub(crate) operand: u32,
    /// Addresses of its registers or of its row.
    pub(crate) at: [u64; 3],
    pub(crate) site: u32,
}

/// What all lanes of a warp do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Collective {
    Sync,
    /// By number, as in the prelude.
    Exchange(u32),
    LoadMatrix {
        matrices: u32,
        transposed: bool,
    },
    StoreMatrix {
        matrices: u32,
        transposed: bool,
    },
    Mma,
    WgmmaWait(u32),
    Registers,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sync => write!(f, "syncwarp"),
            Self::Exchange(kind) => {
                let names = ["shfl_xor", "shfl", "shfl_up", "shfl_down", "ballot"];
                write!(f, "{}", names[*kind as usize])
            }
            Self::LoadMatrix { .. } => write!(f, "ldmatrix"),
            Self::StoreMatrix { .. } => write!(f, "stmatrix"),
            Self::Mma => write!(f, "mma"),
            Self::WgmmaWait(groups) => write!(f, "wgmma_wait<{groups}>"),
            Self::Registers => write!(f, "setmaxnreg"),
        }
    }
}

impl Machine<'_> {
    pub(crate) fn sync_threads(&mut self, site: u32) {
        self.arrive(0, true, site);
        if self.gates[0].arrived == self.live {
            self.open(0);
        }
    }

    pub(crate) fn named_barrier(
        &mut self,
        id: u32,
        threads: u32,
        wait: bool,
        site: u32,
    ) -> Result<(), Fault> {
        let call = if wait { "named_sync" } else { "named_arrive" };
        let wrong = |what: String| Err(self.fault(Kind::Barrier, site, what));
        if !(1..16).contains(&id) {
            return wrong(format!(
                "{call}({id}, {threads}): ids are 1 to 15 (0 is __syncthreads)"
            ));
        }
        if threads == 0 || !threads.is_multiple_of(32) || threads > self.setup.threads {
            return wrong(format!(
                "{call}({id}, {threads}): the count is a multiple of 32, at most the block's {}",
                self.setup.threads
            ));
        }
        let Gate {
            arrived, expected, ..
        } = self.gates[id as usize];
        if arrived > 0 && expected != threads {
            return wrong(format!(
                "{call}({id}, {threads}), where others expect {expected} threads"
            ));
        }
        self.gates[id as usize].expected = threads;
        self.arrive(id, wait, site);
        if self.gates[id as usize].arrived == threads {
            self.open(id);
        }
        // One that waits, or that was just woken, must not be queued a second time.
        if !wait {
            self.pause(16);
        }
        Ok(())
    }

    fn arrive(&mut self, id: u32, wait: bool, site: u32) {
        let gate = &mut self.gates[id as usize];
        let timestamp = &mut self.threads[self.current].timestamp;
        gate.timestamps.push(timestamp.clone());
        timestamp.tick();
        gate.arrived += 1;
        if wait {
            gate.waiting.push(self.current);
            self.wait(Wait::Gate(id), site);
        }
    }

    /// All have arrived.
    fn open(&mut self, id: u32) {
        let gate = std::mem::take(&mut self.gates[id as usize]);
        let clock = join(gate.timestamps.iter());
        for thread in gate.waiting {
            self.threads[thread].timestamp.clock.clone_from(&clock);
            self.wake(thread);
        }
    }

    /// A thread has returned: barriers and collectives no longer wait for it.
    pub(crate) fn exit_gates(&mut self) -> Result<(), Fault> {
        if self.gates[0].arrived > 0 && self.gates[0].arrived == self.live {
            self.open(0);
        }
        let warp = self.current / 32;
        let waiting = self.warps[warp].arrived;
        if waiting > 0 && waiting == self.warps[warp].live {
            self.perform(warp)?;
        }
        Ok(())
    }

    /// The running thread's part in a collective; the last lane performs it for all.
    pub(crate) fn collective(&mut self, call: Call) -> Result<(), Fault> {
        let (warp, lane) = (self.current / 32, self.current % 32);
        let Warp {
            arrived,
            first,
            calls,
            live,
        } = &mut self.warps[warp];
        if *arrived == 0 {
            *first = lane;
        }
        let theirs = calls[*first].map_or(call.what, |first| first.what);
        if theirs != call.what {
            let what = format!(
                "calls {}, lane {first} of its warp calls {theirs}",
                call.what
            );
            return Err(self.fault(Kind::Divergence, call.site, what));
        }
        calls[lane] = Some(call);
        *arrived += 1;
        let all = arrived == live;
        self.wait(Wait::Collective(call.what), call.site);
        if all {
            self.perform(warp)?;
        }
        Ok(())
    }

    fn perform(&mut self, warp: usize) -> Result<(), Fault> {
        let calls = std::mem::take(&mut self.warps[warp].calls);
        self.warps[warp].arrived = 0;
        let lanes = || (0..32).filter_map(|lane| calls[lane].map(|call| (32 * warp + lane, call)));
        let (_, any) = lanes().next().expect("somebody called");
        match any.what {
            Collective::Sync => {
                let threads = &self.threads;
                let timestamps: Vec<_> = lanes()
                    .map(|(thread, _)| &threads[thread].timestamp)
                    .collect();
                let clock = join(timestamps.iter().copied());
                for (thread, _) in lanes() {
                    let timestamp = &mut self.threads[thread].timestamp;
                    timestamp.clock.clone_from(&clock);
                    timestamp.tick();
                }
            }
            Collective::Exchange(kind) => {
                let votes = lanes().filter(|(_, call)| call.value != 0);
                let ballot = votes.fold(0, |bits, (thread, _)| bits | 1 << (thread % 32));
                for (thread, call) in lanes() {
                    let (lane, operand) = (thread as u32 % 32, call.operand);
                    let from = match kind {
                        0 => lane ^ operand,
                        1 => operand % 32,
                        2 => lane.checked_sub(operand).unwrap_or(lane),
                        _ if lane + operand < 32 => lane + operand,
                        _ => lane,
                    };
                    // A lane that has returned gives nothing one could use.
                    let other = calls.get(from as usize).copied().flatten();
                    let value = other.map_or(0xffff_dead, |call| call.value);
                    self.threads[thread].result = if kind == 4 { ballot } else { value };
                }
            }
            Collective::LoadMatrix {
                matrices,
                transposed,
            } => {
                self.load_matrices(warp, &calls, matrices as usize, transposed)?;
            }
            Collective::StoreMatrix {
                matrices,
                transposed,
            } => {
                self.store_matrices(warp, &calls, matrices as usize, transposed)?;
            }
            Collective::Mma => {
                self.all_lanes(warp, &calls)?;
                multiply(&calls);
            }
            Collective::WgmmaWait(groups) => self.retire_wgmma(warp, groups as usize, any.site)?,
            Collective::Registers => {}
        }
        for (thread, _) in lanes() {
            self.wake(thread);
        }
        Ok(())
    }

    /// Tensor cores need whole warps.
    fn all_lanes(&self, warp: usize, calls: &[Option<Call>; 32]) -> Result<(), Fault> {
        let Some(missing) = calls.iter().position(Option::is_none) else {
            return Ok(());
        };
        let any = calls.iter().flatten().next().expect("somebody called");
        let what = format!(
            "{} without lane {missing} of the warp, which has returned",
            any.what
        );
        Err(self.fault_of(32 * warp, Kind::Divergence, any.site, what))
    }

    /// The row of 16 bytes that a lane points to, as an offset in shared memory.
    fn row(&mut self, thread: usize, call: &Call, access: Access) -> Result<u32, Fault> {
        let address = call.at[1];
        let Some(offset) = self.shared.offset(address) else {
            let what = format!("{} of {}", call.what, self.describe_address(address));
            return Err(self.fault_of(thread, Kind::OutOfBounds, call.site, what));
        };
        if !offset.is_multiple_of(16) {
            let what = format!(
                "{} of a row at shared memory + {offset}, which is no multiple of 16",
                call.what
            );
            return Err(self.fault_of(thread, Kind::Misaligned, call.site, what));
        }
        self.access_as(thread, address, 16, access, call.site)?;
        Ok(offset as u32)
    }

    fn load_matrices(
        &mut self,
        warp: usize,
        calls: &[Option<Call>; 32],
        matrices: usize,
        transposed: bool,
    ) -> Result<(), Fault> {
        self.all_lanes(warp, calls)?;
        for matrix in 0..matrices {
            let mut rows = [[0u16; 8]; 8];
            for (row, elements) in rows.iter_mut().enumerate() {
                let lane = 8 * matrix + row;
                let call = calls[lane].as_ref().expect("all lanes are there");
                let offset = self.row(32 * warp + lane, call, Access::Read)?;
                *elements = bytemuck::cast(self.shared.chunk(offset));
            }
            for (lane, call) in calls.iter().flatten().enumerate() {
                let (major, minor) = (lane / 4, 2 * (lane % 4));
                let [lower, upper] = if transposed {
                    [rows[minor][major], rows[minor + 1][major]]
                } else {
                    [rows[major][minor], rows[major][minor + 1]]
                };
                let word = u32::from(lower) | u32::from(upper) << 16;
                // SAFETY: an array of as many registers as matrices, local to a waiting lane.
                unsafe { (call.at[0] as *mut u32).add(matrix).write(word) };
            }
        }
        Ok(())
    }

    fn store_matrices(
        &mut self,
        warp: usize,
        calls: &[Option<Call>; 32],
        matrices: usize,
        transposed: bool,
    ) -> Result<(), Fault> {
        self.all_lanes(warp, calls)?;
        for matrix in 0..matrices {
            let mut rows = [[0u16; 8]; 8];
            for (lane, call) in calls.iter().flatten().enumerate() {
                // SAFETY: an array of as many registers as matrices, local to a waiting lane.
                let word = unsafe { (call.at[0] as *const u32).add(matrix).read() };
                let (major, minor) = (lane / 4, 2 * (lane % 4));
                for (i, element) in [word as u16, (word >> 16) as u16].into_iter().enumerate() {
                    if transposed {
                        rows[minor + i][major] = element;
                    } else {
                        rows[major][minor + i] = element;
                    }
                }
            }
            for (row, elements) in rows.into_iter().enumerate() {
                let lane = 8 * matrix + row;
                let call = calls[lane].as_ref().expect("all lanes are there");
                let offset = self.row(32 * warp + lane, call, Access::Write)?;
                self.shared.set_chunk(offset, bytemuck::cast(elements));
            }
        }
        Ok(())
    }
}

/// `mma.m16n8k16` on the registers of 32 lanes.
fn multiply(calls: &[Option<Call>; 32]) {
    let at = |lane: usize, i: usize| calls[lane].as_ref().expect("all lanes are there").at[i];
    // SAFETY: arrays of 4, 4 and 2 registers, local to lanes that wait here.
    let a = matrix::gather_a(|lane| unsafe { (at(lane, 1) as *const [u32; 4]).read() });
    // SAFETY: as above.
    let b = matrix::gather_b(|lane| unsafe { (at(lane, 2) as *const [u32; 2]).read() });
    let mut d = [0.0; matrix::ROWS * 8];
    let place = |lane, i| {
        let (row, column) = matrix::accumulator(lane, i);
        row * 8 + column
    };
    let registers = (0..32).flat_map(|lane| (0..4).map(move |i| (lane, i)));
    for (lane, i) in registers.clone() {
        // SAFETY: as above.
        d[place(lane, i)] = unsafe { (at(lane, 0) as *const f32).add(i).read() };
    }
    matrix::multiply(&mut d, &a, b.as_flattened(), 8);
    for (lane, i) in registers {
        // SAFETY: as above.
        unsafe { (at(lane, 0) as *mut f32).add(i).write(d[place(lane, i)]) };
    }
}
