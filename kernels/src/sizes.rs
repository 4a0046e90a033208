//! Sizes that callers give, multiplied and summed with a check in every build.
//!
//! A release build lets arithmetic wrap. A size that wrapped would pass for a small one, and what is checked
//! against it would reach beyond its memory; so no size of a tensor, a matrix or a range of either is made
//! but here. It costs a few instructions a call, none an element.

/// Elements beyond which no tensor is: as many of eight bytes as an address space may hold in one piece.
const MOST: usize = isize::MAX as usize / 8;

/// Elements of `dims`, which are none where one of them is zero. The others have to make a size nevertheless, so
/// that no part of the product wraps either.
///
/// # Panics
/// When they are more than memory can hold.
#[track_caller]
pub(crate) fn elements(op: &str, dims: &[usize]) -> usize {
    let product = |all: usize, &dim: &usize| all.checked_mul(dim.max(1));
    let all = dims.iter().try_fold(1, product);
    match all.filter(|&all| all <= MOST) {
        None => panic!("{op}: {dims:?} are more elements than memory can hold"),
        Some(_) if dims.contains(&0) => 0,
        Some(all) => all,
    }
}

/// The sum of sizes.
///
/// # Panics
/// When it is more than memory can hold.
#[track_caller]
pub(crate) fn sum(op: &str, parts: impl IntoIterator<Item = usize>) -> usize {
    let mut parts = parts.into_iter();
    let all = parts.try_fold(0_usize, usize::checked_add);
    let all = all.filter(|&all| all <= MOST);
    all.unwrap_or_else(|| panic!("{op}: rows of more than memory can hold"))
}

#[cfg(test)]
mod tests {
    use std::panic::{self, AssertUnwindSafe};

    use super::*;
    use crate::device::{Device, TensorClass};
    use crate::matrix::{Matrix, MatrixMut};
    use crate::permute::{self, Room};
    use crate::{merge, rows};
    use moefold_profiles::Dtype;

    #[test]
    fn golden_sizes() {
        assert_eq!(elements("op", &[]), 1);
        assert_eq!(elements("op", &[3, 4, 5]), 60);
        assert_eq!(elements("op", &[3, 0, 5]), 0);
        assert_eq!(elements("op", &[MOST]), MOST);
        assert_eq!(sum("op", [3, 4, MOST - 7]), MOST);
    }

    /// What a call says that must not return.
    fn refused(call: impl FnOnce()) -> String {
        let payload = panic::catch_unwind(AssertUnwindSafe(call)).expect_err("refused");
        let said = payload.downcast_ref::<String>().cloned();
        said.unwrap_or_else(|| (*payload.downcast_ref::<&str>().expect("text")).to_owned())
    }

    /// Each of these wraps to a size that what was checked before found small enough.
    #[test]
    fn law_sizes_that_wrap_are_refused_by_name() {
        const HALF: usize = 1 << 32;
        let device = Device::cpu(1);
        let tensor = |dims: &[usize]| device.zeros(TensorClass::Transient, Dtype::F32, dims);
        let x = tensor(&[4, 2]);
        let none = tensor(&[0, 2]);
        let ids = device.from_i32(TensorClass::Transient, &[0, 1], &[1, 2]);
        let (part, lse) = (tensor(&[2, 1, 2]), tensor(&[1, 2]));
        let mut data = [0.0; 4];
        let calls: [(&str, &mut dyn FnMut()); 13] = [
            ("empty: [4294967296, 4294967296]", &mut || {
                device.empty(TensorClass::Transient, Dtype::F32, &[HALF, HALF]);
            }),
            ("empty: [4294967296, 4294967296, 0]", &mut || {
                device.empty(TensorClass::Transient, Dtype::F32, &[HALF, HALF, 0]);
            }),
            ("empty: [4611686018427387905]", &mut || {
                device.empty(TensorClass::Transient, Dtype::F32, &[(1 << 62) + 1]);
            }),
            (
                "view: elements 18446744073709551615..18446744073709551615",
                &mut || {
                    drop(x.view(usize::MAX, &[2]));
                },
            ),
            ("view: [4294967296, 4294967296]", &mut || {
                drop(x.view(0, &[HALF, HALF]));
            }),
            ("view: [9223372036854775808, 2]", &mut || {
                drop(none.view(0, &[1 << 63, 2]));
            }),
            ("reshape: [4294967296, 4294967296]", &mut || {
                drop(none.reshape(&[HALF, HALF]));
            }),
            ("matrix: [4294967296, 4294967296]", &mut || {
                Matrix::new(&[], HALF, HALF);
            }),
            ("matrix: [4611686018427387905, 4]", &mut || {
                MatrixMut::new(&mut data, (1 << 62) + 1, 4);
            }),
            ("rows::Chunks: rows of more", &mut || {
                rows::gather_chunks(&x, &[0..usize::MAX, 0..5].into_iter().collect());
            }),
            ("permute::map: [9223372036854775808, 2]", &mut || {
                permute::map_of(&ids, 0..2, Room::Each(1 << 63));
            }),
            ("merge::merge: rows of more", &mut || {
                merge::merge(&part, &lse, usize::MAX, &part, &lse);
            }),
            ("grouped_gemm: rows of more", &mut || {
                let w = tensor(&[3, 2, 2]);
                crate::grouped_gemm::forward(&x, &w, &[usize::MAX, 1, 4]);
            }),
        ];
        for (expected, call) in calls {
            let said = refused(call);
            assert!(said.starts_with(expected), "{said}: expected {expected}");
        }
    }
}
