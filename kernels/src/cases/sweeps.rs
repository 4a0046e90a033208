//! Passes over memory that no other op names.

use moefold_profiles::{Dtype, SweepKind};

use super::{Call, Source};
use crate::device::TensorClass;
use crate::grouped_gemm::Rows;
use crate::scalars::{Factor, Scalars};
use crate::tensor::Tensor;
use crate::{cross_entropy, elementwise, expert_bias, gate, merge, permute, rows};

/// Experts that slots are sorted by.
const EXPERTS: usize = 8;

pub(super) fn sweep(source: &mut dyn Source, kind: SweepKind, len: usize, dtype: Dtype) -> Call {
    match kind {
        SweepKind::Sort => {
            let ids = source.ids(&[len, 1], EXPERTS);
            Call::new(move |_| drop(permute::map(&ids, EXPERTS)))
        }
        SweepKind::Limit => {
            let ids = source.ids(&[len, 1], EXPERTS);
            let probs = source.statistic(&[len, 1], 1.0);
            let map = permute::map(&ids, EXPERTS);
            let capacity = len.div_ceil(EXPERTS);
            Call::new(move |out| {
                let kept = permute::limit(&ids, &map, capacity, Some(&probs));
                out("kept", &kept);
            })
        }
        SweepKind::Fill => {
            let x = source.tensor(&[len], 1.0);
            Call::new(move |_| elementwise::fill(&x, 1.0))
        }
        SweepKind::Copy => {
            let [x, y] = [(); 2].map(|()| match dtype {
                Dtype::I32 => source.ids(&[len], EXPERTS),
                _ => source.tensor(&[len], 1.0),
            });
            Call::new(move |out| {
                elementwise::copy(&x, &y);
                out("y", &y);
            })
        }
        SweepKind::Scale => {
            let x = source.tensor(&[len], 1.0);
            Call::new(move |_| elementwise::scale(&x, 1.0))
        }
        SweepKind::Sum => {
            let x = source.tensor(&[len], 1.0);
            let sum = Scalars::zeros(source.device(), TensorClass::Transient, 1);
            Call::new(move |_| sum.add_sum(0, 1e-6, &x))
        }
        SweepKind::SumExp => {
            let logits = logits(source, len);
            Call::new(move |out| {
                let own = cross_entropy::row_statistics(&logits);
                out("top", &own.top);
                out("sum_exp", &own.sum_exp);
            })
        }
        SweepKind::Gather => {
            let x = source.tensor(&[len, 1], 1.0);
            let index = source.ids(&[len], len.max(1));
            Call::new(move |out| out("y", &rows::gather(&x, &index)))
        }
        SweepKind::Chunks => {
            let x = source.tensor(&[len, 1], 1.0);
            let halves = [len / 2..len, 0..len / 2].into_iter().collect();
            Call::new(move |out| out("y", &rows::gather_chunks(&x, &halves)))
        }
        SweepKind::Gate => {
            let [x, y] = [(); 2].map(|()| source.tensor(&[len, 1], 1.0));
            let logits = source.statistic(&[len, 1], 1.0);
            Call::new(move |out| {
                gate::add(&x, &logits, &y);
                out("y", &y);
            })
        }
        SweepKind::Merge => {
            let width = [128, 64, 16, 4]
                .into_iter()
                .find(|&w| len.is_multiple_of(w));
            let width = width.unwrap_or(1);
            let [part, o] = [(); 2].map(|()| source.tensor(&[len / width, 1, width], 1.0));
            let [part_lse, lse] = [(); 2].map(|()| source.statistic(&[1, len / width], 1.0));
            Call::new(move |out| {
                merge::merge(&part, &part_lse, 0, &o, &lse);
                out("o", &o);
                out("lse", &lse);
            })
        }
        SweepKind::ExpertBias => {
            let (y, bias) = (source.tensor(&[len, 1], 1.0), source.tensor(&[1, 1], 1.0));
            Call::new(move |out| {
                expert_bias::add(&y, &bias, None, Rows::Counts(&[len]));
                out("y", &y);
            })
        }
        SweepKind::Clip => {
            let square = Scalars::zeros(source.device(), TensorClass::Transient, 1);
            Call::new(move |_| drop(Factor::clipped(&square, 0, 1.0, Some(1.0))))
        }
    }
}

/// So many logits, in rows as wide as a vocabulary where there are enough.
fn logits(source: &mut dyn Source, len: usize) -> Tensor {
    let width = len.clamp(1, super::rows::VOCAB);
    source.tensor(&[len / width, width], 4.0)
}
