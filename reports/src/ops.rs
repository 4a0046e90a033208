//! [`OpTime`]: busy time of an op or collective, predicted beside measured.

use std::collections::BTreeSet;

use crate::subject::Subject;

/// Busy seconds a step of the busiest rank, by what was expected and what was seen.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OpTime {
    /// Stem of the op or collective.
    pub(crate) name: String,
    /// Predicted, where the plan priced it.
    pub(crate) predicted: Option<f64>,
    /// Measured, where the run recorded it.
    pub(crate) measured: Option<f64>,
}

impl OpTime {
    /// Prediction over measurement, less one; where there are both.
    pub(crate) fn error(&self) -> Option<f64> {
        match (self.predicted, self.measured) {
            (Some(predicted), Some(measured)) if measured > 0.0 => Some(predicted / measured - 1.0),
            _ => None,
        }
    }

    /// Seconds by which the prediction is off; what only one side has counts in full.
    pub(crate) fn miss_s(&self) -> f64 {
        self.predicted.unwrap_or(0.0) - self.measured.unwrap_or(0.0)
    }

    fn longest(&self) -> f64 {
        let or_zero = |seconds: Option<f64>| seconds.unwrap_or(0.0);
        or_zero(self.predicted).max(or_zero(self.measured))
    }
}

/// The ops of a run, longest first; none where it did not run. What is zero on both sides is left
/// out.
pub(crate) fn of(subject: &Subject) -> Vec<OpTime> {
    let Some(measured) = &subject.measured else {
        return Vec::new();
    };
    let (predicted, measured) = (&subject.planned.predicted.busy_s, &measured.summary.busy_s);
    let names: BTreeSet<&String> = predicted.keys().chain(measured.keys()).collect();
    let mut ops: Vec<OpTime> = names
        .into_iter()
        .map(|name| OpTime {
            name: name.clone(),
            predicted: predicted.get(name).copied(),
            measured: measured.get(name).copied(),
        })
        .filter(|op| op.longest() > 0.0)
        .collect();
    ops.sort_by(|a, b| {
        b.longest()
            .total_cmp(&a.longest())
            .then_with(|| a.name.cmp(&b.name))
    });
    ops
}
