//! Runs a grid: blocks one at a time in random order, every thread of a block a fiber.
//!
//! # Why this is sound
//!
//! A fiber runs a kernel compiled from sources of `kernels` or of a test with the arguments that its
//! own signature was checked against. Fibers never leave the thread that launched them. One that a
//! fault stops is abandoned: its stack holds frames of the kernel (plain data) and of `abi`, which
//! hold nothing to drop while they give way.
#![expect(
    unsafe_code,
    reason = "calls compiled kernels and abandons their fibers; see the module documentation"
)]

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use corosensei::stack::{DefaultStack, Stack};
use corosensei::{Coroutine, CoroutineResult, Yielder};

use crate::abi;
use crate::compile::Kernel;
use crate::fault::Fault;
use crate::machine::Machine;
use crate::random::Random;

/// Bytes of a fiber's stack: accumulators and arrays of one thread, many times over.
const STACK_BYTES: usize = 256 << 10;

/// Stacks for reuse, by whatever thread launches next: to map one costs more than most fibers run. As many stay as ran
/// at once.
static STACKS: Mutex<Vec<DefaultStack>> = Mutex::new(Vec::new());

fn stacks() -> MutexGuard<'static, Vec<DefaultStack>> {
    STACKS.lock().unwrap_or_else(PoisonError::into_inner)
}

type Fiber = Coroutine<(), (), (), DefaultStack>;

/// Runs all blocks. `arguments` point to values of the sizes that the kernel says.
pub(crate) fn run(
    machine: &mut Machine<'_>,
    kernel: &Kernel,
    arguments: &[*mut c_void],
) -> Result<(), Fault> {
    let [x, y, z] = machine.setup.blocks;
    let count = x as usize * y as usize * z as usize;
    let mut order: Vec<usize> = (0..count).collect();
    for i in (1..count).rev() {
        order.swap(i, machine.random.below(i + 1));
    }
    for (turn, &block) in order.iter().enumerate() {
        let block = block as u32;
        machine.start([block % x, block / x % y, block / x / y], turn == 0);
        run_block(machine, kernel, arguments)?;
    }
    Ok(())
}

fn run_block(
    machine: &mut Machine<'_>,
    kernel: &Kernel,
    arguments: &[*mut c_void],
) -> Result<(), Fault> {
    let (run, arguments) = (kernel.run, arguments.as_ptr().cast_mut());
    let mut yielders = vec![std::ptr::null(); machine.threads.len()];
    let yielders: *mut *const Yielder<(), ()> = yielders.as_mut_ptr();
    let mut fibers: Vec<Option<Fiber>> = Vec::with_capacity(machine.threads.len());
    let mut spare = {
        let mut stacks = stacks();
        let left = stacks.len().saturating_sub(machine.threads.len());
        stacks.split_off(left)
    };
    for number in 0..machine.threads.len() {
        let stack = spare.pop();
        let stack =
            stack.unwrap_or_else(|| DefaultStack::new(STACK_BYTES).expect("memory for a stack"));
        machine.threads[number].stack = stack.limit().get() as u64..stack.base().get() as u64;
        machine.wake(number);
        fibers.push(Some(Coroutine::with_stack(stack, move |yielder, ()| {
            abi::set_yielder(yielder);
            // SAFETY: one place a thread, alive as long as the fibers are.
            unsafe { yielders.add(number).write(yielder) };
            // SAFETY: the arguments have the types of the kernel's parameters.
            unsafe { run(arguments) };
        })));
    }
    // From here on the machine is reached by this pointer alone, here and from the fibers.
    let machine: *mut Machine<'_> = machine;
    abi::attach(machine);
    // SAFETY: no fiber runs while this borrow lives.
    while let Some(number) = unsafe { (*machine).choose() } {
        // SAFETY: as above; set once the fiber has started.
        abi::set_yielder(unsafe { *yielders.add(number) });
        let fiber = &mut fibers[number];
        let Some(running) = fiber else {
            unreachable!("a thread that has returned is not chosen")
        };
        if let CoroutineResult::Return(()) = running.resume(()) {
            let stack = fiber.take().expect("it just ran").into_stack();
            spare.push(stack);
            // SAFETY: as above.
            let machine = unsafe { &mut *machine };
            if let Err(fault) = machine.exit() {
                machine.fault.get_or_insert(fault);
            }
        }
    }
    for mut fiber in fibers.into_iter().flatten() {
        // SAFETY: see the module documentation.
        unsafe { fiber.force_reset() };
        spare.push(fiber.into_stack());
    }
    stacks().append(&mut spare);
    // SAFETY: no fiber is left.
    let machine = unsafe { &mut *machine };
    machine.fault.take().map_or_else(|| machine.finish(), Err)
}

/// The dice of the launch of this number.
pub(crate) fn dice(seed: u64, number: u64) -> Random {
    Random::new(seed, number)
}
