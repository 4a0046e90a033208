//! Tests of what a device tells of itself.

use moefold_kernels::Device;

use crate::support::emulated;

#[test]
fn only_a_gpu_tells_of_its_memory() {
    for device in [Some(Device::cpu(1)), emulated(1).pop()]
        .into_iter()
        .flatten()
    {
        assert_eq!((device.memory_info(), device.overhead()), (None, None));
    }
}
