//! From what someone typed to a [`Model`]: a preset's name, a file, or a folder.
//!
//! A name that is a preset's exactly (case and punctuation aside) means the preset; write `./name`
//! for a folder of that name. Otherwise a file, or a folder with a `config.json`, wins
//! over a shortened preset name.

use std::path::Path;

use moefold_profiles::nearest::closest;

use super::{Model, ModelError, hf, presets};

impl Model {
    /// Reads the model that an argument means: a preset's name, a `config.json`, or a folder that
    /// holds one.
    pub fn resolve(argument: impl AsRef<Path>) -> Result<Self, ModelError> {
        let path = argument.as_ref();
        let Some(argument) = path.to_str() else {
            return hf::read(path);
        };
        let exact = presets::names().any(|name| plain(name) == plain(argument));
        let holds_model = path.is_file() || path.join("config.json").is_file();
        let looks_like_path = argument.starts_with(['.', '/', '~'])
            || path
                .extension()
                .is_some_and(|extension| extension == "json");
        if looks_like_path || (!exact && holds_model) {
            return hf::read(path);
        }
        match presets::load(argument) {
            Err(ModelError::UnknownName { name, nearest }) if path.is_dir() => {
                Err(ModelError::EmptyFolder { name, nearest })
            }
            found => found,
        }
    }
}

/// What a name was found to mean among others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found<'a> {
    /// The one at this index.
    One(usize),
    /// Any of these.
    Many(Vec<usize>),
    /// None; these are spelled most alike.
    None(Vec<&'a str>),
}

/// Looks a name up: equal, else the only one that begins so, else the only one that contains it.
pub(super) fn look_up<'a>(name: &str, among: &[&'a str]) -> Found<'a> {
    let bare = name.rsplit('/').next().unwrap_or(name);
    let wanted = plain(bare);
    if !wanted.is_empty() {
        type Fits = fn(&str, &str) -> bool;
        let fits: [Fits; 3] = [
            |candidate, wanted| candidate == wanted,
            |candidate, wanted| candidate.starts_with(wanted),
            |candidate, wanted| candidate.contains(wanted),
        ];
        for fits in fits {
            let hits: Vec<usize> = (0..among.len())
                .filter(|index| fits(&plain(among[*index]), &wanted))
                .collect();
            match hits.as_slice() {
                [] => {}
                [one] => return Found::One(*one),
                _ => return Found::Many(hits),
            }
        }
    }
    Found::None(closest(bare, among.iter().copied()))
}

/// A name without case and punctuation.
fn plain(name: &str) -> String {
    name.chars()
        .filter(|c| c.is_alphanumeric())
        .flat_map(char::to_lowercase)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_and_a_file_are_read_and_named_after_themselves() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let inner = folder.path().join("My-Model");
        std::fs::create_dir(&inner).expect("writable");
        let file = inner.join("config.json");
        let config = presets::find("quickstart").expect("a preset").config();
        std::fs::write(&file, config).expect("writable");
        for path in [&inner, &file] {
            let model = Model::resolve(path).expect("readable");
            assert_eq!(model.name, "My-Model");
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = Model::resolve("./nowhere.json").expect_err("missing");
        assert!(error.to_string().contains("./nowhere.json"), "{error}");
        // A folder below this crate that holds none.
        let error = Model::resolve("src").expect_err("missing");
        let error = error.to_string();
        assert!(
            error.contains("`src` holds no config.json") && error.contains("nearest presets"),
            "{error}"
        );
    }
}
