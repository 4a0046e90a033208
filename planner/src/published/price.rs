//! [`price`]: what is predicted for a row, with everything pinned that its source states.

use moefold_profiles::pricing::Costs;
use moefold_profiles::{Profile, TensorClass};
use rayon::prelude::*;

use super::row::Row;
use crate::options::PlanError;
use crate::plan::{PlannedLayout, Predicted};
use crate::search::{self, Asked};
use crate::stack::Stack;
use crate::stack::megatron::Declared;

/// What is said of a row.
#[derive(Debug, Clone, PartialEq)]
pub enum Priced {
    /// It fits.
    Fits(Box<PlannedLayout>),
    /// It needs more memory than a device has, even without the fragments of an allocator that plans count: PyTorch's
    /// loses next to none where its segments expand (`expandable_segments`). Priced as though the device had it.
    TooLarge(Box<PlannedLayout>),
    /// No such layout can be planned, and why.
    Refused(String),
}

impl Priced {
    /// The plan, whether or not it fits.
    pub fn plan(&self) -> Option<&PlannedLayout> {
        match self {
            Self::Fits(plan) | Self::TooLarge(plan) => Some(plan),
            Self::Refused(_) => None,
        }
    }

    /// What the framework's allocator would count, GiB: all but context and communicators.
    pub fn allocated_gib(&self) -> Option<f64> {
        self.plan().map(|plan| allocated_gib(&plan.predicted))
    }
}

fn allocated_gib(predicted: &Predicted) -> f64 {
    predicted.peak_gib - predicted.memory_gib[TensorClass::Overhead]
}

/// Prices one row, as Megatron-Core is declared.
pub fn price(row: &Row, profiles: &[Profile]) -> Priced {
    let costs = Costs::for_cluster(&row.cluster, profiles);
    let plan = |cluster| {
        let (model, options) = (&row.model, &row.options);
        let asked = Asked::new(model, cluster, row.gpus, options, &costs, &Declared);
        let found = search::plan_briefly(&asked);
        found.map(|mut found| Box::new(found.plans.remove(0)))
    };
    let refused = |error: PlanError| Priced::Refused(error.to_string());
    match plan(&row.cluster) {
        Ok(found) => Priced::Fits(found),
        Err(PlanError::Infeasible { .. }) => {
            let mut larger = row.cluster.clone();
            larger.gpu.memory_gib = search::ENDLESS_GIB;
            plan(&larger).map_or_else(refused, |found| {
                let lost = Stack::of(row.options.stack).fragmentation();
                let lost = allocated_gib(&found.predicted) * lost;
                if found.predicted.peak_gib - lost > row.cluster.gpu.memory_gib {
                    Priced::TooLarge(found)
                } else {
                    Priced::Fits(found)
                }
            })
        }
        Err(error) => refused(error),
    }
}

/// Prices rows, in their order.
pub fn price_all(rows: &[Row], profiles: &[Profile]) -> Vec<Priced> {
    rows.par_iter().map(|row| price(row, profiles)).collect()
}
