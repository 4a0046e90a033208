//! Peak memory along the pipeline: a panel a layout, a bar a pipeline rank (or a rank, where it ran),
//! against what a rank has.

use super::Plot;
use super::memory::CAPACITY_ROOM;
use crate::draw::axis::{self, BODY, Frame, MARGIN, SMALL, Scale, Swatch, WIDTH};
use crate::draw::color::{MEASURED, PREDICTED, Paint};
use crate::draw::font::{self, Weight};
use crate::draw::scene::{Anchor, Scene};
use crate::format::{self, MemoryUnit};
use crate::subject::{Comparison, Subject};

/// Most panels of a plot.
const MAX_PANELS: usize = 6;
/// Most ranks drawn one by one; beyond, the fullest of each pipeline rank stands for it.
const MAX_RANKS: usize = 64;
/// Height of the data part of a panel.
const PANEL: f64 = 150.0;

/// One place along a panel.
struct Column {
    name: String,
    predicted: Option<f64>,
    measured: Option<f64>,
}

/// The plot; absent where no layout has more than one bar.
pub(crate) fn plot(comparison: &Comparison) -> Option<Plot> {
    let mut panels: Vec<(&Subject, Vec<Column>)> = comparison
        .subjects
        .iter()
        .map(|subject| (subject, columns(subject)))
        .filter(|(_, columns)| columns.len() > 1)
        .collect();
    let all = panels.len();
    panels.truncate(MAX_PANELS);
    let values = panels
        .iter()
        .flat_map(|(_, columns)| columns)
        .flat_map(|column| [column.predicted, column.measured])
        .flatten();
    let largest = values.fold(0.0, f64::max);
    if largest <= 0.0 {
        return None;
    }
    let capacity = panels
        .iter()
        .filter_map(|(subject, _)| subject.setting.capacity_gib())
        .fold(0.0, f64::max);
    let drawn = capacity > 0.0 && capacity <= CAPACITY_ROOM * largest;
    let mut subtitle = Vec::new();
    if capacity > 0.0 && !drawn {
        subtitle.push(format!(
            "Capacity is {}, far above: the fullest rank uses {} of it.",
            format::gib(capacity),
            format::percent(largest / capacity)
        ));
    }
    if all > MAX_PANELS {
        subtitle.push(format!(
            "The first {MAX_PANELS} of {all} layouts with several ranks to show."
        ));
    }
    let mut scene = Scene::new(WIDTH, "Peak memory of each rank");
    let mut y = axis::heading(&mut scene, "Peak memory of each rank", &subtitle);
    let any_run = panels.iter().any(|(s, _)| s.measured.is_some());
    let mut entries = vec![(Swatch::Square, PREDICTED, "predicted".to_owned())];
    if any_run {
        entries.push((Swatch::Square, MEASURED, "measured".to_owned()));
    }
    if drawn {
        let line = Swatch::Line { dashed: true };
        entries.push((line, Paint::Limit, "capacity".to_owned()));
    }
    y = axis::legend(&mut scene, (MARGIN, y), WIDTH - 2.0 * MARGIN, &entries);
    let unit = MemoryUnit::for_largest(largest);
    let end = 1.05
        * if drawn {
            largest.max(capacity)
        } else {
            largest
        };
    let across = if panels.len() == 1 { 1 } else { 2 };
    let width = (WIDTH - 2.0 * MARGIN) / across as f64;
    for line in panels.chunks(across) {
        for (i, (subject, columns)) in line.iter().enumerate() {
            let left = MARGIN + i as f64 * width;
            let frame = Frame {
                left: left + 62.0,
                right: left + width - 16.0,
                top: y + 34.0,
                bottom: y + 34.0 + PANEL,
            };
            let scale = Scale::linear((0.0, end * unit.per_gib()), frame.upwards());
            panel(&mut scene, frame, (&scale, unit), subject, columns);
        }
        y += PANEL + 34.0 + 58.0;
    }
    scene.height = y;
    let caption = if panels.iter().any(|(s, _)| s.planned.layout.pp > 1) {
        "Early pipeline ranks hold more microbatches in flight, the last one the logits; a level row \
         of bars is memory well spread."
    } else {
        "Ranks whose experts get more tokens hold more activations; predictions are of the routing that \
         the plan assumes."
    };
    Some(Plot {
        stem: "memory-by-rank".to_owned(),
        caption: caption.to_owned(),
        scene,
    })
}

