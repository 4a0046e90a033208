//! Output of nccl-tests (`all_reduce_perf` and the others; rccl-tests print the same): the network's
//! curves.
//!
//! The list of devices says how many ranks there are and how they sit on hosts. A row has `size` (the
//! full buffer of a rank, as [`Collective::bytes`] counts it), `count`, `type`, and for each of
//! out-of-place and in-place the time in microseconds and two rates; `redop` and `root` are missing in
//! some versions. Both times of a row are timings of its key. Which test ran is named in a line of its
//! own (`# Collective test starting: all_reduce_perf`), or by the command that was typed, or by the name
//! of the file. Lines of other programs in between are passed over.

use std::collections::BTreeMap;

use super::gathered::{Imported, Leftovers, Timings, of_one_domain};
use super::source::{File, Format, ImportError, untagged};
use crate::collective::{Collective, CollectiveKind};
use crate::directory::{Key, Taken};
use crate::presets;
use crate::units::Bytes;

/// Tests and what they time. The others (`gather`, `scatter`, `reduce`, `hypercube`) have no key.
const TESTS: [(&str, CollectiveKind); 6] = [
    ("all_reduce_perf", CollectiveKind::AllReduce),
    ("all_gather_perf", CollectiveKind::AllGather),
    ("reduce_scatter_perf", CollectiveKind::ReduceScatter),
    ("alltoall_perf", CollectiveKind::AllToAll),
    ("sendrecv_perf", CollectiveKind::SendRecv),
    ("broadcast_perf", CollectiveKind::Broadcast),
];

/// Whether a line is one that nccl-tests begin their table with.
pub(super) fn is_header(line: &str) -> bool {
    Columns::of(untagged(line)).is_some()
}

/// What the header of a table says of its rows.
#[derive(Debug, Clone, Copy)]
struct Columns {
    /// Measured columns: a time, two rates and often a count of errors, once or twice.
    measured: usize,
    /// Of them, those of one measurement.
    each: usize,
    /// Whether the last of these counts wrong results.
    checked: bool,
}

impl Columns {
    /// `#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong`.
    fn of(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.strip_prefix('#')?.split_whitespace().collect();
        let is_time = |word: &str| matches!(word, "time" | "cputime");
        let first = words.iter().position(|word| is_time(word))?;
        let measurements = words.iter().filter(|word| is_time(word)).count();
        let measured = words.len() - first;
        let known = words.starts_with(&["size", "count", "type"]) && words.contains(&"busbw");
        (known && measured.is_multiple_of(measurements)).then(|| Self {
            measured,
            each: measured / measurements,
            checked: words.ends_with(&["#wrong"]),
        })
    }
}

/// Where the ranks of a test sit.
#[derive(Debug, Default)]
struct Ranks {
    /// Ranks by group and host.
    seats: BTreeMap<(u32, String), u32>,
    device: Option<String>,
}

impl Ranks {
    /// The largest group, and the most of it on one host.
    fn largest(&self) -> Option<[u32; 2]> {
        let mut groups: BTreeMap<u32, [u32; 2]> = BTreeMap::new();
        for ((group, _), &ranks) in &self.seats {
            let [all, of_host] = groups.entry(*group).or_default();
            *all += ranks;
            *of_host = ranks.max(*of_host);
        }
        groups.into_values().max()
    }
}

/// `#  Rank  0 Group  0 Pid  944 on host device  0 [0x0f] NVIDIA H100 80GB HBM3`: group, host (empty
/// where it is not printed) and device.
fn seat(line: &str) -> Option<(u32, String, String)> {
    let words: Vec<&str> = line.trim_start_matches('#').split_whitespace().collect();
    let after = |word: &str| {
        let at = words.iter().position(|other| *other == word)?;
        words.get(at + 1).copied()
    };
    if !line.starts_with('#') || words.first() != Some(&"Rank") {
        return None;
    }
    after("Rank")?.parse::<u32>().ok()?;
    let group = after("Group").and_then(|group| group.parse().ok());
    let host = after("on").filter(|word| *word != "device").unwrap_or("");
    let device = line
        .rsplit_once(']')
        .map_or("", |(_, device)| device.trim());
    Some((group.unwrap_or(0), host.to_owned(), device.to_owned()))
}

/// The test that a line names, whatever stands before its name and an underscore: `nccl_all_reduce_perf`, `all_reduce_perf_mpi`.
fn test_in(line: &str) -> Option<&str> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let names = line.split(|c| !word(c));
    let mut names = names.map(|name| name.strip_suffix("_mpi").unwrap_or(name));
    let named = names.find(|name| name.ends_with("_perf"))?;
    let known = TESTS.iter().map(|(test, _)| *test);
    let known = known.filter(|test| {
        let before = named.strip_suffix(test);
        before.is_some_and(|before| before.is_empty() || before.ends_with('_'))
    });
    Some(known.max_by_key(|test| test.len()).unwrap_or(named))
}

