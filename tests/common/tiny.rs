//! The tiny Mixtral of the fixtures: where it lies, plans for it, and what its runs leave.

use std::fs;
use std::path::Path;

use moefold_profiles::run::StepRecord;
use tempfile::TempDir;

use super::outcome::run;
use super::program::program;

/// A file or a folder of the fixtures.
pub(crate) fn fixture(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("tests/fixtures").join(name).display().to_string()
}

/// The tiny Mixtral's tokens, as `--data` names them.
pub(crate) fn tokens() -> String {
    fixture("mixtral/tokens")
}

/// A folder with plans for the tiny Mixtral.
pub(crate) struct Folder(pub(crate) TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    /// Plans `ranks` on this machine with `sequences` of 16 tokens a step: this layout, whose dispatcher is an
    /// all-to-all, or what a search finds. `rest` are further flags.
    pub(crate) fn plan(
        &self,
        name: &str,
        ranks: &str,
        sequences: &str,
        layout: Option<&str>,
        rest: &[&str],
    ) {
        let (model, out) = (fixture("mixtral"), self.path(name));
        let first = [
            "plan",
            "--model",
            &model,
            "--cluster",
            "local",
            "--gpus",
            ranks,
            "--seq-len",
            "16",
            "--global-batch",
            sequences,
            "--out",
            &out,
        ];
        let layout: Vec<&str> = layout
            .iter()
            .flat_map(|layout| ["--layout", layout, "--dispatcher", "alltoall"])
            .collect();
        let (code, _, errors) = run(&mut program(&[&first, &layout[..], rest].concat()));
        assert_eq!(code, 0, "{errors}");
    }

    /// The steps of a run.
    pub(crate) fn steps(&self, run: &str) -> Vec<StepRecord> {
        let path = self.0.path().join(run).join("steps.jsonl");
        let text = fs::read_to_string(path).expect("steps were written");
        text.lines()
            .map(|line| serde_json::from_str(line).expect("a step"))
            .collect()
    }
}
