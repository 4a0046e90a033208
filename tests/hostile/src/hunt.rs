//! Runs workers, finds the input that ended one, and makes it small.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use tempfile::TempDir;

use crate::target::Target;
use crate::worker::{ACCEPTED, HANGS, Limits, NUMBER};

/// Inputs that one worker reads: what readers keep for good is let go of with it.
const BATCH: u64 = 20_000;
/// Smaller inputs that are tried of one that ended a reader.
const TRIES: u32 = 400;
/// Kinds of ends of one reader after which it is let be.
const ENDS: usize = 10;
/// Bytes of an input that are shown.
const SHOWN: usize = 400;

/// A reader and what it is fed.
pub(crate) struct Hunt<'a> {
    pub(crate) target: Target,
    pub(crate) seed: u64,
    pub(crate) limits: Limits,
    /// Where inputs that end it are kept.
    pub(crate) keep: &'a Path,
}

/// How a worker ended.
enum End {
    /// All was read, of which so much was accepted; of one input what it was refused for.
    Read(u64, String),
    /// This input ended it.
    Ended { number: u64, how: String },
}

impl Hunt<'_> {
    /// Whether no input ends the reader.
    pub(crate) fn run(&self, inputs: u64, out: &mut impl Write) -> io::Result<bool> {
        let inputs = inputs.div_ceil(self.target.one_of);
        let begun = Instant::now();
        let corpus = self.target.corpus()?;
        let (mut at, mut accepted) = (0, 0);
        let mut ends = BTreeSet::new();
        while at < inputs && ends.len() < ENDS {
            let to = inputs.min(at + BATCH);
            let drawn = [
                ("--worker", at.to_string()),
                ("--inputs", to.to_string()),
                ("--seed", self.seed.to_string()),
            ];
            match self.worker(&drawn)? {
                End::Read(count, _) => {
                    accepted += count;
                    at = to;
                }
                End::Ended { number, how } => {
                    at = number + 1;
                    let kind = kind(&how);
                    if ends.insert(kind.clone()) {
                        let input = corpus.input(self.seed, number);
                        self.say(number, input, &how, &kind, out)?;
                    }
                }
            }
        }
        let held = if ends.is_empty() { "held" } else { "ENDED" };
        writeln!(
            out,
            "{:<20} {held}: {at} inputs, {accepted} accepted, {:.1} s",
            self.target.name,
            begun.elapsed().as_secs_f64()
        )?;
        out.flush()?;
        Ok(ends.is_empty())
    }

    /// The same of one input.
    pub(crate) fn file(&self, file: &Path, out: &mut impl Write) -> io::Result<bool> {
        let end = self.read_alone(file)?;
        let said = match &end {
            End::Read(0, why) => format!("refused: {why}"),
            End::Read(..) => "accepted".to_owned(),
            End::Ended { how, .. } => how.clone(),
        };
        writeln!(out, "{:<20} {}: {said}", self.target.name, file.display())?;
        Ok(matches!(end, End::Read(..)))
    }

    fn read_alone(&self, file: &Path) -> io::Result<End> {
        let file = file.to_str().ok_or(io::ErrorKind::InvalidInput)?;
        self.worker(&[("--worker", "0".to_owned()), ("--file", file.to_owned())])
    }

    fn worker(&self, flags: &[(&str, String)]) -> io::Result<End> {
        let notes = folder()?;
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["--target", self.target.name])
            .arg("--notes")
            .arg(notes.path())
            .args(["--seconds", &self.limits.seconds.to_string()])
            .args(["--memory-mib", &(self.limits.bytes >> 20).to_string()])
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null());
        for (flag, value) in flags {
            command.args([*flag, value]);
        }
        let ended = command.output()?;
        let word = |name| -> io::Result<u64> {
            let bytes = std::fs::read(notes.path().join(name))?;
            let word = bytes.try_into().map_err(|_| io::ErrorKind::UnexpectedEof)?;
            Ok(u64::from_le_bytes(word))
        };
        if ended.status.success() {
            let why = String::from_utf8_lossy(&ended.stdout).trim().to_owned();
            return Ok(End::Read(word(ACCEPTED)?, why));
        }
        let said = String::from_utf8_lossy(&ended.stderr);
        let Ok(number) = word(NUMBER) else {
            return Err(io::Error::other(format!(
                "the reader of {} ended before its first input: {said}",
                self.target.name
            )));
        };
        let how = format!("{} ({})", said.trim(), ended.status);
        Ok(End::Ended { number, how })
    }

    /// Makes an input small, keeps it and shows it.
    fn say(
        &self,
        number: u64,
        input: Vec<u8>,
        how: &str,
        kind: &str,
        out: &mut impl Write,
    ) -> io::Result<()> {
        let input = self.smaller(input, kind)?;
        std::fs::create_dir_all(self.keep)?;
        let name = format!("{}-{}-{number}", self.target.name, self.seed);
        let path: PathBuf = self.keep.join(name);
        std::fs::write(&path, &input)?;
        let shown = &input[..input.len().min(SHOWN)];
        writeln!(
            out,
            "{} ended by input {number} of seed {}, made small to {} bytes in {}:\n  {}\n  {how}",
            self.target.name,
            self.seed,
            input.len(),
            path.display(),
            shown.escape_ascii()
        )?;
        out.flush()
    }

    /// The input without parts that it ends the reader without, in the same way.
    fn smaller(&self, mut input: Vec<u8>, kind: &str) -> io::Result<Vec<u8>> {
        let folder = folder()?;
        let file = folder.path().join("input");
        let mut tries = 0;
        let mut size = input.len().div_ceil(2);
        while size > 0 {
            let mut at = 0;
            let before = input.len();
            while at < input.len() && tries < TRIES {
                tries += 1;
                let after = (at + size).min(input.len());
                let less = [&input[..at], &input[after..]].concat();
                std::fs::write(&file, &less)?;
                match self.read_alone(&file)? {
                    End::Ended { how, .. } if self::kind(&how) == kind => input = less,
                    _ => at = after,
                }
            }
            if tries >= TRIES {
                break;
            }
            if input.len() == before || size > 1 {
                size /= 2;
            }
        }
        Ok(input)
    }
}

/// A temporary folder, in memory where there is a file system of it: readers of files are fed many.
fn folder() -> io::Result<TempDir> {
    let memory = Path::new("/dev/shm");
    tempfile::tempdir_in(memory).or_else(|_| tempfile::tempdir())
}

/// What two ends have in common that are one defect: the place of a panic, else what the process says without numbers.
fn kind(how: &str) -> String {
    let first = how.lines().find(|line| !line.trim().is_empty());
    let first = first.unwrap_or_default();
    if let Some((_, place)) = first.split_once("panicked at ") {
        return place.to_owned();
    }
    if how.contains(HANGS) {
        return HANGS.to_owned();
    }
    let words = first.split(|c: char| c.is_ascii_digit());
    words.collect()
}
