//! What became of a program that a test ran.

use std::process::Command;

/// Runs it to its end: its exit code, standard output and standard error.
pub(crate) fn run(command: &mut Command) -> (i32, String, String) {
    let output = command.output().expect("the program starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().expect("no signal ended it");
    (code, text(&output.stdout), text(&output.stderr))
}
