//! What fills the memory of the fullest rank, against what the rank has.

use moefold_profiles::units::Bytes;
use moefold_profiles::{ByClass, TensorClass};

use super::Plot;
use super::rows::{self, Bar, BarPart};
use crate::draw::axis::{self, Frame, MARGIN, SMALL, Scale, Swatch, WIDTH, X_AXIS_HEIGHT};
use crate::draw::color::{self, Paint};
use crate::draw::scene::Scene;
use crate::format::{self, MemoryUnit};
use crate::subject::{Comparison, Subject};

/// Room to the right of the longest bar for its total.
const TOTALS: f64 = 92.0;
/// How many times the largest use a capacity may be and still be drawn to scale.
pub(crate) const CAPACITY_ROOM: f64 = 3.0;

/// The plot; absent without subjects.
pub(crate) fn plot(comparison: &Comparison) -> Option<Plot> {
    let (subjects, note) = rows::shown(&comparison.subjects);
    let largest = subjects
        .iter()
        .flat_map(|s| [Some(total(s, false)), s.measured_peak_gib()])
        .flatten()
        .fold(0.0, f64::max);
    if largest <= 0.0 {
        return None;
    }
    let capacities: Vec<f64> = subjects
        .iter()
        .filter_map(|s| s.setting.capacity_gib())
        .collect();
    let capacity = capacities.iter().copied().fold(0.0, f64::max);
    let drawn = capacity > 0.0 && capacity <= CAPACITY_ROOM * largest;
    let mut subtitle = vec!["By what it holds at the instant of its peak.".to_owned()];
    if capacity > 0.0 && !drawn {
        subtitle.push(format!(
            "Capacity is {}, far to the right: the fullest rank uses {} of it.",
            format::gib(capacity),
            format::percent(largest / capacity)
        ));
    }
    subtitle.extend(note);
    let mut scene = Scene::new(WIDTH, "Peak memory of the fullest rank");
    let top = axis::heading(&mut scene, "Peak memory of the fullest rank", &subtitle);
    let shows = |class| {
        rows::both(&subjects).any(|(s, m)| parts(s, m).is_some_and(|p| p[class] > 1e-3 * largest))
    };
    let mut entries: Vec<_> = TensorClass::ALL
        .into_iter()
        .filter(|&class| shows(class))
        .map(|class| {
            (
                Swatch::Square,
                color::memory(class),
                class.name().to_owned(),
            )
        })
        .collect();
    if drawn {
        let line = Swatch::Line { dashed: true };
        entries.push((line, Paint::Limit, "capacity".to_owned()));
    }
    let top = axis::legend(&mut scene, (MARGIN, top), WIDTH - 2.0 * MARGIN, &entries);
    let unit = MemoryUnit::for_largest(largest);
    let end = if drawn {
        largest.max(capacity)
    } else {
        largest
    };
    let name = format!("peak memory of a rank ({})", unit.name());
    let axis = (end * unit.per_gib(), name.as_str());
    let (rows, frame, scale) = rows::over_axis(&mut scene, top, &subjects, TOTALS, axis);
    for bar in &rows.bars {
        stack(&mut scene, bar, subjects[bar.subject], (&scale, unit));
    }
    if drawn {
        limits(&mut scene, &frame, &rows.bars, &subjects, (&scale, unit));
    }
    scene.height = rows.bottom + X_AXIS_HEIGHT;
    Some(Plot {
        stem: "memory".to_owned(),
        caption: "A bar that crosses the capacity would run out of memory. Peaks are those of the \
                  fullest rank; the next picture has the others."
            .to_owned(),
        scene,
    })
}

/// The capacity: one line where all have the same, else one beside each bar.
fn limits(
    scene: &mut Scene,
    frame: &Frame,
    bars: &[Bar],
    subjects: &[&Subject],
    (scale, unit): (&Scale, MemoryUnit),
) {
    let capacity = |s: &Subject| s.setting.capacity_gib();
    let alike = subjects
        .windows(2)
        .all(|w| capacity(w[0]) == capacity(w[1]));
    let whole = [(frame.top, frame.bottom, subjects[0])];
    let each = bars
        .iter()
        .map(|bar| (bar.y - 6.0, bar.y + bar.height + 6.0, subjects[bar.subject]));
    let lines: Vec<(f64, f64, &Subject)> = if alike {
        whole.to_vec()
    } else {
        each.collect()
    };
    for (top, bottom, subject) in lines {
        if let Some(capacity) = capacity(subject) {
            let x = scale.at(capacity * unit.per_gib());
            let ends = vec![(x, top), (x, bottom)];
            scene.dashed(ends, Paint::Limit, 2.0, (6.0, 3.0));
        }
    }
}

fn total(subject: &Subject, measured: bool) -> f64 {
    parts(subject, measured).map_or(0.0, |parts| parts.total())
}

/// Peak by class, GiB.
fn parts(subject: &Subject, measured: bool) -> Option<ByClass<f64>> {
    if measured {
        measured_gib(subject)
    } else {
        Some(subject.planned.predicted.memory_gib)
    }
}

/// What the fullest rank of a run held at its peak, GiB.
pub(crate) fn measured_gib(subject: &Subject) -> Option<ByClass<f64>> {
    let peaks = &subject.measured.as_ref()?.summary.peak_by_rank;
    let worst = peaks.iter().max_by_key(|peak| peak.bytes.total())?;
    Some(worst.bytes.map(Bytes::gib))
}

fn stack(scene: &mut Scene, bar: &Bar, subject: &Subject, (scale, unit): (&Scale, MemoryUnit)) {
    let Some(parts) = parts(subject, bar.is_measured) else {
        return;
    };
    let total = parts.total();
    let part = |(class, &size): (TensorClass, &f64)| BarPart {
        size,
        paint: color::memory(class),
        name: class.name(),
        said: format::gib(size),
        label: format::three_digits(size * unit.per_gib()),
    };
    let parts: Vec<_> = parts.iter().map(part).collect();
    let whole = format!("peak of {}", subject.name);
    let x = |gib: f64| scale.at(gib * unit.per_gib());
    let done = rows::stack(scene, bar, parts, (total, &whole), x);
    let mut text = format::gib(total);
    let capacity = subject.setting.capacity_gib();
    if let Some(capacity) = capacity.filter(|&c| c > 0.0 && c <= scale.high() / unit.per_gib()) {
        text = format!("{text}, {:.0}%", 100.0 * total / capacity);
    }
    // Beyond the capacity where that is drawn, so that its line crosses no figure.
    let end = match capacity.filter(|c| c * unit.per_gib() <= scale.high()) {
        Some(capacity) => done.max(capacity),
        None => done,
    };
    scene.figure((x(end) + 8.0, bar.text_y()), &text, SMALL);
}
