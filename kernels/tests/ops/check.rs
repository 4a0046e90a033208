//! The cases that a GPU is checked with agree with themselves.

use moefold_kernels::check::{Sizes, agrees, cases};
use moefold_kernels::{Device, catch};

use crate::support::emulated;

#[test]
fn every_case_agrees_with_its_twin_on_every_device_of_a_test() {
    let reference = Device::cpu(1);
    let mut devices = emulated(1);
    devices.push(Device::cpu(2));
    for device in devices {
        for sizes in Sizes::small() {
            for case in cases(&sizes, device.dtype()) {
                if !case.is_for(&device) {
                    continue;
                }
                let verdicts = catch(|| agrees(&case, &device, &reference, 7))
                    .unwrap_or_else(|error| panic!("{} on {device:?}: {error}", case.name));
                assert!(!verdicts.is_empty(), "{}: nothing was compared", case.name);
                for verdict in verdicts {
                    let (name, sizes) = (&case.name, sizes.name);
                    assert!(verdict.passes(), "{name} {sizes} on {device:?}: {verdict}");
                }
            }
        }
    }
}
