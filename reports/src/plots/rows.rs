//! Rows of horizontal bars: one row a subject, one bar or two in it, names to the left, and each bar a
//! stack of parts.

use crate::draw::axis::{BODY, Frame, MARGIN, SMALL, Scale, WIDTH};
use crate::draw::color::Paint;
use crate::draw::font::{self, Weight};
use crate::draw::scene::{Anchor, Scene};
use crate::format;
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

impl Bar {
    /// What it shows, in a word.
    fn origin(&self) -> &'static str {
        if self.is_measured {
            "measured"
        } else {
            "predicted"
        }
    }

    /// The base of a text in its middle.
    pub(crate) fn text_y(&self) -> f64 {
        self.y + self.height / 2.0 + 4.0
    }
}

/// One part of a bar.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BarPart {
    /// How much it is, in the unit of the bar.
    pub(crate) size: f64,
    /// Its colour.
    pub(crate) paint: Paint,
    /// What it is of.
    pub(crate) name: &'static str,
    /// How much it is, in words.
    pub(crate) said: String,
    /// What stands in it where there is room.
    pub(crate) label: String,
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
            let placed = Bar {
                y: bar_y,
                height: bar,
                subject: i,
                is_measured,
            };
            bars.push(placed);
            if any_run {
                let at = (left - 8.0, placed.text_y());
                scene
                    .text(at, placed.origin(), SMALL - 1.0, Anchor::End)
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

/// Rows from below `top` down over an axis from 0 to `end`, which lies behind them; `totals` is the room
/// to the right of the longest bar.
pub(crate) fn over_axis(
    scene: &mut Scene,
    top: f64,
    subjects: &[&Subject],
    totals: f64,
    (end, name): (f64, &str),
) -> (Rows, Frame, Scale) {
    let axis_at = scene.shapes.len();
    let rows = layout(scene, top + 10.0, subjects);
    let frame = Frame {
        left: rows.left,
        right: WIDTH - MARGIN - totals,
        top: top + 2.0,
        bottom: rows.bottom,
    };
    let scale = Scale::linear((0.0, end), frame.across());
    let mut grid = Scene::new(WIDTH, "");
    frame.x_axis(&mut grid, &scale, name);
    scene.shapes.splice(axis_at..axis_at, grid.shapes);
    (rows, frame, scale)
}

/// Draws a bar part by part. A part tells its share of `total`, the bar's `whole` (`step of NAME`); `x`
/// says where on the axis a sum of parts is. Gives the sum of all.
pub(crate) fn stack(
    scene: &mut Scene,
    bar: &Bar,
    parts: impl IntoIterator<Item = BarPart>,
    (total, whole): (f64, &str),
    x: impl Fn(f64) -> f64,
) -> f64 {
    let mut done = 0.0;
    for part in parts {
        let x0 = x(done);
        done += part.size;
        let x1 = x(done);
        // A hairline of background keeps neighbours apart without their colours.
        let width = if x1 - x0 > 3.0 {
            x1 - x0 - 0.75
        } else {
            x1 - x0
        };
        let tip = format!(
            "{}: {}, {} of the {} {whole}",
            part.name,
            part.said,
            format::percent(part.size / total),
            bar.origin(),
        );
        scene.rect((x0, bar.y), (width, bar.height), part.paint, Some(tip));
        let size = SMALL - 1.0;
        if bar.height >= 15.0 && font::width(&part.label, size, Weight::Regular) + 8.0 < width {
            let at = (f64::midpoint(x0, x1), bar.text_y());
            scene
                .text(at, part.label, size, Anchor::Middle)
                .paint(part.paint.text_on());
        }
    }
    done
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

/// Predicted and measured of every subject, whether there is a run or not.
pub(crate) fn both<'a>(subjects: &'a [&'a Subject]) -> impl Iterator<Item = (&'a Subject, bool)> {
    subjects.iter().flat_map(|&s| [(s, false), (s, true)])
}
