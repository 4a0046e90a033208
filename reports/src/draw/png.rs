//! A [`Scene`] as PNG: drawn by plotters' bitmap backend at four times the logical size and averaged
//! down to twice, which smooths edges that the backend leaves jagged.

use std::path::Path;

use plotters::backend::{BitMapBackend, DrawingBackend};
use plotters::style::{Color as _, RGBColor, ShapeStyle};

use super::color::Paint;
use super::font;
use super::scene::{Anchor, Form, Line, Mark, Rect, Scene, Shape, Text};

/// Pixels drawn for a logical pixel.
const DRAWN: f64 = 4.0;
/// Drawn pixels averaged into one of the file, along each side.
const AVERAGED: usize = 2;
/// Bytes a pixel.
const RGB: usize = 3;

/// The bitmap could not be drawn or written; the text is the backend's.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct PngError(String);

impl PngError {
    fn from_backend(error: impl std::fmt::Display) -> Self {
        Self(error.to_string())
    }
}

/// Draws a scene into a file, whose name ends in `.png`.
pub(crate) fn write(scene: &Scene, path: &Path) -> Result<(), PngError> {
    let width = (scene.width * DRAWN / AVERAGED as f64).ceil() as usize;
    let height = (scene.height * DRAWN / AVERAGED as f64).ceil() as usize;
    let drawn = draw(scene, width * AVERAGED, height * AVERAGED)?;
    let small = averaged(&drawn, width, height);
    let size = (width as u32, height as u32);
    let mut file = BitMapBackend::new(path, size);
    file.blit_bitmap((0, 0), size, &small)
        .map_err(PngError::from_backend)?;
    file.present().map_err(PngError::from_backend)
}

/// The scene in RGB, `width` by `height` pixels, on white.
fn draw(scene: &Scene, width: usize, height: usize) -> Result<Vec<u8>, PngError> {
    let mut buffer = vec![0xff; width * height * RGB];
    let mut backend = BitMapBackend::with_buffer(&mut buffer, (width as u32, height as u32));
    for shape in &scene.shapes {
        match shape {
            Shape::Rect(shape) => rect(&mut backend, shape),
            Shape::Line(shape) => line(&mut backend, shape),
            Shape::Mark(shape) => mark(&mut backend, shape),
            Shape::Text(shape) => text(&mut backend, shape),
        }?;
    }
    backend.present().map_err(PngError::from_backend)?;
    drop(backend);
    Ok(buffer)
}

/// The mean of every square of [`AVERAGED`] by [`AVERAGED`] pixels.
fn averaged(drawn: &[u8], width: usize, height: usize) -> Vec<u8> {
    let stride = width * AVERAGED * RGB;
    let mut small = Vec::with_capacity(width * height * RGB);
    for y in 0..height {
        for x in 0..width {
            for channel in 0..RGB {
                let mut sum = 0_u32;
                for dy in 0..AVERAGED {
                    for dx in 0..AVERAGED {
                        let at = (y * AVERAGED + dy) * stride + (x * AVERAGED + dx) * RGB;
                        sum += u32::from(drawn[at + channel]);
                    }
                }
                let count = (AVERAGED * AVERAGED) as u32;
                small.push(((sum + count / 2) / count) as u8);
            }
        }
    }
    small
}

type Backend<'a> = BitMapBackend<'a>;

fn rect(backend: &mut Backend, rect: &Rect) -> Result<(), PngError> {
    let (x0, y0) = pixel((rect.x, rect.y));
    let (x1, y1) = pixel((rect.x + rect.width, rect.y + rect.height));
    let corner = (x1.max(x0 + 1), y1.max(y0 + 1));
    backend
        .draw_rect((x0, y0), corner, &color(rect.fill), true)
        .map_err(PngError::from_backend)
}

fn line(backend: &mut Backend, line: &Line) -> Result<(), PngError> {
    let style = ShapeStyle {
        color: color(line.stroke).to_rgba(),
        filled: true,
        stroke_width: (line.width * DRAWN).round().max(2.0) as u32,
    };
    let pieces = match line.dash {
        None => vec![line.points.clone()],
        Some((dash, gap)) => dashes(&line.points, dash, gap),
    };
    for piece in pieces {
        let mut path: Vec<(i32, i32)> = piece.into_iter().map(pixel).collect();
        path.dedup();
        if path.len() > 1 {
            backend
                .draw_path(path, &style)
                .map_err(PngError::from_backend)?;
        }
    }
    Ok(())
}

