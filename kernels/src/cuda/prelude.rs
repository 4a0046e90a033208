//! The prelude: headers that every program includes, compiled into this one.

/// Name as included, and text, of the headers of a GPU. A machine on the CPU has a `prelude/host.cuh` in
/// place of `prelude/gpu.cuh`.
pub const HEADERS: [(&str, &str); 4] = [
    ("prelude.cuh", include_str!("prelude.cuh")),
    ("prelude/gpu.cuh", include_str!("prelude/gpu.cuh")),
    ("prelude/pieces.cuh", include_str!("prelude/pieces.cuh")),
    ("prelude/tiles.cuh", include_str!("prelude/tiles.cuh")),
];
