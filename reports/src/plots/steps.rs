//! The time of every measured step against the prediction: a strip of points a run.

use super::Plot;
use super::rows::MAX_ROWS;
use crate::draw::axis::{self, BODY, Frame, MARGIN, SMALL, Scale, Swatch, WIDTH, X_AXIS_HEIGHT};
use crate::draw::color::{MEASURED, PREDICTED, Paint};
use crate::draw::font::{self, Weight};
use crate::draw::scene::{Anchor, Form, Scene};
use crate::format::{self, TimeUnit};
use crate::subject::{Comparison, Measured, Subject};

/// Height of a run's row.
const ROW: f64 = 52.0;
/// Room at the right for the error.
const ERRORS: f64 = 190.0;

/// The plot; absent without runs.
pub(crate) fn plot(comparison: &Comparison) -> Option<Plot> {
    let runs: Vec<(&Subject, &Measured)> = comparison.runs().take(MAX_ROWS).collect();
    let values: Vec<f64> = runs
        .iter()
        .flat_map(|(subject, measured)| {
            let steps = steady(measured).into_iter();
            steps.chain([subject.planned.predicted.step_s, measured.summary.step_s])
        })
        .filter(|s| s.is_finite() && *s > 0.0)
        .collect();
    let longest = values.iter().copied().fold(0.0, f64::max);
    if longest <= 0.0 {
        return None;
    }
    let unit = TimeUnit::for_longest(longest);
    let mut scene = Scene::new(WIDTH, "Predicted and measured step time");
    let subtitle = ["Every measured step after the warm-up, their median, and the prediction."];
    let subtitle = subtitle.map(str::to_owned);
    let top = axis::heading(&mut scene, "Predicted and measured step time", &subtitle);
    let entries = [
        (
            Swatch::Mark(Form::Disc),
            Paint::Rgb(0x9c_c6_e6),
            "a measured step".to_owned(),
        ),
        (
            Swatch::Mark(Form::Diamond),
            MEASURED,
            "median measured".to_owned(),
        ),
        (Swatch::Mark(Form::Star), PREDICTED, "predicted".to_owned()),
    ];
    let top = axis::legend(&mut scene, (MARGIN, top), WIDTH - 2.0 * MARGIN, &entries);
    let widest = runs
        .iter()
        .map(|(s, _)| {
            let name = font::width(&s.name, BODY, Weight::Medium);
            name.max(font::width(&s.layout, SMALL, Weight::Regular))
        })
        .fold(0.0, f64::max);
    let names = (1.04 * widest).min(280.0);
    let frame = Frame {
        left: MARGIN + names + 20.0,
        right: WIDTH - MARGIN - ERRORS,
        top: top + 4.0,
        bottom: top + 4.0 + ROW * runs.len() as f64,
    };
    let high = axis::round_up(1.02 * longest * unit.per_second());
    let scale = Scale::linear((0.0, high), frame.across());
    frame.x_axis(
        &mut scene,
        &scale,
        &format!("time of a step ({})", unit.name()),
    );
    for (i, (subject, measured)) in runs.iter().enumerate() {
        let middle = frame.top + (i as f64 + 0.5) * ROW;
        row(&mut scene, middle, names, subject, measured, (&scale, unit));
    }
    scene.height = frame.bottom + X_AXIS_HEIGHT;
    Some(Plot {
        stem: "predicted-measured-steps".to_owned(),
        caption: "The closer the star to the diamond, the better the prediction; the wider the \
                  strip, the noisier the machine."
            .to_owned(),
        scene,
    })
}

/// Seconds of the steps after the warm-up.
fn steady(measured: &Measured) -> Vec<f64> {
    let skip = measured.summary.warmup_steps as usize;
    let steps = measured.steps.iter().skip(skip);
    steps.map(|s| s.step_s).collect()
}

fn row(
    scene: &mut Scene,
    middle: f64,
    names: f64,
    subject: &Subject,
    measured: &Measured,
    (scale, unit): (&Scale, TimeUnit),
) {
    let name = font::fitted(&subject.name, BODY, Weight::Medium, names);
    scene
        .text((MARGIN, middle - 3.0), name, BODY, Anchor::Start)
        .medium();
    let layout = font::cut(&subject.layout, SMALL, Weight::Regular, names);
    scene
        .text((MARGIN, middle + 13.0), layout, SMALL, Anchor::Start)
        .paint(Paint::Muted);
    let x = |seconds: f64| scale.at(seconds * unit.per_second());
    for (i, seconds) in steady(measured).into_iter().enumerate() {
        if !seconds.is_finite() {
            continue;
        }
        // Spread over the row by order, so that equal steps do not hide each other.
        let offset = ((i * 5) % 9) as f64 * 2.0 - 8.0;
        let tip = format!("{}: a step of {}", subject.name, format::seconds(seconds));
        let at = (x(seconds), middle + offset);
        scene.mark(at, 3.0, Form::Disc, Paint::Rgb(0x9c_c6_e6), Some(tip));
    }
    let (predicted, median) = (subject.planned.predicted.step_s, measured.summary.step_s);
    let tip = |what: &str, seconds: f64| {
        let seconds = format::seconds(seconds);
        Some(format!("{}: {what} {seconds}", subject.name))
    };
    scene.line(
        vec![(x(predicted), middle), (x(median), middle)],
        Paint::Ink,
        1.5,
    );
    let at = (x(median), middle);
    scene.mark(at, 8.0, Form::Diamond, MEASURED, tip("median", median));
    let at = (x(predicted), middle);
    scene.mark(at, 9.0, Form::Star, PREDICTED, tip("predicted", predicted));
    let left = WIDTH - MARGIN - ERRORS + 16.0;
    let verdict = subject.step_error().map_or(String::new(), |error| {
        format!("prediction {}", format::step_off(error))
    });
    scene
        .text((left, middle - 3.0), verdict, BODY, Anchor::Start)
        .medium();
    let figures = format!(
        "{} against {}",
        format::seconds(predicted),
        format::seconds(median)
    );
    scene
        .text((left, middle + 13.0), figures, SMALL, Anchor::Start)
        .paint(Paint::Muted);
}
