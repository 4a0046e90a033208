//! Loss and gradient norm of the runs, step by step.

use super::Plot;
use crate::draw::axis::{self, Frame, MARGIN, Scale, Swatch, WIDTH, X_AXIS_HEIGHT};
use crate::draw::color::{Paint, SERIES};
use crate::draw::scene::{Form, Scene};
use crate::format;
use crate::subject::{Comparison, Measured, Subject};
use moefold_profiles::run::StepRecord;

/// Height of the loss.
const LOSS: f64 = 280.0;
/// Height of the gradient norm.
const NORM: f64 = 120.0;

/// The plot; absent where no run has a step.
pub(crate) fn plot(comparison: &Comparison) -> Option<Plot> {
    let runs: Vec<(&Subject, &Measured)> = comparison
        .runs()
        .filter(|(_, m)| !m.steps.is_empty())
        .collect();
    let last = runs.iter().flat_map(|(_, m)| &m.steps).map(|s| s.step);
    let last = last.max()?;
    let first = runs.iter().flat_map(|(_, m)| &m.steps).map(|s| s.step);
    let first = first.min()?;
    let mut scene = Scene::new(WIDTH, "Training loss");
    let mut subtitle = vec![
        "Mean token cross entropy of the global batch, and the gradient norm before clipping.",
    ];
    let validated = |s: &StepRecord| s.validation.is_some();
    if runs.iter().any(|(_, m)| m.steps.iter().any(validated)) {
        subtitle.push("Diamonds are losses on validation data.");
    }
    let subtitle: Vec<String> = subtitle.into_iter().map(str::to_owned).collect();
    let top = axis::heading(&mut scene, "Training loss", &subtitle);
    let entries: Vec<_> = runs
        .iter()
        .enumerate()
        .map(|(i, (subject, measured))| {
            let name = format!("{}: {}", subject.name, ending(measured));
            (Swatch::Line { dashed: false }, series(i), name)
        })
        .collect();
    let top = axis::legend(&mut scene, (MARGIN, top), WIDTH - 2.0 * MARGIN, &entries);
    let steps = (first as f64, last as f64);
    let loss = Frame {
        left: MARGIN + 62.0,
        right: WIDTH - MARGIN - 10.0,
        top: top + 8.0,
        bottom: top + 8.0 + LOSS,
    };
    let validation = |s: &StepRecord| s.validation.map_or(f64::NAN, |found| found.loss);
    panel(
        &mut scene,
        loss,
        steps,
        &runs,
        ("loss (nats)", |s| s.loss, validation),
    );
    let norm = Frame {
        top: loss.bottom + 38.0,
        bottom: loss.bottom + 38.0 + NORM,
        ..loss
    };
    panel(
        &mut scene,
        norm,
        steps,
        &runs,
        ("gradient norm", |s| s.grad_norm, |_| f64::NAN),
    );
    let middle = f64::midpoint(norm.left, norm.right);
    scene.text(
        (middle, norm.bottom + 38.0),
        "step",
        axis::BODY,
        crate::draw::scene::Anchor::Middle,
    );
    scene.height = norm.bottom + X_AXIS_HEIGHT;
    Some(Plot {
        stem: "loss".to_owned(),
        caption: "Runs of the same data and seed lie on one line whatever their layout; earlier \
                  runs are drawn wider so that they show below later ones."
            .to_owned(),
        scene,
    })
}

pub(super) fn series(i: usize) -> Paint {
    SERIES[i % SERIES.len()]
}

/// Where a run's loss ended.
fn ending(measured: &Measured) -> String {
    let Some(last) = measured.steps.last() else {
        return String::new();
    };
    if last.loss.is_finite() {
        format!("{:.3} at step {}", last.loss, last.step)
    } else {
        format!("not a number at step {}", last.step)
    }
}

/// A name, what is drawn as a line, and what as diamonds.
type Figure = (&'static str, fn(&StepRecord) -> f64, fn(&StepRecord) -> f64);

fn panel(
    scene: &mut Scene,
    frame: Frame,
    steps: (f64, f64),
    runs: &[(&Subject, &Measured)],
    (name, figure, marked): Figure,
) {
    let values: Vec<f64> = runs
        .iter()
        .flat_map(|(_, m)| m.steps.iter().flat_map(|s| [figure(s), marked(s)]))
        .filter(|v| v.is_finite())
        .collect();
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if low > high {
        return;
    }
    let air = 0.05 * (high - low).max(0.02 * high.abs());
    let x = Scale::linear(steps, frame.across());
    let y = Scale::linear(((low - air).max(0.0), high + air), frame.upwards());
    frame.y_axis(scene, &y, name);
    frame.whole_ticks(scene, &x);
    for (i, (subject, measured)) in runs.iter().enumerate() {
        let under = runs.len() - 1 - i;
        let width = 2.0 + 2.0 * under.min(3) as f64;
        for stretch in finite(&measured.steps, figure) {
            let points: Vec<(f64, f64)> = stretch
                .iter()
                .map(|&(step, value)| (x.at(step), y.at(value)))
                .collect();
            if let [(step, value)] = stretch[..] {
                let tip = format!("{}: {}", subject.name, format::three_digits(value));
                let at = (x.at(step), y.at(value));
                scene.mark(at, 4.0, Form::Disc, series(i), Some(tip));
            } else {
                scene.line(points, series(i), width);
            }
        }
        for &(step, value) in finite(&measured.steps, marked).iter().flatten() {
            let tip = format!(
                "{}: {} on validation data after step {step}",
                subject.name,
                format::three_digits(value)
            );
            let at = (x.at(step), y.at(value));
            scene.mark(at, 5.0, Form::Diamond, series(i), Some(tip));
        }
    }
}

/// Stretches of steps whose figure is finite.
fn finite(steps: &[StepRecord], figure: fn(&StepRecord) -> f64) -> Vec<Vec<(f64, f64)>> {
    steps
        .split(|step| !figure(step).is_finite())
        .filter(|stretch| !stretch.is_empty())
        .map(|stretch| {
            let point = |s: &StepRecord| (s.step as f64, figure(s));
            stretch.iter().map(point).collect()
        })
        .collect()
}
