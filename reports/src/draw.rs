//! Pictures: a [`scene::Scene`] of simple shapes, written as SVG or PNG.
//!
//! A plot is laid out once, in logical pixels, with the metrics of the embedded font; both painters
//! draw the same shapes. SVG is written directly, so that shapes can carry tooltips and classes that
//! a page restyles for a dark background; PNG goes through plotters' bitmap backend.

pub(crate) mod axis;
pub(crate) mod color;
pub(crate) mod font;
pub(crate) mod png;
pub(crate) mod scene;
pub(crate) mod svg;
