//! The table of functions that the prelude calls, in the order of `Model_` in `prelude/host.cuh`.
//!
//! # Why this is sound
//!
//! Kernels are compiled from sources of `kernels` and of tests, and run on fibers of the thread
//! that launched them. While one runs, [`CURRENT`] points to the machine of its launch, which
//! outlives all fibers and is borrowed nowhere else (the launcher keeps only this pointer). Every
//! function here borrows it for one method that does not switch fibers, and lets go of it before
//! [`rest`] switches.
#![expect(
    unsafe_code,
    reason = "calls from C++ carry addresses; see the module documentation"
)]

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;

use corosensei::Yielder;

use crate::fault::Fault;
use crate::machine::Machine;
use crate::shadow::Access;
use crate::sync::{Call, Collective};
use crate::tensor_core::Issue;

/// An index of three parts, as the prelude has it.
#[repr(C)]
struct Index {
    x: u32,
    y: u32,
    z: u32,
}

type Site = *const c_void;

/// The table. Fields are those of `Model_` in the prelude, one by one.
#[repr(C)]
pub(crate) struct Model {
    read: unsafe extern "C-unwind" fn(*const c_void, u64, u64, Site),
    write: unsafe extern "C-unwind" fn(*const c_void, u64, u64, Site),
    misaligned: unsafe extern "C-unwind" fn(*const c_void, u64, Site),
    index: unsafe extern "C-unwind" fn(u32, *mut Index),
    shared: unsafe extern "C-unwind" fn() -> *mut u8,
    sync_threads: unsafe extern "C-unwind" fn(Site),
    sync_warp: unsafe extern "C-unwind" fn(Site),
    named_barrier: unsafe extern "C-unwind" fn(u32, u32, u32, Site),
    exchange: unsafe extern "C-unwind" fn(u32, u32, u32, Site) -> u32,
    atomic: unsafe extern "C-unwind" fn(u32, *mut u32, u32, u32, Site) -> u32,
    fence: unsafe extern "C-unwind" fn(u32, Site),
    load_acquire: unsafe extern "C-unwind" fn(*const u32, Site) -> u32,
    store_release: unsafe extern "C-unwind" fn(*mut u32, u32, Site),
    cp_async: unsafe extern "C-unwind" fn(*mut c_void, *const c_void, u32, Site),
    commit: unsafe extern "C-unwind" fn(u32, Site),
    wait: unsafe extern "C-unwind" fn(u32, u32, Site),
    ldmatrix: unsafe extern "C-unwind" fn(*mut u32, *const c_void, u32, u32, Site),
    stmatrix: unsafe extern "C-unwind" fn(*mut c_void, *const u32, u32, u32, Site),
    mma: unsafe extern "C-unwind" fn(*mut f32, *const u32, *const u32, Site),
    mbar_init: unsafe extern "C-unwind" fn(*mut u64, u32, Site),
    mbar_arrive: unsafe extern "C-unwind" fn(*mut u64, u32, Site),
    mbar_wait: unsafe extern "C-unwind" fn(*mut u64, u32, u32, Site) -> u32,
    tma: unsafe extern "C-unwind" fn(
        u32,
        u32,
        *const c_void,
        *const [u64; 16],
        *mut u64,
        *const i32,
        Site,
    ),
    wgmma: unsafe extern "C-unwind" fn(u32, *mut f32, u64, *const u32, u64, u32, Site),
    registers: unsafe extern "C-unwind" fn(u32, u32, Site),
}

/// The one table.
pub(crate) static MODEL: Model = Model {
    read,
    write,
    misaligned,
    index,
    shared,
    sync_threads,
    sync_warp,
    named_barrier,
    exchange,
    atomic,
    fence,
    load_acquire,
    store_release,
    cp_async,
    commit,
    wait,
    ldmatrix,
    stmatrix,
    mma,
    mbar_init,
    mbar_arrive,
    mbar_wait,
    tma,
    wgmma,
    registers,
};

thread_local! {
    /// The machine whose kernel runs on this thread.
    static CURRENT: Cell<*mut Machine<'static>> = const { Cell::new(ptr::null_mut()) };
    /// How the running fiber gives way.
    static YIELDER: Cell<*const Yielder<(), ()>> = const { Cell::new(ptr::null()) };
}

/// Makes a machine the one that kernels on this thread speak to. It stays so until the next call.
pub(crate) fn attach(machine: *mut Machine<'_>) {
    CURRENT.set(machine.cast());
}

