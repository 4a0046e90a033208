//! [`Scene`]: what a plot consists of, in logical pixels, before it is SVG or PNG.
//!
//! Only what plots need: rectangles, polylines, marks and text. Later shapes cover earlier ones.

use super::color::Paint;
use super::font::{self, Weight};

/// A picture.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Scene {
    /// Width in logical pixels.
    pub(crate) width: f64,
    /// Height in logical pixels.
    pub(crate) height: f64,
    /// What the picture shows, for those who cannot see it.
    pub(crate) title: String,
    /// The shapes, back to front.
    pub(crate) shapes: Vec<Shape>,
}

/// One shape.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Shape {
    /// A filled rectangle.
    Rect(Rect),
    /// A line through points.
    Line(Line),
    /// A mark centred on a point.
    Mark(Mark),
    /// A text.
    Text(Text),
}

/// A filled rectangle.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rect {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) width: f64,
    pub(crate) height: f64,
    pub(crate) fill: Paint,
    /// Shown when the pointer rests on it.
    pub(crate) tip: Option<String>,
}

/// A line through points.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    pub(crate) points: Vec<(f64, f64)>,
    pub(crate) stroke: Paint,
    pub(crate) width: f64,
    /// Lengths of a dash and of the gap after it; solid without.
    pub(crate) dash: Option<(f64, f64)>,
}

/// The form of a mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// A disc.
    Disc,
    /// A circle, its inside paper.
    Ring,
    /// A square on its corner.
    Diamond,
    /// A star of five points.
    Star,
}

/// A mark centred on a point.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mark {
    pub(crate) x: f64,
    pub(crate) y: f64,
    /// From the centre to the outermost point.
    pub(crate) radius: f64,
    pub(crate) form: Form,
    pub(crate) paint: Paint,
    /// Shown when the pointer rests on it.
    pub(crate) tip: Option<String>,
}

impl Mark {
    /// The corners of a diamond or star; none of a round form.
    pub(crate) fn corners(&self) -> Vec<(f64, f64)> {
        let (count, inner) = match self.form {
            Form::Disc | Form::Ring => return Vec::new(),
            Form::Diamond => (4, 1.0),
            Form::Star => (10, 0.45),
        };
        (0..count)
            .map(|i| {
                let angle = std::f64::consts::TAU * f64::from(i) / f64::from(count);
                let radius = self.radius * if i % 2 == 0 { 1.0 } else { inner };
                (self.x + radius * angle.sin(), self.y - radius * angle.cos())
            })
            .collect()
    }
}

/// Where a text stands relative to its point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Anchor {
    /// The text begins there.
    Start,
    /// Its middle is there.
    Middle,
    /// It ends there.
    End,
}

/// A text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Text {
    pub(crate) x: f64,
    /// The baseline.
    pub(crate) y: f64,
    pub(crate) words: String,
    /// Pixels per em.
    pub(crate) size: f64,
    pub(crate) weight: Weight,
    pub(crate) anchor: Anchor,
    pub(crate) paint: Paint,
    /// Turned a quarter to the left around its point, to read upwards.
    pub(crate) upwards: bool,
}

impl Scene {
    /// An empty picture whose height is set when its content is known.
    pub(crate) fn new(width: f64, title: impl Into<String>) -> Self {
        Self {
            width,
            height: 0.0,
            title: title.into(),
            shapes: Vec::new(),
        }
    }

    /// Adds a rectangle; a negative or vanishing size draws nothing.
    pub(crate) fn rect(
        &mut self,
        (x, y): (f64, f64),
        (width, height): (f64, f64),
        fill: Paint,
        tip: Option<String>,
    ) {
        if width > 0.0 && height > 0.0 {
            self.shapes.push(Shape::Rect(Rect {
                x,
                y,
                width,
                height,
                fill,
                tip,
            }));
        }
    }

    /// Adds a solid line.
    pub(crate) fn line(&mut self, points: Vec<(f64, f64)>, stroke: Paint, width: f64) {
        self.shapes.push(Shape::Line(Line {
            points,
            stroke,
            width,
            dash: None,
        }));
    }

    /// Adds a dashed line.
    pub(crate) fn dashed(
        &mut self,
        points: Vec<(f64, f64)>,
        stroke: Paint,
        width: f64,
        dash: (f64, f64),
    ) {
        self.shapes.push(Shape::Line(Line {
            points,
            stroke,
            width,
            dash: Some(dash),
        }));
    }

    /// Adds a mark.
    pub(crate) fn mark(
        &mut self,
        (x, y): (f64, f64),
        radius: f64,
        form: Form,
        paint: Paint,
        tip: Option<String>,
    ) {
        self.shapes.push(Shape::Mark(Mark {
            x,
            y,
            radius,
            form,
            paint,
            tip,
        }));
    }

    /// Adds a text in regular ink, and gives it back to be changed.
    pub(crate) fn text(
        &mut self,
        (x, y): (f64, f64),
        text: impl Into<String>,
        size: f64,
        anchor: Anchor,
    ) -> &mut Text {
        self.shapes.push(Shape::Text(Text {
            x,
            y,
            words: text.into(),
            size,
            weight: Weight::Regular,
            anchor,
            paint: Paint::Ink,
            upwards: false,
        }));
        match self.shapes.last_mut() {
            Some(Shape::Text(text)) => text,
            _ => unreachable!("a text was pushed"),
        }
    }
}

impl Scene {
    /// A text in medium weight on a patch of background, so that no grid line runs through it.
    pub(crate) fn figure(&mut self, (x, y): (f64, f64), text: &str, size: f64) {
        let width = font::width(text, size, Weight::Medium);
        self.rect(
            (x - 3.0, y - size),
            (width + 6.0, 1.3 * size),
            Paint::Paper,
            None,
        );
        self.text((x, y), text, size, Anchor::Start).medium();
    }
}

impl Text {
    /// In another colour.
    pub(crate) fn paint(&mut self, paint: Paint) -> &mut Self {
        self.paint = paint;
        self
    }

    /// In medium weight.
    pub(crate) fn medium(&mut self) -> &mut Self {
        self.weight = Weight::Medium;
        self
    }

    /// Reading upwards.
    pub(crate) fn upwards(&mut self) -> &mut Self {
        self.upwards = true;
        self
    }
}