fn columns(subject: &Subject) -> Vec<Column> {
    let by_pp_rank = &subject.planned.predicted.memory_gib_by_pp_rank;
    let predicted = |pp_rank: u32| by_pp_rank.get(pp_rank as usize).copied();
    let peaks = match &subject.measured {
        Some(measured) => measured.summary.peak_by_rank.as_slice(),
        None => &[],
    };
    if !peaks.is_empty() && peaks.len() <= MAX_RANKS {
        let one = |peak: &moefold_profiles::run::RankPeak| Column {
            name: peak.rank.to_string(),
            predicted: predicted(peak.pp_rank),
            measured: Some(peak.bytes.total().gib()),
        };
        return peaks.iter().map(one).collect();
    }
    (0..by_pp_rank.len() as u32)
        .map(|pp_rank| Column {
            name: pp_rank.to_string(),
            predicted: predicted(pp_rank),
            measured: peaks
                .iter()
                .filter(|peak| peak.pp_rank == pp_rank)
                .map(|peak| peak.bytes.total().gib())
                .reduce(f64::max),
        })
        .collect()
}

fn panel(
    scene: &mut Scene,
    frame: Frame,
    (scale, unit): (&Scale, MemoryUnit),
    subject: &Subject,
    columns: &[Column],
) {
    let room = frame.right - frame.left + 50.0;
    let left = frame.left - 50.0;
    let name = font::fitted(&subject.name, BODY, Weight::Medium, 0.5 * room);
    let after = left + 1.06 * font::width(&name, BODY, Weight::Medium) + 8.0;
    scene
        .text((left, frame.top - 12.0), name, BODY, Anchor::Start)
        .medium();
    let layout = font::cut(
        &subject.described(),
        SMALL,
        Weight::Regular,
        (left + room - after) / 1.06,
    );
    scene
        .text((after, frame.top - 12.0), layout, SMALL, Anchor::Start)
        .paint(Paint::Muted);
    frame.y_axis(scene, scale, unit.name());
    let pitch = (frame.right - frame.left) / columns.len() as f64;
    let bar = (pitch * 0.72).min(44.0);
    // Labels thin out where they would touch.
    let label_every = (26.0 / pitch).ceil().max(1.0) as usize;
    for (i, column) in columns.iter().enumerate() {
        let middle = frame.left + (i as f64 + 0.5) * pitch;
        let bars: Vec<(f64, Paint, &str)> = [
            (column.predicted, PREDICTED, "predicted"),
            (column.measured, MEASURED, "measured"),
        ]
        .into_iter()
        .filter_map(|(value, paint, what)| value.map(|value| (value, paint, what)))
        .collect();
        let each = bar / bars.len().max(1) as f64;
        for (j, (value, paint, what)) in bars.into_iter().enumerate() {
            let y = scale.at(value * unit.per_gib());
            let x = middle - bar / 2.0 + j as f64 * each;
            let tip = format!("rank {}: {} {what}", column.name, format::gib(value));
            scene.rect((x, y), (each, frame.bottom - y), paint, Some(tip));
        }
        if i % label_every == 0 {
            let at = (middle, frame.bottom + 16.0);
            scene
                .text(at, column.name.clone(), SMALL, Anchor::Middle)
                .paint(Paint::Muted);
        }
    }
    if let Some(capacity) = subject.setting.capacity_gib()
        && capacity * unit.per_gib() <= scale.high()
    {
        let y = scale.at(capacity * unit.per_gib());
        let ends = vec![(frame.left, y), (frame.right, y)];
        scene.dashed(ends, Paint::Limit, 2.0, (6.0, 3.0));
    }
    let by_rank = subject.measured.is_some() && columns.len() != subject.planned.layout.pp as usize;
    let name = if by_rank { "rank" } else { "pipeline rank" };
    let at = (f64::midpoint(frame.left, frame.right), frame.bottom + 36.0);
    scene.text(at, name, BODY, Anchor::Middle);
}
