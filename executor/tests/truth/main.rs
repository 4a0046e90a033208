//! What makes the executor's training real: it equals a reference, whatever the layout.

mod common;
mod huggingface;
mod layouts;
