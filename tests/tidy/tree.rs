//! [`Tree`]: the files that the rules read, from the disk or made up for a test of the rules.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Manifests, sources and the architecture, by path from the root of the workspace.
#[derive(Debug, Clone)]
pub(crate) struct Tree {
    files: BTreeMap<String, String>,
}

/// A crate of the workspace.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    /// Its name without `moefold-`; that of the command line is `moefold`.
    pub(crate) name: String,
    /// Its folder from the root, with a slash at the end; empty of the command line.
    pub(crate) folder: String,
    pub(crate) manifest: toml::Table,
}

impl Tree {
    /// The workspace at `root`: its manifests, the sources of its members and `ARCHITECTURE.md`.
    pub(crate) fn load(root: &Path) -> Self {
        let mut tree = Self {
            files: BTreeMap::new(),
        };
        tree.read(root, "Cargo.toml");
        tree.read(root, "ARCHITECTURE.md");
        for folder in tree.folders() {
            if !folder.is_empty() {
                tree.read(root, &format!("{folder}Cargo.toml"));
            }
            tree.read_sources(root, &format!("{folder}src"));
        }
        tree
    }

    /// A tree of these files, each a path and its text.
    pub(crate) fn of(files: &[(&str, &str)]) -> Self {
        let owned = |(path, text): &(&str, &str)| ((*path).to_owned(), (*text).to_owned());
        Self {
            files: files.iter().map(owned).collect(),
        }
    }

    /// The same with `text` at `path`.
    pub(crate) fn with(mut self, path: &str, text: &str) -> Self {
        self.files.insert(path.to_owned(), text.to_owned());
        self
    }

    pub(crate) fn text(&self, path: &str) -> &str {
        let found = self.files.get(path);
        found.unwrap_or_else(|| panic!("{path} is not in the tree"))
    }

    pub(crate) fn toml(&self, path: &str) -> toml::Table {
        let parsed = self.text(path).parse();
        parsed.unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// The command line and the members that the manifest lists.
    pub(crate) fn members(&self) -> Vec<Member> {
        let folders = self.folders().into_iter();
        let member = |folder: String| {
            let manifest = self.toml(&format!("{folder}Cargo.toml"));
            let name = manifest["package"]["name"].as_str().expect("a name");
            Member {
                name: name.strip_prefix("moefold-").unwrap_or(name).to_owned(),
                folder,
                manifest,
            }
        };
        folders.map(member).collect()
    }

    /// Rust files of a member, path and text.
    pub(crate) fn sources(&self, member: &Member) -> impl Iterator<Item = (&str, &str)> {
        let src = format!("{}src/", member.folder);
        let found = self
            .files
            .iter()
            .filter(move |(path, _)| path.starts_with(&src));
        found.map(|(path, text)| (path.as_str(), text.as_str()))
    }

    fn folders(&self) -> Vec<String> {
        let manifest = self.toml("Cargo.toml");
        let members = manifest["workspace"]["members"].as_array().expect("a list");
        let listed = members.iter().map(|member| {
            let folder = member.as_str().expect("a folder");
            format!("{folder}/")
        });
        std::iter::once(String::new()).chain(listed).collect()
    }

    fn read(&mut self, root: &Path, path: &str) {
        let text = fs::read_to_string(root.join(path));
        let text = text.unwrap_or_else(|error| panic!("{path}: {error}"));
        self.files.insert(path.to_owned(), text);
    }

    fn read_sources(&mut self, root: &Path, folder: &str) {
        for entry in fs::read_dir(root.join(folder)).expect("the folder is readable") {
            let entry = entry.expect("the entry is readable");
            let name = entry.file_name().into_string().expect("names are UTF-8");
            let path = format!("{folder}/{name}");
            if entry.path().is_dir() {
                self.read_sources(root, &path);
            } else if entry
                .path()
                .extension()
                .is_some_and(|ending| ending == "rs")
            {
                self.read(root, &path);
            }
        }
    }
}
