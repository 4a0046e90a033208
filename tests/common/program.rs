//! The program as a test starts it.

use std::process::Command;

/// The program, told nothing of a launcher, of a device or of colours.
pub(crate) fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moefold"));
    command.args(arguments).env("NO_COLOR", "1");
    for (name, _) in std::env::vars() {
        if name.starts_with("SLURM_") || name.starts_with("MOEFOLD_") {
            command.env_remove(name);
        }
    }
    for name in [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ] {
        command.env_remove(name);
    }
    command
}
