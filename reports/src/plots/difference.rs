//! How far the losses of runs are from those of the first, step by step.

use super::Plot;
use super::loss::series;
use crate::draw::axis::{self, BODY, Frame, MARGIN, Scale, Swatch, WIDTH, X_AXIS_HEIGHT};
use crate::draw::color::Paint;
use crate::draw::scene::{Anchor, Form, Scene};
use crate::losses::{Difference, differences};
use crate::subject::Comparison;

/// Height of the data.
const HEIGHT: f64 = 240.0;

/// The plot; absent where no run has a step in common with the first.
pub(crate) fn plot(comparison: &Comparison) -> Option<Plot> {
    let all = differences(comparison);
    let first = all.first()?.first;
    let title = "Difference of losses";
    let mut scene = Scene::new(WIDTH, title);
    let subtitle = format!(
        "The loss of each run less that of {}, in steps that both took.",
        first.name
    );
    let top = axis::heading(&mut scene, title, &[subtitle]);
    // Colours are those of the plot of losses, where the first run has the first.
    let place = |difference: &Difference<'_>| {
        let mut runs = comparison.runs();
        let found = runs.position(|(subject, _)| std::ptr::eq(subject, difference.other));
        series(found.unwrap_or_default())
    };
    let entries: Vec<_> = all
        .iter()
        .map(|difference| {
            let greatest = difference.greatest();
            let name = format!(
                "{}: at most {} at step {}",
                difference.other.name,
                greatest.nats(),
                greatest.step
            );
            (Swatch::Line { dashed: false }, place(difference), name)
        })
        .collect();
    let top = axis::legend(&mut scene, (MARGIN, top), WIDTH - 2.0 * MARGIN, &entries);
    let steps = all.iter().flat_map(|d| &d.steps);
    let (low, high) = steps.clone().fold((f64::INFINITY, 0.0), |(low, high), s| {
        let step = s.step as f64;
        (f64::min(low, step), f64::max(high, step))
    });
    let most = steps.map(|s| s.more.abs()).fold(0.0, f64::max);
    let end = if most > 0.0 { 1.1 * most } else { 1.0 };
    // Differences of rounding have no room for their zeros on an axis.
    let power = if end < 0.01 {
        end.log10().floor() as i32
    } else {
        0
    };
    let unit = 10_f64.powi(-power);
    let frame = Frame {
        left: MARGIN + 62.0,
        right: WIDTH - MARGIN - 10.0,
        top: top + 8.0,
        bottom: top + 8.0 + HEIGHT,
    };
    let x = Scale::linear((low, high), frame.across());
    let y = Scale::linear((-end * unit, end * unit), frame.upwards());
    let name = match power {
        0 => "difference (nats)".to_owned(),
        power => format!("difference (1e{power} nats)"),
    };
    frame.y_axis(&mut scene, &y, &name);
    frame.whole_ticks(&mut scene, &x);
    let zero = vec![(frame.left, y.at(0.0)), (frame.right, y.at(0.0))];
    scene.line(zero, Paint::Muted, 1.0);
    for difference in &all {
        let at = |step: u64, more: f64| (x.at(step as f64), y.at(more * unit));
        let points = difference
            .steps
            .iter()
            .map(|s| at(s.step, s.more))
            .collect();
        scene.line(points, place(difference), 2.0);
        let greatest = difference.greatest();
        scene.mark(
            at(greatest.step, greatest.more),
            4.5,
            Form::Disc,
            place(difference),
            Some(difference.sentence()),
        );
    }
    let middle = f64::midpoint(frame.left, frame.right);
    scene.text((middle, frame.bottom + 38.0), "step", BODY, Anchor::Middle);
    scene.height = frame.bottom + X_AXIS_HEIGHT;
    Some(Plot {
        stem: "loss-difference".to_owned(),
        caption: "Another layout adds in another order: differences of rounding stay below a thousandth of the loss \
                  and have no direction. What grows or leans to one side is something else."
            .to_owned(),
        scene,
    })
}
