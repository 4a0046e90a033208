//! [`Events`]: the steps of a run as TensorBoard reads them, `events.tfevents` in the run directory.
//!
//! The file is a sequence of records: the length of the data (u64), a checksum of that, the data, a checksum of
//! the data, all little-endian. A checksum is a CRC-32C, rotated and shifted (TensorFlow,
//! `tensorflow/core/lib/io/record_writer.h`). The data is a protocol buffer, an `Event`
//! (`tensorflow/core/util/event.proto`): the first names the version of the format, the others hold scalars.

use std::fs::File;
use std::io::{self, BufReader, Read as _};
use std::path::Path;

use moefold_profiles::run::StepRecord;
use moefold_profiles::units::GIB;

use super::log::Log;
use crate::error::Error;

/// The file in a run directory; TensorBoard looks for `tfevents` in names.
const EVENTS_FILE: &str = "events.tfevents";

/// Events that are being written.
#[derive(Debug)]
pub struct Events(Log);

impl Events {
    /// Those of a run in `dir`, which has none yet.
    pub fn of(dir: &Path) -> Self {
        Self(Log::new(dir.join(EVENTS_FILE)))
    }

    /// Those of a run that goes on in `dir` with step `first`: later ones go with the first that is written.
    pub(super) fn after(dir: &Path, first: u64) -> Result<Self, Error> {
        let path = dir.join(EVENTS_FILE);
        let kept = kept(&path, first).map_err(Error::io(&path, "read"))?;
        Ok(Self(Log::after(path, kept)))
    }

    /// Adds a step that ended at a time in seconds since 1970. It is in the file when this returns without an error,
    /// and with one the next step tries again.
    pub fn step(&mut self, step: &StepRecord, time_s: f64) -> Result<(), Error> {
        if self.0.is_empty() {
            let version = Message::default()
                .double(1, time_s)
                .bytes(3, b"brain.Event:2");
            self.0.add(&record(&version.0));
        }
        self.0.add(&record(&scalars(step, time_s).0));
        self.flush()
    }

    /// Writes what could not be written before.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.0.flush()
    }
}

/// A step as an event.
fn scalars(step: &StepRecord, time_s: f64) -> Message {
    let fixed = [
        ("loss", step.loss),
        ("aux_loss", step.aux_loss),
        ("z_loss", step.z_loss),
        ("grad_norm", step.grad_norm),
        ("lr", step.lr),
        ("step_s", step.step_s),
        ("tokens_per_s", step.tokens_per_s),
        ("peak_gib", step.peak_bytes.0 as f64 / GIB as f64),
        ("dropped", step.dropped as f64),
    ];
    let fixed = fixed.map(|(tag, value)| (tag.to_owned(), value));
    let busiest = step.expert_load.iter().enumerate().map(|(layer, load)| {
        let mean = load.iter().sum::<u64>() as f64 / load.len().max(1) as f64;
        let most = load.iter().max().map_or(0.0, |&most| most as f64);
        (format!("busiest_expert/{layer}"), most / mean.max(1.0))
    });
    let validation = step.validation.iter().flat_map(|validation| {
        [
            ("validation_loss".to_owned(), validation.loss),
            ("validation_perplexity".to_owned(), validation.perplexity),
        ]
    });
    let values = fixed.into_iter().chain(busiest).chain(validation);
    let summary = values.fold(Message::default(), |summary, (tag, value)| {
        let value = Message::default()
            .bytes(1, tag.as_bytes())
            .float(2, value as f32);
        summary.bytes(1, &value.0)
    });
    Message::default()
        .double(1, time_s)
        .varint(2, step.step)
        .bytes(5, &summary.0)
}

fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend(length);
    record.extend(masked(&length));
    record.extend(data);
    record.extend(masked(data));
    record
}

