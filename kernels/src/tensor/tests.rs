//! Tests of tensors: views, bounds, transfers.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;
use crate::elementwise::{add, add_into, copy};
use crate::testing::tensor;

/// The message of the panic that `body` must end in.
fn refusal(body: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(body)).expect_err("refused");
    panic
        .downcast_ref::<String>()
        .cloned()
        .expect("with a message")
}

#[test]
fn law_views_are_of_the_same_memory() {
    let device = Device::cpu(1);
    let t = tensor(&device, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], &[3, 2]);
    let row = t.rows(1..2);
    assert_eq!(row.dims(), [1, 2]);
    row.copy_from_f32(&[7.0, 8.0]);
    assert_eq!(t.to_f32(), [0.0, 1.0, 7.0, 8.0, 4.0, 5.0]);
    assert_eq!(t.reshape(&[2, 3]).rows(1..2).to_f32(), [8.0, 4.0, 5.0]);
    assert!(t.overlaps(&row) && !t.rows(0..1).overlaps(&row));
    assert!(t.rows(3..3).is_empty());
}

#[test]
fn law_an_output_that_overlaps_is_refused() {
    let device = Device::cpu(1);
    let t = tensor(&device, &[1.0; 6], &[6]);
    assert!(refusal(|| add_into(&t.view(0, &[4]), &t.view(2, &[4]))).contains("overlaps"));
    add_into(&t.view(0, &[3]), &t.view(3, &[3]));
    copy(&t, &t);
    assert_eq!(t.to_f32(), [2.0, 2.0, 2.0, 1.0, 1.0, 1.0]);
    // Inputs may be the same memory.
    assert_eq!(add(&t, &t).to_f32()[0], 4.0);
}

#[test]
fn law_wrong_requests_are_refused_by_name() {
    let device = Device::cpu(1);
    let t = tensor(&device, &[1.0; 6], &[2, 3]);
    assert!(refusal(|| drop(t.rows(1..3))).contains("rows: 1..3 is not inside f32[2, 3]"));
    assert!(refusal(|| drop(t.view(4, &[3]))).contains("view: elements 4..7"));
    assert!(refusal(|| drop(t.reshape(&[7]))).contains("reshape: [7] has 7 elements"));
    assert!(refusal(|| drop(t.to_i32())).contains("expected an i32 tensor"));
    let other = tensor(&Device::cpu(1), &[1.0; 6], &[6]);
    assert!(refusal(|| add_into(&t, &other)).contains("several devices"));
    // The device is usable after a refusal.
    assert_eq!(t.to_f32(), [1.0; 6]);
}

#[test]
fn law_the_account_counts_what_is_alive() {
    let device = Device::cpu(1);
    let class = TensorClass::Activations;
    let a = device.zeros(class, Dtype::F32, &[10, 3]);
    let view = a.rows(2..4);
    assert_eq!(device.memory().live(class), Bytes(120));
    {
        let _b = device.empty(TensorClass::Logits, Dtype::I32, &[5]);
        assert_eq!(device.memory().live_total(), Bytes(140));
    }
    drop(a);
    assert_eq!(
        device.memory().live(class),
        Bytes(120),
        "a view keeps its buffer"
    );
    drop(view);
    let memory = device.memory();
    assert_eq!(
        (memory.live_total(), memory.peak_total()),
        (Bytes::ZERO, Bytes(140))
    );
    assert_eq!(memory.peak(TensorClass::Logits), Bytes(20));
    device.reset_peak();
    assert_eq!(device.memory().peak_total(), Bytes::ZERO);
    assert!(device.cached() >= Bytes(140));
    device.trim();
    assert_eq!(device.cached(), Bytes::ZERO);
}

#[test]
fn law_freed_memory_is_reused_and_zeros_are_zeros() {
    let device = Device::cpu(1);
    let a = tensor(&device, &[3.0; 1000], &[1000]);
    drop(a);
    let cached = device.cached();
    let b = device.zeros(TensorClass::Weights, Dtype::F32, &[990]);
    assert_eq!(device.cached(), Bytes::ZERO, "of {cached}");
    assert!(b.to_f32().iter().all(|&x| x == 0.0));
    device.poison(true);
    let c = device.empty(TensorClass::Weights, Dtype::F32, &[4]);
    assert!(c.to_f32().iter().all(|x| x.is_nan()));
}
