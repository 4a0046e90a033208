//! JSON as a test reads it.

use std::path::Path;

use serde_json::Value;

/// The document of a file.
pub(crate) fn read(path: impl AsRef<Path>) -> Value {
    let path = path.as_ref();
    let text = std::fs::read_to_string(path);
    document(&text.unwrap_or_else(|error| panic!("{}: {error}", path.display())))
}

/// The one document of a text.
pub(crate) fn document(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}