/// Bytes of the leading whole records that are of no step from `first` on; none where there is no file.
fn kept(path: &Path, first: u64) -> io::Result<u64> {
    let mut file = match File::open(path) {
        Ok(file) => BufReader::new(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(error),
    };
    let mut kept = 0;
    loop {
        let mut found = Vec::new();
        (&mut file).take(12).read_to_end(&mut found)?;
        let Some((length, sum)) = found.split_first_chunk::<8>() else {
            return Ok(kept);
        };
        if sum != masked(length) {
            return Ok(kept);
        }
        let length = u64::from_le_bytes(*length);
        let mut data = Vec::new();
        (&mut file).take(length).read_to_end(&mut data)?;
        let mut sum = Vec::new();
        (&mut file).take(4).read_to_end(&mut sum)?;
        if sum != masked(&data) || step_of(&data).is_some_and(|step| step >= first) {
            return Ok(kept);
        }
        kept += 16 + length;
    }
}

/// The step of an event as [`scalars`] spells it; none of the one that names the version.
fn step_of(event: &[u8]) -> Option<u64> {
    let (_time, rest) = event.split_at_checked(9)?;
    let (2_u8, digits) = (rest.first()? >> 3, &rest[1..]) else {
        return None;
    };
    let end = digits.iter().position(|digit| digit & 0x80 == 0)?;
    let step = digits[..=end].iter().enumerate();
    Some(step.fold(0, |step, (at, digit)| {
        step | u64::from(digit & 0x7f) << (7 * at).min(63)
    }))
}

fn masked(data: &[u8]) -> [u8; 4] {
    let sum = crc32c::crc32c(data).rotate_right(15);
    sum.wrapping_add(0xa282_ead8).to_le_bytes()
}

/// A protocol buffer: fields by number, each with how it is spelled.
#[derive(Debug, Default)]
struct Message(Vec<u8>);

impl Message {
    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn varint(mut self, field: u8, value: u64) -> Self {
        self.0.push(field << 3);
        self.raw_varint(value);
        self
    }

    fn double(mut self, field: u8, value: f64) -> Self {
        self.0.push(field << 3 | 1);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn bytes(mut self, field: u8, value: &[u8]) -> Self {
        self.0.push(field << 3 | 2);
        self.raw_varint(value.len() as u64);
        self.0.extend(value);
        self
    }

    fn float(mut self, field: u8, value: f32) -> Self {
        self.0.push(field << 3 | 5);
        self.0.extend(value.to_le_bytes());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by TensorBoard's own `RecordWriter`: the version at 1.5 s, then at 2.25 s of step 300 `loss` 0.5
    /// and `lr` 0.001.
    const GOLDEN: &str = "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c\
                          2600000000000000734fe30009000000000000024010ac022a180a0b0a046c6f7373150000003f\
                          0a090a026c72156f12833a381ffa6b";

    #[test]
    fn golden_records_are_tensorboards() {
        let value = |tag: &[u8], value| Message::default().bytes(1, tag).float(2, value);
        let summary = Message::default()
            .bytes(1, &value(b"loss", 0.5).0)
            .bytes(1, &value(b"lr", 0.001).0);
        let event = Message::default()
            .double(1, 2.25)
            .varint(2, 300)
            .bytes(5, &summary.0);
        let folder = tempfile::tempdir().expect("a temporary folder");
        let version = Message::default().double(1, 1.5).bytes(3, b"brain.Event:2");
        let mut events = Events::of(folder.path());
        events.0.add(&record(&version.0));
        events.0.add(&record(&event.0));
        events.flush().expect("written");
        let bytes = std::fs::read(folder.path().join(EVENTS_FILE)).expect("there");
        let hex: String = bytes
            .iter()
            .flat_map(|byte| [byte >> 4, byte & 15])
            .map(|digit| char::from_digit(u32::from(digit), 16).expect("four bits"))
            .collect();
        assert_eq!(hex, GOLDEN);
    }

    #[test]
    fn events_go_on_after_those_of_steps_that_are_not_done_again() {
        let line = r#"{"step": 0, "loss": 5.25, "grad_norm": 1.5, "lr": 0.1, "step_s": 0.5, "tokens_per_s": 64,
            "peak_bytes": 1, "expert_load": []}"#;
        let step: StepRecord = serde_json::from_str(line).expect("a step");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join(EVENTS_FILE);
        let write = |mut events: Events, steps: std::ops::Range<u64>| {
            for number in steps {
                let step = StepRecord {
                    step: number,
                    ..step.clone()
                };
                events.step(&step, 1.5).expect("written");
            }
            std::fs::read(&path).expect("there")
        };
        let whole = write(Events::of(folder.path()), 0..140);
        let expected = write(Events::after(folder.path(), 0).expect("reads"), 0..131);
        assert!(whole.starts_with(&expected) && whole.len() > expected.len());
        for (rest, first) in [
            (&b""[..], 129),
            (b"", 3),
            (&whole[40..60], 131),
            (&whole[..9], 129),
        ] {
            std::fs::write(&path, [&expected[..], rest].concat()).expect("writes");
            let events = Events::after(folder.path(), first).expect("reads");
            assert!(write(events, first..140) == whole, "from {first}");
        }
    }

    #[test]
    fn a_step_has_its_scalars_and_the_busiest_expert_of_each_layer() {
        let line = r#"{"step": 3, "loss": 5.25, "grad_norm": 1.5, "lr": 0.1, "step_s": 0.5, "tokens_per_s": 64,
            "peak_bytes": 1073741824, "expert_load": [[1, 3], [2, 2]],
            "validation": {"loss": 2.5, "perplexity": 12.25, "samples": 8, "eval_s": 0.5}}"#;
        let step: StepRecord = serde_json::from_str(line).expect("a step");
        let bytes = scalars(&step, 0.0).0;
        let has = |tag: &str, value: f32| {
            let value = Message::default()
                .bytes(1, tag.as_bytes())
                .float(2, value)
                .0;
            bytes.windows(value.len()).any(|window| window == value)
        };
        for (tag, value) in [
            ("loss", 5.25),
            ("peak_gib", 1.0),
            ("busiest_expert/0", 1.5),
            ("busiest_expert/1", 1.0),
            ("validation_loss", 2.5),
            ("validation_perplexity", 12.25),
        ] {
            assert!(has(tag, value), "{tag}");
        }
    }
}
