//! Parameter and FLOP counts.