pub(super) fn read(file: &File<'_>) -> Result<Imported, ImportError> {
    let mut timings = Timings::default();
    let mut leftovers = Leftovers::default();
    let (mut ranks, mut rows) = (Ranks::default(), 0_u64);
    let (mut test, mut columns) = (None, None);
    let mut device = None;
    let name = file.name();
    for (index, line) in file.text.lines().map(untagged).enumerate() {
        if let Some((group, host, gpu)) = seat(line) {
            // A list after a table is that of another test.
            if rows > 0 {
                (ranks, rows) = (Ranks::default(), 0);
            }
            *ranks.seats.entry((group, host)).or_default() += 1;
            ranks.device.get_or_insert(gpu);
            continue;
        }
        if let Some(named) = test_in(line) {
            test = Some(named);
            continue;
        }
        if let Some(found) = Columns::of(line) {
            columns = Some(found);
            continue;
        }
        let Some(row) = columns.and_then(|columns| row(line, columns)) else {
            continue;
        };
        let place = format!("line {}", index + 1);
        let row = row.map_err(|found| {
            let expected = "size, count, type, then the columns that the header names, times in us";
            file.malformed(place.clone(), found, expected)
        })?;
        rows += 1;
        let [group, of_host] = ranks.largest().ok_or_else(|| {
            let expected =
                "a list of devices before it: `# Rank 0 Group 0 Pid 1 on HOST device 0 [..] NAME`";
            file.malformed(place.clone(), "a table", expected)
        })?;
        let Some(named) = test.or_else(|| test_in(&name)) else {
            let names = TESTS.map(|(name, _)| name).join(", ");
            let expected = format!(
                "a line before it, or a name of the file, that says which test this is: {names}"
            );
            return Err(file.malformed(place, "a table", expected));
        };
        let vendor = ranks.device.as_deref().filter(|name| !name.is_empty());
        let vendor = vendor.map(presets::gpu_name);
        let gpu = match &device {
            None => file.device(vendor.as_deref())?,
            Some(known) if file.device.is_none() && vendor.as_ref() != Some(known) => {
                let found = vendor.unwrap_or_else(|| "no device".to_owned());
                return Err(file.malformed(place, found, format!("{known}, as before it")));
            }
            Some(known) => known.clone(),
        };
        let seconds: f64 = row.times.iter().sum::<f64>() * 1e-6;
        let found = TESTS.iter().find(|(name, _)| *name == named);
        let is_one = group > 1 && !row.has_wrong;
        let (Some(&(_, kind)), true, true) = (found, is_one, row.size > 0) else {
            let why = match found {
                Some(_) if row.has_wrong => "wrong results",
                None => "prices know no such collective",
                Some(_) if group < 2 => "a group of one rank",
                Some(_) => "no bytes",
            };
            leftovers.add(named, why, Some(seconds));
            device = Some(gpu);
            continue;
        };
        let key = key(kind, row.size, &gpu, [group, of_host]);
        for time in row.times {
            timings.add(Key::Collective(key), time * 1e-6);
        }
        device = Some(gpu);
    }
    let left_out = leftovers.into_list(None);
    let Some(device) = device.filter(|_| !timings.is_empty()) else {
        let why = left_out.first().map_or_else(
            || "no row with bytes and a time, of a group of more than one rank".to_owned(),
            |most| {
                format!(
                    "{} rows of {} are left out: {}",
                    most.count, most.name, most.why
                )
            },
        );
        return Err(file.nothing(Format::NcclTests, why));
    };
    Ok(Imported {
        format: Format::NcclTests,
        profile: file.profile(&device, timings.into_samples(Taken::Repeated)),
        left_out,
        device_time: None,
        notes: Vec::new(),
    })
}

/// What a row of so many bytes times, in a group of ranks of which so many are on a host.
fn key(kind: CollectiveKind, size: u64, gpu: &str, [group, of_host]: [u32; 2]) -> Collective {
    let pair = kind == CollectiveKind::SendRecv;
    // Ranks send in a ring: of a pair of neighbours, the slowest crosses hosts where there are some.
    let of_domain = of_one_domain(gpu, group, of_host);
    Collective {
        kind,
        bytes: Bytes(size),
        ranks: if pair { 2 } else { group },
        ranks_per_domain: match pair {
            true if of_domain < group => 1,
            true => 2,
            false => of_domain,
        },
    }
}

/// A row of a table.
struct Row {
    size: u64,
    /// Microseconds, out of place and in place, as far as they were measured.
    times: Vec<f64>,
    /// Whether some of what arrived was not what was sent.
    has_wrong: bool,
}

/// A row, where a line is one: it begins with two whole numbers and a type. An operation and a root may
/// stand before the measured columns, and are blank in some versions.
fn row(line: &str, columns: Columns) -> Option<Result<Row, String>> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [size, count, dtype, rest @ ..] = &words[..] else {
        return None;
    };
    let size: u64 = size.parse().ok()?;
    count.parse::<u64>().ok()?;
    if !dtype.starts_with(|c: char| c.is_ascii_alphabetic()) {
        return None;
    }
    let before = rest.len().checked_sub(columns.measured);
    let Some(before) = before.filter(|before| *before <= 2) else {
        return Some(Err(format!("`{}`", line.trim())));
    };
    let (mut times, mut has_wrong) = (Vec::new(), false);
    for measured in rest[before..].chunks(columns.each) {
        let (time, wrong) = (measured[0], measured[columns.each - 1]);
        has_wrong |= columns.checked && wrong.parse().is_ok_and(|wrong: f64| wrong > 0.0);
        match time.parse::<f64>() {
            Ok(time) if time.is_finite() && time > 0.0 => times.push(time),
            // Not run in place, or nothing was sent.
            Ok(0.0) => {}
            Err(_) if time == "N/A" => {}
            _ => return Some(Err(format!("a time of `{time}`"))),
        }
    }
    if times.is_empty() && size > 0 {
        return Some(Err(format!("no time in `{}`", line.trim())));
    }
    Some(Ok(Row {
        size,
        times,
        has_wrong,
    }))
}
