//! Models known by name.
