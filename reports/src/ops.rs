//! [`OpTime`]: busy time of an op or collective, predicted beside measured.

use std::collections::BTreeSet;

use crate::subject::Subject;

/// Busy seconds a step of a rank of the pipeline rank that is predicted, by what was expected and what was seen.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OpTime {
    /// Stem of the op or collective.
    pub(crate) name: String,
    /// Predicted, where the plan priced it.
    pub(crate) predicted: Option<f64>,
    /// Measured, where the run recorded it.
    pub(crate) measured: Option<f64>,
    /// Calls a step: predicted and measured, where they are known.
    pub(crate) calls: [Option<f64>; 2],
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

    /// Seconds of a call: predicted and measured, where calls are known.
    pub(crate) fn call_s(&self) -> [Option<f64>; 2] {
        let [predicted, measured] = self.calls;
        [(self.predicted, predicted), (self.measured, measured)].map(|(seconds, calls)| {
            let (seconds, calls) = seconds.zip(calls)?;
            (calls > 0.0).then(|| seconds / calls)
        })
    }

    fn longest(&self) -> f64 {
        let or_zero = |seconds: Option<f64>| seconds.unwrap_or(0.0);
        or_zero(self.predicted).max(or_zero(self.measured))
    }
}

/// The same, what is off by most first, each with its share of what all are off by, sign aside.
pub(crate) fn by_miss(subject: &Subject) -> Vec<(OpTime, f64)> {
    let mut ops = of(subject);
    ops.sort_by(|a, b| b.miss_s().abs().total_cmp(&a.miss_s().abs()));
    let all: f64 = ops.iter().map(|op| op.miss_s().abs()).sum();
    let share = |op: &OpTime| {
        if all > 0.0 {
            op.miss_s().abs() / all
        } else {
            0.0
        }
    };
    ops.into_iter().map(|op| (op.clone(), share(&op))).collect()
}

/// The ops of a run, longest first; none where it did not run. What is zero on both sides is left
/// out.
pub(crate) fn of(subject: &Subject) -> Vec<OpTime> {
    let Some(measured) = &subject.measured else {
        return Vec::new();
    };
    let calls = [&subject.planned.predicted.calls, &measured.summary.calls];
    let (predicted, measured) = (&subject.planned.predicted.busy_s, &measured.summary.busy_s);
    let names: BTreeSet<&String> = predicted.keys().chain(measured.keys()).collect();
    let mut ops: Vec<OpTime> = names
        .into_iter()
        .map(|name| OpTime {
            name: name.clone(),
            predicted: predicted.get(name).copied(),
            measured: measured.get(name).copied(),
            calls: calls.map(|calls| calls.get(name).copied()),
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
