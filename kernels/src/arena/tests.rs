//! The arena on both kinds of CUDA device there are without a GPU: the driver that is a mock, which
//! divides its memory, and the emulator, which does not.

use std::cell::Cell;
use std::rc::Rc;

use super::*;
use crate::cuda::Stream;
use crate::cuda::error::catch;
use crate::cuda::gpu::tests::mock::Mock;
use crate::cuda::gpu::tests::{IMAGE, device as on_mock};
use crate::emulated::emulated;
use crate::testing::Rng;
use crate::{Device, Dtype, Tensor};

fn floats(device: &Device, bytes: u64) -> Tensor {
    device.empty(TensorClass::Activations, Dtype::F32, &[bytes as usize / 4])
}

/// Both kinds, where they are at hand; contents are of no interest.
fn devices() -> Option<(Mock, [Device; 2])> {
    let mock = Mock::driver()?;
    let devices = [on_mock(mock, IMAGE), emulated(1).pop()?];
    for device in &devices {
        device.poison(false);
    }
    Some((mock, devices))
}

#[test]
fn law_an_emulator_takes_slabs_as_a_gpu_does() {
    let Some((mock, devices)) = devices() else {
        return;
    };
    let mut rng = Rng::new(11);
    let mut tensors = devices.each_ref().map(|_| Vec::new());
    for step in 0..400 {
        let (action, octave) = (rng.size(0..=19), rng.size(3..=21));
        let bytes = rng.size(0..=1 << octave);
        let which = rng.size(0..=1 << 20);
        for (device, tensors) in devices.iter().zip(&mut tensors) {
            match action {
                0 => device.trim(),
                1 => device.beside(Stream::Copies, || ()),
                2 => device.join(Stream::Copies),
                3 if step > 300 => device.reserve(Bytes(30 * MIB)).expect("room"),
                3..10 if !tensors.is_empty() => drop(tensors.swap_remove(which % tensors.len())),
                _ => tensors.push(floats(device, bytes as u64)),
            }
        }
        let seen = |device: &Device| {
            let [reserved, extent] = [device.reserved(), device.extent()];
            (device.allocations(), reserved, extent, device.cached())
        };
        assert_eq!(seen(&devices[0]), seen(&devices[1]), "step {step}");
        let memory = devices[0].memory();
        assert!(memory.live_total() + devices[0].cached() <= devices[0].reserved());
    }
    assert!(devices[0].allocations() > 3, "it grew");
    for (device, tensors) in devices.iter().zip(tensors) {
        device.synchronize();
        drop(tensors);
        assert_eq!(device.cached(), device.reserved());
        device.trim();
        assert_eq!(device.reserved(), Bytes::ZERO);
    }
    drop(devices);
    mock.assert_clean();
}

#[test]
fn law_tensors_that_fit_into_what_was_reserved_take_nothing_more() {
    let Some((mock, devices)) = devices() else {
        return;
    };
    for device in &devices {
        device.reserve(Bytes(10 * MIB)).expect("room");
        assert_eq!(
            (device.reserved(), device.allocations()),
            (Bytes(10 * MIB), 1)
        );
        // Whatever the sizes: no two of the same.
        for round in 0..40 {
            let sizes = [5 * MIB + 1000 * round, 3 * MIB - 70 * round, 1 + round];
            let tensors = sizes.map(|bytes| floats(device, bytes));
            drop(tensors);
        }
        assert_eq!(
            (device.reserved(), device.allocations()),
            (Bytes(10 * MIB), 1)
        );
        // What is reserved already is not taken again.
        device.reserve(Bytes(9 * MIB)).expect("room");
        assert_eq!(device.allocations(), 1);
        device.reserve(Bytes(13 * MIB)).expect("room");
        assert_eq!(
            (device.reserved(), device.allocations()),
            (Bytes(14 * MIB), 2)
        );
        // Two pieces: neither holds this.
        let large = floats(device, 11 * MIB);
        assert_eq!(
            (device.reserved(), device.allocations()),
            (Bytes(26 * MIB), 3)
        );
        drop(large);
    }
    drop(devices);
    mock.assert_clean();
}

