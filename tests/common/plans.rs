//! A folder with plans of the tiny Mixtral for several numbers of ranks.

use super::tiny::Folder;

/// A folder with a plan `RANKS.json` for each number of ranks, of eight sequences a step.
pub(crate) struct Bench(pub(crate) Folder);

impl Bench {
    /// Plans of layouts, each after its number of ranks.
    pub(crate) fn new(layouts: &[(&str, &str)]) -> Self {
        let folder = Folder::new();
        for (ranks, layout) in layouts {
            folder.plan(&format!("{ranks}.json"), ranks, "8", Some(layout), &[]);
        }
        Self(folder)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.path(name)
    }
}
