//! Which parts a check has, and in what order.

use moefold_kernels::Dtype;
use moefold_kernels::check::{self, Sizes};

use crate::Options;
use crate::part::{CEILINGS, HARDWARE, Part, stem};

/// Whether an op or a trial was asked for.
pub(crate) fn is_wanted(name: &str, options: &Options) -> bool {
    options.only.is_empty() || options.only.iter().any(|only| name.contains(only))
}

/// Parts in the order of what matters: right at small sizes, right at real ones, then how fast.
pub(crate) fn parts(options: &Options) -> Vec<Part> {
    let special = |op: &str| Part {
        sizes: "-".to_owned(),
        dtype: Dtype::Bf16,
        op: op.to_owned(),
        timed: op == CEILINGS,
        skip: Vec::new(),
    };
    let mut parts = Vec::new();
    let dies = options.dies.as_deref() == Some(HARDWARE);
    if dies || (!options.rehearse && options.only.is_empty()) {
        parts.push(special(HARDWARE));
    }
    if !options.small {
        parts.push(special(CEILINGS));
    }
    let mut ask = |sizes: &Sizes, dtype, timed| {
        let all = Part {
            sizes: sizes.name.to_owned(),
            dtype,
            op: String::new(),
            timed,
            skip: Vec::new(),
        };
        for op in stems(sizes, dtype) {
            if is_wanted(&op, options) {
                parts.push(Part { op, ..all.clone() });
            }
        }
    };
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for sizes in Sizes::small() {
            ask(&sizes, dtype, false);
        }
    }
    if options.small {
        return parts;
    }
    for timed in [false, true] {
        for sizes in options.real_sizes() {
            ask(&sizes, Dtype::Bf16, timed);
        }
    }
    parts
}

/// The ops that have cases at these sizes.
pub(crate) fn stems(sizes: &Sizes, dtype: Dtype) -> Vec<String> {
    let mut stems: Vec<String> = Vec::new();
    for case in check::cases(sizes, dtype) {
        let stem = stem(&case);
        if !stems.iter().any(|known| known == stem) {
            stems.push(stem.to_owned());
        }
    }
    stems
}
