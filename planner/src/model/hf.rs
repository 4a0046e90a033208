//! Reads Hugging Face configurations.
