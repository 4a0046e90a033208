//! Predicted against measured busy time, op by op: one picture a run.

use super::Plot;
use crate::draw::axis::{self, BODY, Frame, MARGIN, SMALL, Scale, Swatch, WIDTH, X_AXIS_HEIGHT};
use crate::draw::color::{MEASURED, PREDICTED, Paint};
use crate::draw::font::{self, Weight};
use crate::draw::scene::{Anchor, Form, Scene};
use crate::format::{self, TimeUnit};
use crate::ops::{self, OpTime};
use crate::subject::{Comparison, Subject};

/// Most runs that get a picture.
const MAX_RUNS: usize = 6;
/// Most ops in a picture.
const MAX_OPS: usize = 24;
/// Height of an op's row.
const ROW: f64 = 24.0;
/// Room at the right for figures.
const FIGURES: f64 = 250.0;
/// Ratio of the longest to the shortest from which the axis is logarithmic.
const LOG_FROM: f64 = 30.0;

/// The plots, one a run.
pub(crate) fn plots(comparison: &Comparison) -> Vec<Plot> {
    let runs: Vec<&Subject> = comparison.runs().map(|(s, _)| s).take(MAX_RUNS).collect();
    let lone = runs.len() == 1;
    runs.iter()
        .enumerate()
        .filter_map(|(i, subject)| {
            let stem = if lone {
                "predicted-measured-ops".to_owned()
            } else {
                format!("predicted-measured-ops-{}", i + 1)
            };
            plot(subject, stem)
        })
        .collect()
}

fn plot(subject: &Subject, stem: String) -> Option<Plot> {
    let all = ops::of(subject);
    let ops: Vec<&OpTime> = all.iter().take(MAX_OPS).collect();
    let values: Vec<f64> = ops
        .iter()
        .flat_map(|op| [op.predicted, op.measured])
        .flatten()
        .filter(|s| *s > 0.0 && s.is_finite())
        .collect();
    let longest = values.iter().copied().fold(0.0, f64::max);
    if longest <= 0.0 {
        return None;
    }
    let shortest = values.iter().copied().fold(f64::INFINITY, f64::min);
    let unit = TimeUnit::for_longest(longest);
    let title = format!("Predicted and measured time by op: {}", subject.name);
    let mut scene = Scene::new(WIDTH, title.clone());
    let mut subtitle = vec![format!(
        "{}. Busy time of a rank in a step, hidden work included.",
        subject.described()
    )];
    if all.len() > MAX_OPS {
        subtitle.push(format!("The {MAX_OPS} longest of {} ops.", all.len()));
    }
    let top = axis::heading(&mut scene, &title, &subtitle);
    let entries = [
        (Swatch::Mark(Form::Ring), PREDICTED, "predicted".to_owned()),
        (Swatch::Mark(Form::Disc), MEASURED, "measured".to_owned()),
    ];
    let top = axis::legend(&mut scene, (MARGIN, top), WIDTH - 2.0 * MARGIN, &entries);
    let widest = ops
        .iter()
        .map(|op| font::width(&op.name, SMALL, Weight::Regular))
        .fold(0.0, f64::max);
    let names = (1.06 * widest).min(220.0);
    let frame = Frame {
        left: MARGIN + names + 16.0,
        right: WIDTH - MARGIN - FIGURES,
        top: top + 20.0,
        bottom: top + 20.0 + ROW * ops.len() as f64,
    };
    let is_log = longest / shortest >= LOG_FROM;
    let per = unit.per_second();
    let scale = if is_log {
        let ends = (0.8 * shortest * per, 1.25 * longest * per);
        Scale::log(ends, frame.across())
    } else {
        let ends = (0.0, axis::round_up(1.02 * longest * per));
        Scale::linear(ends, frame.across())
    };
    let kind = if is_log { ", logarithmic" } else { "" };
    frame.x_axis(
        &mut scene,
        &scale,
        &format!("busy time a step ({}{kind})", unit.name()),
    );
    for (text, x) in ["predicted", "measured", "error"].iter().zip(columns()) {
        scene
            .text((x, frame.top - 6.0), *text, SMALL, Anchor::End)
            .paint(Paint::Muted);
    }
    for (i, op) in ops.iter().enumerate() {
        let middle = frame.top + (i as f64 + 0.5) * ROW;
        row(&mut scene, middle, names, op, (&scale, unit));
    }
    scene.height = frame.bottom + X_AXIS_HEIGHT;
    Some(Plot {
        stem,
        caption: "A long line between the two marks of an op is a bad price; the ops at the top \
                  matter most."
            .to_owned(),
        scene,
    })
}

/// Right ends of the columns of figures.
fn columns() -> [f64; 3] {
    let right = WIDTH - MARGIN;
    [right - 150.0, right - 66.0, right]
}

fn row(scene: &mut Scene, middle: f64, names: f64, op: &OpTime, (scale, unit): (&Scale, TimeUnit)) {
    let name = font::fitted(&op.name, SMALL, Weight::Regular, names);
    scene.text((MARGIN, middle + 4.0), name, SMALL, Anchor::Start);
    let x = |seconds: Option<f64>| {
        seconds
            .filter(|s| *s > 0.0 && s.is_finite())
            .map(|s| scale.at(s * unit.per_second()))
    };
    let (predicted, measured) = (x(op.predicted), x(op.measured));
    if let (Some(from), Some(to)) = (predicted, measured) {
        scene.line(vec![(from, middle), (to, middle)], Paint::Muted, 2.0);
    }
    let figure = |seconds: Option<f64>| {
        seconds.map_or_else(
            || "none".to_owned(),
            |s| {
                format!(
                    "{} {}",
                    format::three_digits(s * unit.per_second()),
                    unit.name()
                )
            },
        )
    };
    let tip = format!(
        "{}: predicted {}, measured {}",
        op.name,
        figure(op.predicted),
        figure(op.measured)
    );
    if let Some(x) = measured {
        scene.mark((x, middle), 5.5, Form::Disc, MEASURED, Some(tip.clone()));
    }
    if let Some(x) = predicted {
        scene.mark((x, middle), 4.5, Form::Ring, PREDICTED, Some(tip));
    }
    let [first, second, third] = columns();
    let error = op
        .error()
        .map_or_else(|| "-".to_owned(), format::signed_percent);
    for (x, text, paint) in [
        (first, figure(op.predicted), Paint::Muted),
        (second, figure(op.measured), Paint::Muted),
        (third, error, Paint::Ink),
    ] {
        scene
            .text((x, middle + 4.0), text, BODY - 1.0, Anchor::End)
            .paint(paint);
    }
}
