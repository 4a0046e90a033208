//! The embedded font: how wide a text is, and its glyphs as coverage for the bitmap painter.
//!
//! plotters can draw text with a registered font, but its `ab_glyph` path drops the bearing at the
//! left of a glyph, which spaces small text unevenly; glyphs are placed here instead. Kerning pairs
//! live in a table that `ab_glyph` does not read, so widths are without kerning.

use std::sync::LazyLock;

use ab_glyph::{Font, FontRef, ScaleFont as _};

/// Roboto Regular, see `fonts/README.md`.
pub(crate) const REGULAR_TTF: &[u8] = include_bytes!("../../fonts/Roboto-Regular.ttf");
/// Roboto Medium, see `fonts/README.md`.
pub(crate) const MEDIUM_TTF: &[u8] = include_bytes!("../../fonts/Roboto-Medium.ttf");

static REGULAR: LazyLock<FontRef<'static>> =
    LazyLock::new(|| FontRef::try_from_slice(REGULAR_TTF).expect("the embedded font is valid"));
static MEDIUM: LazyLock<FontRef<'static>> =
    LazyLock::new(|| FontRef::try_from_slice(MEDIUM_TTF).expect("the embedded font is valid"));

/// Weight of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Weight {
    /// Ordinary text.
    Regular,
    /// Titles and names.
    Medium,
}

impl Weight {
    fn font(self) -> &'static FontRef<'static> {
        match self {
            Self::Regular => &REGULAR,
            Self::Medium => &MEDIUM,
        }
    }
}

/// Width of a text at a font size (pixels per em), in pixels.
pub(crate) fn width(text: &str, size: f64, weight: Weight) -> f64 {
    let font = weight.font().as_scaled(scale(weight, size));
    let advances = text.chars().map(|c| font.h_advance(font.glyph_id(c)));
    f64::from(advances.sum::<f32>())
}

/// Text cut so that it is at most so wide, an ellipsis in its middle.
pub(crate) fn fitted(text: &str, size: f64, weight: Weight, max_width: f64) -> String {
    let mut chars = text.chars().count();
    let mut out = text.to_owned();
    while chars > 1 && width(&out, size, weight) > max_width {
        chars -= 1;
        out = crate::format::shortened(text, chars);
    }
    out
}

/// Text cut so that it is at most so wide, an ellipsis at its end: for text whose head matters most.
pub(crate) fn cut(text: &str, size: f64, weight: Weight, max_width: f64) -> String {
    if width(text, size, weight) <= max_width {
        return text.to_owned();
    }
    let mut out = text.to_owned();
    while out.pop().is_some() {
        let shown = format!("{}…", out.trim_end());
        if width(&shown, size, weight) <= max_width {
            return shown;
        }
    }
    out
}

/// Calls `paint(x, y, coverage)` for every pixel that a text touches, with its baseline starting at
/// the origin.
pub(crate) fn rasterize(
    text: &str,
    size: f64,
    weight: Weight,
    mut paint: impl FnMut(i32, i32, f32),
) {
    let font = weight.font();
    let scaled = font.as_scaled(scale(weight, size));
    let mut pen = 0.0_f32;
    for c in text.chars() {
        let mut glyph = scaled.scaled_glyph(c);
        let advance = scaled.h_advance(glyph.id);
        glyph.position = ab_glyph::point(pen, 0.0);
        if let Some(outline) = font.outline_glyph(glyph) {
            let bounds = outline.px_bounds();
            let (left, top) = (bounds.min.x as i32, bounds.min.y as i32);
            outline.draw(|x, y, coverage| paint(left + x as i32, top + y as i32, coverage));
        }
        pen += advance;
    }
}

/// `ab_glyph` scales by the height from descent to ascent, not by the em.
fn scale(weight: Weight, size: f64) -> f32 {
    let font = weight.font();
    let per_em = font
        .units_per_em()
        .expect("the embedded font has units per em");
    size as f32 * font.height_unscaled() / per_em
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_width_scales_with_size_and_grows_with_text() {
        let at_10 = width("step time", 10.0, Weight::Regular);
        let at_20 = width("step time", 20.0, Weight::Regular);
        assert!((at_20 - 2.0 * at_10).abs() < 1e-3, "{at_10} {at_20}");
        assert!(width("step times", 10.0, Weight::Regular) > at_10);
        // Digits are tabular, and about half an em wide in Roboto.
        assert!((width("0", 100.0, Weight::Regular) - 56.2).abs() < 0.5);
    }

    #[test]
    fn fitted_text_fits() {
        let long = "a-rather-long-layout-name-with-tail";
        let short = fitted(long, 12.0, Weight::Regular, 80.0);
        assert!(width(&short, 12.0, Weight::Regular) <= 80.0);
        assert!(short.contains('…'), "{short}");
        let headed = cut(long, 12.0, Weight::Regular, 80.0);
        assert!(width(&headed, 12.0, Weight::Regular) <= 80.0);
        assert!(headed.starts_with("a-rather-") && headed.ends_with('…'));
        assert_eq!(cut("ok", 12.0, Weight::Regular, 80.0), "ok");
        assert_eq!(fitted("ok", 12.0, Weight::Regular, 80.0), "ok");
    }

    #[test]
    fn glyphs_stand_on_the_baseline() {
        let (mut lowest, mut painted) = (i32::MIN, 0);
        rasterize("HE", 40.0, Weight::Medium, |_, y, coverage| {
            if coverage > 0.5 {
                lowest = lowest.max(y);
                painted += 1;
            }
        });
        assert!(painted > 100, "{painted}");
        assert_eq!(lowest, -1, "the last row above the baseline");
    }
}