/// How the fiber about to run gives way.
pub(crate) fn set_yielder(yielder: *const Yielder<(), ()>) {
    YIELDER.set(yielder);
}

/// One step of the model. A fault is kept, and the launcher never resumes the fiber.
fn step<R: Default>(act: impl FnOnce(&mut Machine<'static>) -> Result<R, Fault>) -> R {
    // SAFETY: see the module documentation.
    let machine = unsafe { &mut *CURRENT.get() };
    match act(machine) {
        Ok(value) => value,
        Err(fault) => {
            machine.fault.get_or_insert(fault);
            R::default()
        }
    }
}

/// Gives way while the running thread waits, or forever after a fault.
fn rest() {
    // SAFETY: see the module documentation; the borrow ends with the statement.
    if unsafe { (*CURRENT.get()).stopped() } {
        let yielder = YIELDER.get();
        // SAFETY: set by the launcher to the fiber's own before it was resumed.
        unsafe { (*yielder).suspend(()) };
    }
}

fn site(machine: &Machine<'_>, site: Site) -> u32 {
    machine.setup.library.site(site as u64)
}

// Plain accesses wait for nothing, but after a fault they must not happen.

unsafe extern "C-unwind" fn read(p: *const c_void, bytes: u64, alignment: u64, at: Site) {
    step(|m| {
        m.touch(
            p as u64,
            bytes as usize,
            alignment,
            Access::Read,
            site(m, at),
        )
    });
    rest();
}

unsafe extern "C-unwind" fn write(p: *const c_void, bytes: u64, alignment: u64, at: Site) {
    step(|m| {
        m.touch(
            p as u64,
            bytes as usize,
            alignment,
            Access::Write,
            site(m, at),
        )
    });
    rest();
}

unsafe extern "C-unwind" fn misaligned(p: *const c_void, alignment: u64, at: Site) {
    step(|m| m.misaligned::<()>(p as u64, alignment, site(m, at)));
    rest();
}

unsafe extern "C-unwind" fn index(which: u32, out: *mut Index) {
    let [x, y, z] = step(|m| {
        Ok(match which {
            0 => [m.current as u32, 0, 0],
            1 => m.block,
            2 => [m.setup.threads, 1, 1],
            _ => m.setup.blocks,
        })
    });
    // SAFETY: a local variable of the caller.
    unsafe { out.write(Index { x, y, z }) };
}

unsafe extern "C-unwind" fn shared() -> *mut u8 {
    step(|m| Ok(m.shared.base() as usize)) as *mut u8
}

unsafe extern "C-unwind" fn sync_threads(at: Site) {
    step(|m| {
        m.sync_threads(site(m, at));
        Ok(())
    });
    rest();
}

fn collective(what: Collective, value: u32, operand: u32, addresses: [u64; 3], at: Site) -> u32 {
    step(|m| {
        m.collective(Call {
            what,
            value,
            operand,
            at: addresses,
            site: site(m, at),
        })
    });
    rest();
    step(|m| Ok(m.threads[m.current].result))
}

unsafe extern "C-unwind" fn sync_warp(at: Site) {
    collective(Collective::Sync, 0, 0, [0; 3], at);
}

unsafe extern "C-unwind" fn named_barrier(id: u32, threads: u32, wait: u32, at: Site) {
    step(|m| m.named_barrier(id, threads, wait != 0, site(m, at)));
    rest();
}

unsafe extern "C-unwind" fn exchange(kind: u32, value: u32, operand: u32, at: Site) -> u32 {
    collective(Collective::Exchange(kind), value, operand, [0; 3], at)
}

unsafe extern "C-unwind" fn atomic(
    kind: u32,
    p: *mut u32,
    value: u32,
    expected: u32,
    at: Site,
) -> u32 {
    let before = step(|m| m.atomic(kind, p as u64, value, expected, site(m, at)));
    rest();
    before
}

unsafe extern "C-unwind" fn fence(kind: u32, _: Site) {
    step(|m| {
        match kind {
            0 => m.thread_fence(),
            1 => m.mbar_fence_init(),
            2 => m.fence_async(),
            3 => m.fence_async_global(),
            _ => m.wgmma_fence(),
        }
        Ok(())
    });
}

unsafe extern "C-unwind" fn load_acquire(p: *const u32, at: Site) -> u32 {
    let value = step(|m| m.load_acquire(p as u64, site(m, at)));
    rest();
    value
}

unsafe extern "C-unwind" fn store_release(p: *mut u32, value: u32, at: Site) {
    step(|m| m.store_release(p as u64, value, site(m, at)));
    rest();
}

unsafe extern "C-unwind" fn cp_async(to: *mut c_void, from: *const c_void, valid: u32, at: Site) {
    step(|m| m.cp_async(to as u64, from as u64, valid, site(m, at)));
    rest();
}

/// Engines as numbered in the prelude: 0 cp.async, 1 bulk copies, 2 their reads, 3 wgmma.
unsafe extern "C-unwind" fn commit(engine: u32, _: Site) {
    step(|m| {
        match engine {
            0 => m.cp_async_commit(),
            1 => m.bulk_commit(),
            _ => m.wgmma_commit(),
        }
        Ok(())
    });
}

unsafe extern "C-unwind" fn wait(engine: u32, groups: u32, at: Site) {
    match engine {
        0 => {
            step(|m| m.cp_async_wait(groups as usize));
            rest();
        }
        1 | 2 => until(|m| Ok(m.bulk_wait(groups as usize, engine == 2, site(m, at)))),
        _ => {
            collective(Collective::WgmmaWait(groups), 0, 0, [0; 3], at);
        }
    }
}

/// Asks until the answer is yes.
fn until(ask: impl Fn(&mut Machine<'static>) -> Result<bool, Fault>) {
    loop {
        let done = step(&ask);
        rest();
        if done {
            return;
        }
    }
}

unsafe extern "C-unwind" fn ldmatrix(
    r: *mut u32,
    row: *const c_void,
    matrices: u32,
    transposed: u32,
    at: Site,
) {
    let transposed = transposed != 0;
    let what = Collective::LoadMatrix {
        matrices,
        transposed,
    };
    collective(what, 0, 0, [r as u64, row as u64, 0], at);
}

unsafe extern "C-unwind" fn stmatrix(
    row: *mut c_void,
    r: *const u32,
    matrices: u32,
    transposed: u32,
    at: Site,
) {
    let transposed = transposed != 0;
    let what = Collective::StoreMatrix {
        matrices,
        transposed,
    };
    collective(what, 0, 0, [r as u64, row as u64, 0], at);
}

unsafe extern "C-unwind" fn mma(d: *mut f32, a: *const u32, b: *const u32, at: Site) {
    collective(Collective::Mma, 0, 0, [d as u64, a as u64, b as u64], at);
}

unsafe extern "C-unwind" fn mbar_init(barrier: *mut u64, arrivals: u32, at: Site) {
    step(|m| m.mbar_init(barrier as u64, arrivals, site(m, at)));
    rest();
}

unsafe extern "C-unwind" fn mbar_arrive(barrier: *mut u64, bytes: u32, at: Site) {
    step(|m| m.mbar_arrive(barrier as u64, bytes, site(m, at)));
    rest();
}

unsafe extern "C-unwind" fn mbar_wait(
    barrier: *mut u64,
    parity: u32,
    until_done: u32,
    at: Site,
) -> u32 {
    let ask = |m: &mut Machine<'static>| {
        m.mbar_wait(barrier as u64, parity, until_done != 0, site(m, at))
    };
    if until_done != 0 {
        until(ask);
        return 1;
    }
    let done = step(ask);
    rest();
    u32::from(done)
}

unsafe extern "C-unwind" fn tma(
    kind: u32,
    rank: u32,
    shared: *const c_void,
    map: *const [u64; 16],
    barrier: *mut u64,
    coordinates: *const i32,
    at: Site,
) {
    // SAFETY: the prelude passes as many coordinates as the rank says, and the address of a tensor map
    // that is a parameter of the kernel.
    let (coordinates, map) = unsafe {
        (
            std::slice::from_raw_parts(coordinates, rank as usize),
            &*map,
        )
    };
    step(|m| {
        m.bulk_copy(
            kind,
            shared as u64,
            map,
            barrier as u64,
            coordinates,
            site(m, at),
        )
    });
    rest();
}

unsafe extern "C-unwind" fn wgmma(
    shape: u32,
    d: *mut f32,
    a: u64,
    a_registers: *const u32,
    b: u64,
    accumulate: u32,
    at: Site,
) {
    step(|m| {
        m.wgmma(&Issue {
            shape,
            d: d as u64,
            a,
            a_registers: a_registers as u64,
            b,
            accumulate: accumulate != 0,
            site: site(m, at),
        })
    });
    rest();
}

unsafe extern "C-unwind" fn registers(_: u32, _: u32, at: Site) {
    collective(Collective::Registers, 0, 0, [0; 3], at);
}
