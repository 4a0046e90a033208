//! What a command says: text for a person, or one JSON document, on stdout; progress on stderr.

use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

use anyhow::Context as _;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::failure::Failure;

/// Between two pictures of work that goes on.
const TICK: Duration = Duration::from_millis(200);

/// Where a command's answer goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    /// Print the machine-readable answer and nothing else.
    pub(crate) json: bool,
    /// Leave out everything but the answer.
    pub(crate) quiet: bool,
    /// Say everything, not a selection.
    pub(crate) verbose: bool,
}

impl Output {
    /// Prints the answer: as JSON where that was asked for, else the text.
    pub(crate) fn answer<T: Serialize>(
        self,
        value: &T,
        text: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        let shown = if self.json {
            let mut shown = serde_json::to_string_pretty(value)
                .context("the answer could not be written as JSON")
                .map_err(Failure::Runtime)?;
            shown.push('\n');
            shown
        } else {
            text()
        };
        io::stdout().write_all(shown.as_bytes())?;
        Ok(())
    }

    /// Says something beside the answer; silent with `--json` and `--quiet`.
    pub(crate) fn say(self, line: &str) -> io::Result<()> {
        if !self.json && !self.quiet {
            writeln!(io::stdout(), "{line}")?;
        }
        Ok(())
    }

    /// Says on stderr what a user should know about the answer; silent with `--quiet`.
    pub(crate) fn note(self, line: &str) -> Result<(), Failure> {
        if !self.quiet {
            writeln!(io::stderr(), "note: {line}")?;
        }
        Ok(())
    }

    /// Says on stderr what is not as it was asked for, whatever is to be printed.
    pub(crate) fn warn(line: &str) -> Result<(), Failure> {
        writeln!(io::stderr(), "warning: {line}")?;
        Ok(())
    }

    /// A progress bar on stderr; hidden unless stderr is a terminal.
    pub(crate) fn progress(self, length: u64, what: &'static str) -> ProgressBar {
        if self.quiet || !io::stderr().is_terminal() {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new(length).with_message(what);
        let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}")
            .expect("the template is valid");
        bar.set_style(style);
        bar
    }

    /// A line on stderr about work of no known length, which moves while it lasts; hidden unless stderr is a terminal.
    pub(crate) fn spinner(self, what: &'static str) -> ProgressBar {
        if self.quiet || !io::stderr().is_terminal() {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new_spinner().with_message(what);
        bar.enable_steady_tick(TICK);
        bar
    }
}