/// Cuts a line into the pieces that are drawn.
fn dashes(points: &[(f64, f64)], dash: f64, gap: f64) -> Vec<Vec<(f64, f64)>> {
    let mut pieces = Vec::new();
    let mut piece = Vec::new();
    // Length left of the current dash (or gap), and which of the two it is.
    let (mut left, mut inked) = (dash, true);
    for pair in points.windows(2) {
        let (from, to) = (pair[0], pair[1]);
        let length = (to.0 - from.0).hypot(to.1 - from.1);
        let at = |t: f64| {
            (
                from.0 + (to.0 - from.0) * t / length,
                from.1 + (to.1 - from.1) * t / length,
            )
        };
        let mut done = 0.0;
        while length - done > 1e-9 {
            let step = left.min(length - done);
            if inked {
                if piece.is_empty() {
                    piece.push(at(done));
                }
                piece.push(at(done + step));
            }
            done += step;
            left -= step;
            if left <= 1e-9 {
                if inked {
                    pieces.push(std::mem::take(&mut piece));
                }
                inked = !inked;
                left = if inked { dash } else { gap };
            }
        }
    }
    if piece.len() > 1 {
        pieces.push(piece);
    }
    pieces
}

fn mark(backend: &mut Backend, mark: &Mark) -> Result<(), PngError> {
    let center = pixel((mark.x, mark.y));
    let radius = |r: f64| (r * DRAWN).round().max(1.0) as u32;
    match mark.form {
        Form::Disc => backend.draw_circle(center, radius(mark.radius), &color(mark.paint), true),
        Form::Ring => backend
            .draw_circle(center, radius(mark.radius + 1.0), &color(mark.paint), true)
            .and_then(|()| {
                let inside = radius(mark.radius - 1.0);
                backend.draw_circle(center, inside, &color(Paint::Paper), true)
            }),
        Form::Diamond | Form::Star => {
            let corners: Vec<(i32, i32)> = mark.corners().into_iter().map(pixel).collect();
            backend.fill_polygon(corners, &color(mark.paint))
        }
    }
    .map_err(PngError::from_backend)
}

fn text(backend: &mut Backend, text: &Text) -> Result<(), PngError> {
    let shift = match text.anchor {
        Anchor::Start => 0.0,
        Anchor::Middle => -0.5,
        Anchor::End => -1.0,
    } * font::width(&text.words, text.size, text.weight);
    let (x0, y0) = if text.upwards {
        pixel((text.x, text.y - shift))
    } else {
        pixel((text.x + shift, text.y))
    };
    let ink = color(text.paint);
    let (width, height) = backend.get_size();
    let mut result = Ok(());
    font::rasterize(
        &text.words,
        text.size * DRAWN,
        text.weight,
        |x, y, coverage| {
            let (x, y) = if text.upwards {
                (x0 + y, y0 - x)
            } else {
                (x0 + x, y0 + y)
            };
            let inside = x >= 0 && y >= 0 && x < width as i32 && y < height as i32;
            if inside && coverage > 0.0 && result.is_ok() {
                let ink = ink.mix(f64::from(coverage.min(1.0))).to_backend_color();
                result = backend.draw_pixel((x, y), ink);
            }
        },
    );
    result.map_err(PngError::from_backend)
}

fn color(paint: Paint) -> RGBColor {
    let (r, g, b) = paint.rgb();
    RGBColor(r, g, b)
}

fn pixel((x, y): (f64, f64)) -> (i32, i32) {
    ((x * DRAWN).round() as i32, (y * DRAWN).round() as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rectangle_lands_where_it_was_put() {
        let mut scene = Scene::new(4.0, "");
        scene.height = 2.0;
        scene.rect((1.0, 0.0), (2.0, 1.0), Paint::Rgb(0xff_00_00), None);
        let drawn = draw(&scene, 16, 8).expect("draws");
        let small = averaged(&drawn, 8, 4);
        let red = |x: usize, y: usize| small[(y * 8 + x) * 3..][..3] == [0xff, 0, 0];
        for y in 0..4 {
            for x in 0..8 {
                assert_eq!(red(x, y), (2..6).contains(&x) && y < 2, "pixel {x}, {y}");
            }
        }
    }

    #[test]
    fn law_dashes_cover_their_share_of_the_line() {
        let pieces = dashes(&[(0.0, 0.0), (6.0, 8.0), (16.0, 8.0)], 3.0, 2.0);
        let inked: f64 = pieces
            .iter()
            .flat_map(|piece| piece.windows(2))
            .map(|p| (p[1].0 - p[0].0).hypot(p[1].1 - p[0].1))
            .sum();
        assert!((inked - 12.0).abs() < 1e-9, "{inked}");
        assert_eq!(pieces.len(), 4);
    }

    #[test]
    fn text_is_inked_in_both_directions() {
        let mut scene = Scene::new(40.0, "");
        scene.height = 40.0;
        scene.text((2.0, 12.0), "Step", 12.0, Anchor::Start);
        let across = draw(&scene, 160, 160).expect("draws");
        let mut upright = Scene::new(40.0, "");
        upright.height = 40.0;
        upright
            .text((12.0, 38.0), "Step", 12.0, Anchor::Start)
            .upwards();
        let up = draw(&upright, 160, 160).expect("draws");
        let dark = |pixels: &[u8]| pixels.chunks(3).filter(|p| p[0] < 0x80).count();
        assert!(dark(&across) > 500);
        assert_eq!(dark(&across), dark(&up));
    }
}
