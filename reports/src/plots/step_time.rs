//! Where the time of a step goes: one stacked bar a layout, predicted and measured.

use moefold_profiles::Category;
use moefold_profiles::trace::TimeByCategory;

use super::Plot;
use super::rows::{self, Bar, BarPart};
use crate::draw::axis::{self, MARGIN, SMALL, Scale, Swatch, WIDTH, X_AXIS_HEIGHT};
use crate::draw::color;
use crate::draw::scene::Scene;
use crate::format::{self, TimeUnit};
use crate::subject::{Comparison, Subject};

/// Room to the right of the longest bar for its total.
const TOTALS: f64 = 84.0;

/// The plot; absent without subjects.
pub(crate) fn plot(comparison: &Comparison) -> Option<Plot> {
    let (subjects, note) = rows::shown(&comparison.subjects);
    let times: Vec<&TimeByCategory> = rows::both(&subjects)
        .filter_map(|(s, m)| time_of(s, m))
        .collect();
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
    let unit = TimeUnit::for_longest(longest);
    let name = format!("time of a step ({})", unit.name());
    let axis = (longest * unit.per_second(), name.as_str());
    let (rows, _, scale) = rows::over_axis(&mut scene, top, &subjects, TOTALS, axis);
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
    let part = |category| {
        let size = time.get(category).0;
        BarPart {
            size,
            paint: color::category(category),
            name: color::category_label(category),
            said: format::seconds(size),
            label: format!("{:.0}%", 100.0 * size / total),
        }
    };
    let whole = format!("step of {}", subject.name);
    let x = |seconds: f64| scale.at(seconds * unit.per_second());
    let parts = Category::ALL.into_iter().map(part);
    let done = rows::stack(scene, bar, parts, (total, &whole), x);
    scene.figure(
        (x(done) + 7.0, bar.text_y()),
        &format::seconds(total),
        SMALL,
    );
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