#[test]
fn what_is_freed_beside_a_queue_is_given_out_after_the_join() {
    let Some((mock, devices)) = devices() else {
        return;
    };
    for device in &devices {
        let first = floats(device, 4096);
        let place = first.address();
        device.beside(Stream::Communication, || ());
        drop(first);
        let second = floats(device, 4096);
        assert_ne!(second.address(), place);
        device.join(Stream::Communication);
        assert_eq!(floats(device, 4096).address(), place);
    }
    drop(devices);
    mock.assert_clean();
}

#[test]
fn where_memory_runs_out_slabs_without_tensors_are_given_back_first() {
    let Some((mock, [device, emulated])) = devices() else {
        return;
    };
    drop(floats(&device, 20 * MIB));
    let held = floats(&device, MIB);
    device.reserve(Bytes(60 * MIB)).expect("room");
    mock.fail(1, 2, "cuMemAlloc_v2");
    let large = floats(&device, 50 * MIB);
    // The slab of 40 MiB went, the one in use stayed.
    assert_eq!(
        (device.reserved(), device.allocations()),
        (Bytes(70 * MIB), 3)
    );
    drop(large);
    let error = catch(|| floats(&device, 3 << 30)).expect_err("it does not fit");
    assert_eq!(
        error.to_string(),
        "cuMemAlloc_v2 failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): asked for 3.00 GiB, 0.98 GiB of \
         4.00 GiB is free; this rank has taken 20.00 MiB so far, of which 19.00 MiB is free in pieces \
         of at most 19.00 MiB; its tensors hold 1.00 MiB"
    );
    let error = device.reserve(Bytes(3 << 30)).expect_err("it does not fit");
    assert!(error.to_string().contains("asked for 2.98 GiB"), "{error}");
    let error = catch(|| floats(&emulated, 5 << 30)).expect_err("it does not fit");
    let said = error.to_string();
    assert!(
        said.contains("asked for 5.00 GiB, 4.00 GiB of 4.00 GiB is free; this rank has taken 0 B"),
        "{said}"
    );
    // What fails otherwise is not tried again, and is no matter of memory.
    drop(floats(&device, 10 * MIB));
    let (reserved, before) = (device.reserved(), mock.said().len());
    mock.fail(1, 700, "cuMemAlloc_v2");
    let error = catch(|| floats(&device, 50 * MIB)).expect_err("it fails");
    assert!(!error.to_string().contains("taken"), "{error}");
    assert_eq!(mock.said()[before..].matches("cuMemAlloc_v2").count(), 1);
    assert_eq!(device.reserved(), reserved);
    drop((held, device));
    mock.assert_clean();
}

/// The driver's own wait, which comes with it, has no end.
#[test]
fn slabs_are_given_back_once_whoever_watches_the_hosts_waits_lets_it() {
    let Some((mock, [device, _])) = devices() else {
        return;
    };
    drop(floats(&device, 20 * MIB));
    let stuck = Rc::new(Cell::new(true));
    let is_stuck = Rc::clone(&stuck);
    device.wait_by(move |_| {
        if is_stuck.get() {
            DeviceError::new("wait_by", "too long").raise()
        }
    });
    mock.fail(1, 2, "cuMemAlloc_v2");
    for error in [
        catch(|| drop(floats(&device, 50 * MIB))).expect_err("it waits"),
        catch(|| device.trim()).expect_err("it waits"),
    ] {
        assert_eq!(error.call, "wait_by");
    }
    assert!(!mock.said().contains("cuMemFree_v2"), "{}", mock.said());
    stuck.set(false);
    device.trim();
    assert_eq!(device.reserved(), Bytes::ZERO);
    drop(device);
    mock.assert_clean();
}
