//! What can be wrong with a model that someone names or writes.
//!
//! One variant a kind of mistake; every message says where it was found, what was found, what was
//! expected, and what would work.

/// Why a model could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file could not be read.
    #[error("cannot read {file} (give a preset name, a config.json, or a folder that holds one)")]
    Io {
        /// Path tried.
        file: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not JSON.
    #[error("{file} is not JSON; expected a Hugging Face config.json")]
    Json {
        /// Where it came from.
        file: String,
        /// What the parser said.
        source: serde_json::Error,
    },
    /// A key that the architecture cannot do without.
    #[error("{file}: key `{key}` is missing; expected {expected}")]
    Missing {
        /// Where it came from.
        file: String,
        /// The key, with the spellings that are accepted.
        key: String,
        /// What its value should be.
        expected: String,
    },
    /// A value of the wrong type or outside the range that makes sense.
    #[error("{file}: key `{key}` is {found}; expected {expected}")]
    Value {
        /// Where it came from.
        file: String,
        /// The key.
        key: String,
        /// The value found.
        found: String,
        /// What would work.
        expected: String,
    },
    /// Two keys that contradict each other.
    #[error("{file}: `{key}` = {found} does not fit {rule}; {fix}")]
    Inconsistent {
        /// Where it came from.
        file: String,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// The rule it breaks, with the other value.
        rule: String,
        /// What would work.
        fix: String,
    },
    /// A `model_type` this program does not read.
    #[error("{file}: model_type `{found}` is not known; nearest: {nearest}; known: {known}")]
    UnknownType {
        /// Where it came from.
        file: String,
        /// The type found.
        found: String,
        /// Types spelled alike.
        nearest: String,
        /// Every type read.
        known: String,
    },
    /// A name that is neither a preset nor a file.
    #[error(
        "no preset model and no file is called `{name}`; nearest presets: {nearest}; \
         `moefold models` lists all, and a path to a config.json or its folder works too"
    )]
    UnknownName {
        /// The name asked for.
        name: String,
        /// Presets spelled alike.
        nearest: String,
    },
    /// A folder without a model, whose name is no preset's either.
    #[error(
        "the folder `{name}` holds no config.json, and no preset model is called so; nearest presets: {nearest}"
    )]
    EmptyFolder {
        /// The name asked for.
        name: String,
        /// Presets spelled alike.
        nearest: String,
    },
    /// A name that several presets answer to.
    #[error("`{name}` could be any of {candidates}; write one of them in full")]
    AmbiguousName {
        /// The name asked for.
        name: String,
        /// Presets it fits.
        candidates: String,
    },
}
