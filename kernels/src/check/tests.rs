//! Tests of the cases: they agree with themselves, and a wrong result is found.

use super::*;
use crate::testing::emulated;

#[test]
fn every_case_agrees_with_its_twin_on_every_device_of_a_test() {
    let twin = Device::cpu(1);
    let mut devices = emulated(1);
    devices.push(Device::cpu(2));
    for device in devices {
        for sizes in Sizes::small() {
            for case in cases(&sizes, device.dtype()) {
                let verdicts = crate::catch(|| agrees(&case, &device, &twin, 7))
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

#[test]
fn a_wrong_output_does_not_pass() {
    let device = Device::cpu(1);
    let written = |values: &[f32]| {
        let tensor = device.from_f32(TensorClass::Activations, values, &[values.len()]);
        Written::new("y", &tensor)
    };
    let integers = |values: &[i32]| {
        let tensor = device.from_i32(TensorClass::Activations, values, &[values.len()]);
        Written::new("ids", &tensor)
    };
    let passes = |got: &Written, want: &Written| verdict(got, want, Dtype::F32).passes();
    let want = written(&[1.0, 2.0, 3.0]);
    assert!(passes(&written(&[1.0, 2.0, 3.0]), &want));
    assert!(!passes(&written(&[1.0, 2.0, 3.001]), &want));
    assert!(!passes(&written(&[1.0, f32::NAN, 3.0]), &want));
    assert!(!passes(&integers(&[1, 2, 4]), &integers(&[1, 2, 3])));
}

#[test]
fn one_wrong_row_of_many_does_not_pass() {
    let rows = 100_000;
    let want: Vec<f64> = vec![1.0; 8 * rows];
    let mut got = want.clone();
    got[80..88].fill(0.0);
    let (error, worst_row) = distance(&got, &want, 8);
    assert!(error <= 1e-2, "{error}: the norm of all hardly moves");
    assert!((worst_row - 1.0).abs() < 1e-9, "{worst_row}");
    got[80] = f64::NAN;
    assert!(distance(&got, &want, 8).1.is_nan());
}
