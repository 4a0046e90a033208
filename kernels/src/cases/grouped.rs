//! Products of experts, by counts on the host.

use std::rc::Rc;

use moefold_profiles::Pass;

use super::{Call, Source};
use crate::grouped_gemm;

/// The product of `counts` rows of each expert with its `[n, k]`; both are the forward product's.
pub(crate) fn grouped(
    source: &mut dyn Source,
    counts: Rc<[usize]>,
    [n, k]: [usize; 2],
    pass: Pass,
) -> Call {
    let rows = counts.iter().sum();
    let weights = [counts.len(), n, k];
    match pass {
        Pass::Forward => {
            let (x, w) = (
                source.tensor(&[rows, k], 1.0),
                source.tensor(&weights, 0.02),
            );
            Call::new(move |out| out("y", &grouped_gemm::forward(&x, &w, &counts)))
        }
        Pass::Dgrad | Pass::Backward => {
            let (dy, w) = (
                source.tensor(&[rows, n], 1.0),
                source.tensor(&weights, 0.02),
            );
            Call::new(move |out| out("dx", &grouped_gemm::dgrad(&dy, &w, &counts)))
        }
        Pass::Wgrad => {
            let (dy, x) = (
                source.tensor(&[rows, n], 1.0),
                source.tensor(&[rows, k], 1.0),
            );
            let dw = source.statistic(&weights, 1.0);
            Call::new(move |out| {
                grouped_gemm::wgrad(&dy, &x, &counts, &dw);
                out("dw", &dw);
            })
        }
    }
}
