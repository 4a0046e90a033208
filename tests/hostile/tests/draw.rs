//! A short draw of hostile inputs for every reader, and whether a hunt finds what is planted.

use std::path::Path;
use std::process::{Command, Output};

fn hostile(keep: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_moefold-hostile"))
        .args(arguments)
        .arg("--keep")
        .arg(keep)
        .output()
        .expect("the program runs")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn law_no_input_ends_a_reader() {
    let keep = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let seed = std::env::var("MOEFOLD_SEED").unwrap_or_else(|_| "1".to_owned());
    // Unoptimized libraries take their time; to draw the plots of a page they take longer than an input may.
    let mut arguments = vec!["--inputs", "300", "--seconds", "5", "--seed", &seed];
    let all = said(&hostile(keep, &["--list"]));
    for line in all.lines() {
        let name = line.split_whitespace().next().expect("a name");
        if name != "pictures" {
            arguments.extend(["--target", name]);
        }
    }
    let output = hostile(keep, &arguments);
    let said = said(&output);
    assert!(output.status.success(), "seed {seed}:\n{said}");
    let lines = said
        .lines()
        .filter(|line| line.contains(" held: 300 inputs"));
    assert!(lines.count() >= 30, "{said}");
    // What a reader refuses at once is no test of it: all begin with inputs that they accept.
    let refused = said.lines().find(|line| line.contains(" 0 accepted"));
    assert_eq!(refused, None, "{said}");
}

#[test]
fn law_a_planted_defect_is_found_made_small_and_kept() {
    for (target, how) in [
        ("planted-panic", "a planted defect"),
        ("planted-hang", "hangs"),
        ("planted-memory", "memory allocation of"),
        ("planted-stack", "overflowed its stack"),
    ] {
        let keep = tempfile::tempdir().expect("a temporary folder");
        let arguments = [
            "--target",
            target,
            "--inputs",
            "300",
            "--seconds",
            "0.1",
            "--memory-mib",
            "64",
        ];
        let output = hostile(keep.path(), &arguments);
        let said = said(&output);
        assert_eq!(output.status.code(), Some(1), "{target}: {said}");
        assert!(said.contains(how), "{target}: {said}");
        let files: Vec<_> = std::fs::read_dir(keep.path())
            .expect("a folder")
            .map(|file| std::fs::read(file.expect("a file").path()).expect("readable"))
            .collect();
        assert_eq!(files, [b"-1"], "{target}: made small: {said}");
    }
}

#[test]
fn what_is_no_reader_is_refused_with_those_there_are() {
    let keep = tempfile::tempdir().expect("a temporary folder");
    let output = hostile(keep.path(), &["--target", "confg"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("--target confg: expected one of config, cluster, plan"),
        "{said}"
    );
}
