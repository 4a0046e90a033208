//! Where the time of a step goes: one stacked bar a layout, predicted and measured.

use moefold_profiles::Category;
use moefold_profiles::trace::TimeByCategory;

use super::Plot;
use super::rows::{self, Bar};
use crate::draw::axis::{self, Frame, MARGIN, SMALL, Scale, Swatch, WIDTH, X_AXIS_HEIGHT};
use crate::draw::color;
use crate::draw::font::{self, Weight};
use crate::draw::scene::{Anchor, Scene};
use crate::format::{self, TimeUnit};
use crate::subject::{Comparison, Subject};

/// Room to the right of the longest bar for its total.
const TOTALS: f64 = 84.0;

/// The plot; absent without subjects.
pub(crate) fn plot(comparison: &Comparison) -> Option<Plot> {
    let (subjects, note) = rows::shown(&comparison.subjects);
    let bars: Vec<(&Subject, bool)> = subjects
        .iter()
        .flat_map(|&s| [(s, false), (s, true)])
        .collect();
    let times: Vec<&TimeByCategory> = bars.iter().filter_map(|&(s, m)| time_of(s, m)).collect();
    let longest = times.iter().map(|t| t.total().0).fold(0.0, f64::max);
    if longest <= 0.0 {
        return None;
    }
    let mut scene = Scene::new(WIDTH, "Where the time of a step goes");
    let mut subtitle = vec!["Exposed time by category; the parts add up to the step.".to_owned()];
    subtitle.extend(note);
    let top = axis::heading(&mut scene, "Where the time of a step goes", &subtitle);
    let used: Vec<Category> = Category::ALL
        .into_iter()
        .filter(|&c| times.iter().any(|t| t.get(c).0 > 1e-3 * longest))
        .collect();
    let entries: Vec<_> = used
        .iter()
        .map(|&c| {
            let name = color::category_label(c).to_owned();
            (Swatch::Square, color::category(c), name)
        })
        .collect();
    let top = axis::legend(&mut scene, (MARGIN, top), WIDTH - 2.0 * MARGIN, &entries);
    let axis_at = scene.shapes.len();
    let rows = rows::layout(&mut scene, top + 10.0, &subjects);
    let unit = TimeUnit::for_longest(longest);
    let frame = Frame {
        left: rows.left,
        right: WIDTH - MARGIN - TOTALS,
        top: top + 2.0,
        bottom: rows.bottom,
    };
    let scale = Scale::linear((0.0, longest * unit.per_second()), frame.across());
    let mut grid = Scene::new(WIDTH, "");
    frame.x_axis(
        &mut grid,
        &scale,
        &format!("time of a step ({})", unit.name()),
    );
    scene.shapes.splice(axis_at..axis_at, grid.shapes);
    for bar in &rows.bars {
        let subject = subjects[bar.subject];
        if let Some(time) = time_of(subject, bar.is_measured) {
            stack(&mut scene, bar, subject, time, (&scale, unit));
        }
    }
    scene.height = rows.bottom + X_AXIS_HEIGHT;
    Some(Plot {
        stem: "step-time".to_owned(),
        caption: caption(comparison),
        scene,
    })
}

fn time_of(subject: &Subject, measured: bool) -> Option<&TimeByCategory> {
    if measured {
        subject.measured.as_ref().map(|m| &m.summary.time_s)
    } else {
        Some(&subject.planned.predicted.time_s)
    }
}

fn stack(
    scene: &mut Scene,
    bar: &Bar,
    subject: &Subject,
    time: &TimeByCategory,
    (scale, unit): (&Scale, TimeUnit),
) {
    let total = time.total().0;
    let mut done = 0.0;
    for category in Category::ALL {
        let part = time.get(category).0;
        let x0 = scale.at(done * unit.per_second());
        done += part;
        let x1 = scale.at(done * unit.per_second());
        // A hairline of background keeps neighbours apart without their colours.
        let width = if x1 - x0 > 3.0 {
            x1 - x0 - 0.75
        } else {
            x1 - x0
        };
        let paint = color::category(category);
        let tip = format!(
            "{}: {}, {} of the {} step of {}",
            color::category_label(category),
            format::seconds(part),
            format::percent(part / total),
            if bar.is_measured {
                "measured"
            } else {
                "predicted"
            },
            subject.name,
        );
        scene.rect((x0, bar.y), (width, bar.height), paint, Some(tip));
        let share = format!("{:.0}%", 100.0 * part / total);
        let size = SMALL - 1.0;
        if bar.height >= 15.0 && font::width(&share, size, Weight::Regular) + 8.0 < width {
            let at = (f64::midpoint(x0, x1), bar.y + bar.height / 2.0 + 4.0);
            scene
                .text(at, share, size, Anchor::Middle)
                .paint(paint.text_on());
        }
    }
    let at = (
        scale.at(done * unit.per_second()) + 7.0,
        bar.y + bar.height / 2.0 + 4.0,
    );
    scene.figure(at, &format::seconds(total), SMALL);
}

fn caption(comparison: &Comparison) -> String {
    let mut text = "A shorter bar is a faster step. Blue and green are work, orange to pink is \
                    communication that nothing hides, grey is waiting."
        .to_owned();
    if comparison.runs().next().is_some() {
        text.push_str(" Where a layout ran, the measured step stands below the predicted one.");
    }
    text
}
