//! Rows of horizontal bars: one row a subject, one bar or two in it, names to the left.

use crate::draw::axis::{BODY, MARGIN, SMALL};
use crate::draw::color::Paint;
use crate::draw::font::{self, Weight};
use crate::draw::scene::{Anchor, Scene};
use crate::subject::Subject;

/// Most rows that a plot shows.
pub(crate) const MAX_ROWS: usize = 50;
/// Widest column of names.
const MAX_NAMES: f64 = 300.0;
/// Width of the column that says `predicted` or `measured`.
const TAGS: f64 = 66.0;

/// One bar of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Bar {
    /// Top of the bar.
    pub(crate) y: f64,
    /// Its height.
    pub(crate) height: f64,
    /// The subject, as an index into the shown ones.
    pub(crate) subject: usize,
    /// Whether it shows what was measured.
    pub(crate) is_measured: bool,
}

/// Where the bars of some subjects go.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rows {
    /// Left end of the bars.
    pub(crate) left: f64,
    /// Bottom of the last row.
    pub(crate) bottom: f64,
    /// The bars, top to bottom.
    pub(crate) bars: Vec<Bar>,
}

/// Lays rows out from `top` down and writes their names. Few rows are tall with two lines of name,
/// many are low with one.
pub(crate) fn layout(scene: &mut Scene, top: f64, subjects: &[&Subject]) -> Rows {
    let roomy = subjects.len() <= 12;
    let any_run = subjects.iter().any(|s| s.measured.is_some());
    let (bar, gap) = match subjects.len() {
        0..=12 => (22.0, 18.0),
        13..=24 => (16.0, 8.0),
        _ => (13.0, 5.0),
    };
    let widest = subjects
        .iter()
        .map(|s| {
            if roomy {
                font::width(&s.name, BODY, Weight::Medium)
                    .max(font::width(&s.layout, SMALL, Weight::Regular))
                    .max(font::width(&s.details, SMALL, Weight::Regular))
            } else {
                font::width(&one_line(s), SMALL, Weight::Regular)
            }
        })
        .fold(0.0, f64::max);
    let names = (widest * 1.04).min(MAX_NAMES);
    let tags = if any_run { TAGS } else { 0.0 };
    let left = MARGIN + names + tags + 12.0;
    let mut y = top;
    let mut bars = Vec::new();
    for (i, subject) in subjects.iter().enumerate() {
        let count = if subject.measured.is_some() { 2.0 } else { 1.0 };
        let bars_height: f64 = count * bar + (count - 1.0) * 3.0;
        let height = match (roomy, subject.details.is_empty()) {
            (false, _) => bars_height,
            (true, true) => bars_height.max(34.0),
            (true, false) => bars_height.max(50.0),
        };
        let middle = y + height / 2.0;
        write_name(scene, subject, roomy, middle, names);
        let mut bar_y = middle - bars_height / 2.0;
        for is_measured in [false, true] {
            if is_measured && subject.measured.is_none() {
                continue;
            }
            bars.push(Bar {
                y: bar_y,
                height: bar,
                subject: i,
                is_measured,
            });
            if any_run {
                let tag = if is_measured { "measured" } else { "predicted" };
                scene
                    .text(
                        (left - 8.0, bar_y + bar / 2.0 + 4.0),
                        tag,
                        SMALL - 1.0,
                        Anchor::End,
                    )
                    .paint(Paint::Muted);
            }
            bar_y += bar + 3.0;
        }
        y += height + gap;
    }
    Rows {
        left,
        bottom: y - gap / 2.0,
        bars,
    }
}

fn write_name(scene: &mut Scene, subject: &Subject, roomy: bool, middle: f64, room: f64) {
    if roomy {
        let lines = [&subject.layout, &subject.details];
        let lines = lines.into_iter().filter(|line| !line.is_empty());
        let mut y = middle - 11.0 + if subject.details.is_empty() { 8.0 } else { 0.0 };
        let name = font::fitted(&subject.name, BODY, Weight::Medium, room);
        scene.text((MARGIN, y), name, BODY, Anchor::Start).medium();
        for line in lines {
            y += 16.0;
            let line = font::cut(line, SMALL, Weight::Regular, room);
            scene
                .text((MARGIN, y), line, SMALL, Anchor::Start)
                .paint(Paint::Muted);
        }
    } else {
        let name = font::cut(&one_line(subject), SMALL, Weight::Regular, room);
        scene.text((MARGIN, middle + 4.0), name, SMALL, Anchor::Start);
    }
}

fn one_line(subject: &Subject) -> String {
    format!("{}  {}", subject.name, subject.described())
}

/// The subjects that are shown, and a note where that is not all of them.
pub(crate) fn shown(subjects: &[Subject]) -> (Vec<&Subject>, Option<String>) {
    let note = (subjects.len() > MAX_ROWS)
        .then(|| format!("The first {MAX_ROWS} of {} layouts.", subjects.len()));
    (subjects.iter().take(MAX_ROWS).collect(), note)
}
