//! [`Difference`]: the losses of a run against those of the first.

use crate::format;
use crate::subject::{Comparison, Subject};

/// What the loss of a run is beyond that of the first run of the same model and batch.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Difference<'a> {
    /// The first run.
    pub(crate) first: &'a Subject,
    /// The other.
    pub(crate) other: &'a Subject,
    /// By step that both took: its loss less the first one's, and the first one's, nats. Losses that are no
    /// numbers are left out.
    pub(crate) steps: Vec<Apart>,
}

/// One step of two runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Apart {
    pub(crate) step: u64,
    pub(crate) more: f64,
    pub(crate) of: f64,
}

/// Those of all runs but the first that have a step in common with it.
pub(crate) fn differences(comparison: &Comparison) -> Vec<Difference<'_>> {
    let mut runs = comparison.runs();
    let Some((first, reference)) = runs.next() else {
        return Vec::new();
    };
    let losses = |step: u64| {
        let found = reference.steps.binary_search_by_key(&step, |s| s.step);
        found.ok().map(|at| reference.steps[at].loss)
    };
    runs.filter(|(other, _)| first.setting.trains_as(&other.setting))
        .map(|(other, measured)| Difference {
            first,
            other,
            steps: measured
                .steps
                .iter()
                .filter_map(|s| {
                    let of = losses(s.step)?;
                    let more = s.loss - of;
                    more.is_finite().then_some(Apart {
                        step: s.step,
                        more,
                        of,
                    })
                })
                .collect(),
        })
        .filter(|difference| !difference.steps.is_empty())
        .collect()
}

impl Difference<'_> {
    /// The step in which they differ most.
    pub(crate) fn greatest(&self) -> Apart {
        let steps = self.steps.iter().copied();
        let greatest = steps.reduce(|most, step| {
            if step.more.abs() > most.more.abs() {
                step
            } else {
                most
            }
        });
        greatest.expect("there is a step")
    }

    /// How far they differ, in a sentence.
    pub(crate) fn sentence(&self) -> String {
        let (first, other) = (&self.first.name, &self.other.name);
        let (greatest, common) = (self.greatest(), self.steps.len());
        if greatest.more == 0.0 {
            return format!(
                "The losses of {other} are those of {first} in all {common} steps that both took."
            );
        }
        let last = self.steps[common - 1];
        format!(
            "The loss of {other} differs from that of {first} by at most {} nats ({}), at step {}; at step {}, the \
             last of {common} that both took, by {}.",
            greatest.nats(),
            relative(greatest),
            greatest.step,
            last.step,
            last.nats(),
        )
    }
}

impl Apart {
    /// How much it is, sign aside: differences of rounding as powers of ten.
    pub(crate) fn nats(self) -> String {
        let nats = self.more.abs();
        if nats > 0.0 && nats < 1e-4 {
            format!("{nats:.1e}")
        } else {
            format::three_digits(nats)
        }
    }
}

/// A difference as a share of the first run's loss.
fn relative(step: Apart) -> String {
    let share = step.more.abs() / step.of.abs();
    if share < 1e-4 {
        format!("{share:.1e} of it")
    } else {
        format!("{} of it", format::percent(share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::{Content, Input};
    use crate::sample;

    fn compared(losses: [&[f64]; 2]) -> Vec<String> {
        let dir = tempfile::tempdir().expect("a folder");
        let plan = sample::cpu_plan([2, 1, 1, 4, 1], 0.31);
        let inputs = losses.iter().enumerate().map(|(i, losses)| {
            let run = sample::write_run(
                &dir.path().join(format!("run-{i}")),
                &plan,
                1.0,
                losses.len() as u64,
            );
            let mut input = Input::read(&run).expect("reads");
            let Content::Run(run) = &mut input.content else {
                panic!("a run directory")
            };
            for (step, loss) in run.steps.iter_mut().zip(*losses) {
                step.loss = *loss;
            }
            input
        });
        let comparison = Comparison::of(inputs.collect());
        let differences = differences(&comparison);
        differences.iter().map(Difference::sentence).collect()
    }

    #[test]
    fn golden_sentences() {
        assert_eq!(
            compared([&[4.0, 3.0, 2.0], &[4.0, 3.3, f64::NAN]]),
            [
                "The loss of run-1 differs from that of run-0 by at most 0.300 nats (10.0% of it), at step 1; at step 1, \
                 the last of 2 that both took, by 0.300."
            ]
        );
        assert_eq!(
            compared([&[4.0], &[4.0 + 3e-8]]),
            [
                "The loss of run-1 differs from that of run-0 by at most 3.0e-8 nats (7.5e-9 of it), at step 0; at step 0, \
                 the last of 1 that both took, by 3.0e-8."
            ]
        );
        assert_eq!(
            compared([&[4.0, 3.0], &[4.0]]),
            ["The losses of run-1 are those of run-0 in all 1 steps that both took."]
        );
    }
}
