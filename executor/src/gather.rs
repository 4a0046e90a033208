//! What the processes of a run hand rank 0 when they are done: how their time went, and their part of
//! the weights where those are wanted.
//!
//! Rank 0 writes what a run leaves behind. Rank threads share its memory; a rank that is a process of
//! its own sends messages over its connection, a slice of a tensor each, so that the sender needs no
//! second copy of its shard. Rank 0 holds what ranks have sent until it takes it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use moefold_profiles::run::RankPeak;
use moefold_profiles::trace::{Lane, TimeByCategory, TraceSpan};
use moefold_profiles::units::Seconds;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::profile::Described;
use crate::record::{Busy, SampledStep, StepTime};
use crate::transport::words::printable;
use crate::transport::{Payload, RankContext};
use crate::weights::{Collector, Rectangle, Region};

/// What one rank recorded over a run.
#[derive(Debug)]
pub(crate) struct RankRecord {
    /// By step.
    pub(crate) times: Vec<StepTime>,
    /// Of the traced steps.
    pub(crate) spans: Vec<TraceSpan>,
    /// By key of the cost tables.
    pub(crate) sampled: Vec<SampledStep>,
    /// The device, as a profile of it begins.
    pub(crate) device: Described,
    /// Its memory.
    pub(crate) peak: RankPeak,
}

/// A record on its way.
#[derive(Serialize, Deserialize)]
struct Sent {
    times: Vec<SentTime>,
    spans: Vec<TraceSpan>,
    sampled: Vec<SampledStep>,
    device: Described,
    peak: RankPeak,
}

#[derive(Serialize, Deserialize)]
struct SentTime {
    step: f64,
    time: TimeByCategory,
    hidden: TimeByCategory,
    busy: Vec<(Lane, String, Busy)>,
    host_reads: Vec<(String, f64)>,
}

/// Takes values of a region of a global tensor.
pub(crate) type Put<'a> = dyn FnMut(&Region<'_>, &[f32]) -> Result<(), Error> + 'a;

/// Hands over a rank's part of the weights.
type Weights<'a> = dyn Fn(&mut Put<'_>) -> Result<(), Error> + 'a;

/// Brings together at rank 0 what its process does not hold; every rank calls it when it is done. The
/// records that are here then: of a rank thread its own, of rank 0 in a process of its own all of them
/// in rank order, of other such ranks none. The weights are in `collector`, which rank threads share.
pub(crate) fn at_first(
    rank: &RankContext,
    record: RankRecord,
    weights: &Weights<'_>,
    collector: &Collector,
) -> Result<Vec<RankRecord>, Error> {
    if rank.is_apart() && rank.rank() > 0 {
        send(rank, record, weights)?;
        return Ok(Vec::new());
    }
    weights(&mut |region, values| {
        collector.put(region, values);
        Ok(())
    })?;
    let mut records = vec![record];
    if rank.is_apart() {
        for other in 1..rank.ranks() {
            records.push(receive(rank, other, collector)?);
        }
    }
    Ok(records)
}

/// Sends rank 0 all there is, from any other rank.
fn send(rank: &RankContext, record: RankRecord, weights: &Weights<'_>) -> Result<(), Error> {
    let times = record.times.into_iter().map(|time| SentTime {
        step: time.step.0,
        time: time.time,
        hidden: time.hidden,
        busy: time
            .busy
            .into_iter()
            .map(|((lane, name), busy)| (lane, name.to_owned(), busy))
            .collect(),
        host_reads: time
            .host_reads
            .into_iter()
            .map(|(name, count)| (name.to_owned(), count))
            .collect(),
    });
    let sent = Sent {
        times: times.collect(),
        spans: record.spans,
        sampled: record.sampled,
        device: record.device,
        peak: record.peak,
    };
    rank.send_first(words(&sent))?;
    weights(&mut |region, values| {
        rank.send_first(words(&Some(Rectangle::from(region))))?;
        rank.send_first(Payload::F32(values.to_vec().into()))?;
        Ok(())
    })?;
    Ok(rank.send_first(words(&None::<Rectangle>))?)
}

/// Takes at rank 0 what `from` sends.
fn receive(rank: &RankContext, from: u32, collector: &Collector) -> Result<RankRecord, Error> {
    let sent: Sent = read(from, &rank.receive(from)?)?;
    while let Some(rectangle) = read::<Option<Rectangle>>(from, &rank.receive(from)?)? {
        let Payload::F32(values) = rank.receive(from)? else {
            return Err(garbled(from, "values of a tensor are no floats"));
        };
        collector.put(&rectangle.region(), &values);
    }
    let times = sent.times.into_iter().map(|time| {
        let busy = time
            .busy
            .into_iter()
            .map(|(lane, name, busy)| ((lane, name_of_span(&name)), busy));
        StepTime {
            step: Seconds(time.step),
            time: time.time,
            hidden: time.hidden,
            busy: busy.collect::<BTreeMap<_, _>>(),
            host_reads: time
                .host_reads
                .into_iter()
                .map(|(name, count)| (name_of_span(&name), count))
                .collect(),
            keys: BTreeMap::new(),
        }
    });
    Ok(RankRecord {
        times: times.collect(),
        spans: sent.spans,
        sampled: sent.sampled,
        device: sent.device,
        peak: sent.peak,
    })
}

/// A message to rank 0.
pub(crate) fn words(value: &impl Serialize) -> Payload {
    let bytes = serde_json::to_vec(value).expect("records have no maps but by name");
    Payload::U64(words_of(&bytes))
}

/// What a message of rank `from` says.
pub(crate) fn read<T: for<'a> Deserialize<'a>>(from: u32, payload: &Payload) -> Result<T, Error> {
    let Payload::U64(words) = payload else {
        return Err(garbled(from, "a record is no words"));
    };
    let bytes = bytes_of(words).ok_or_else(|| garbled(from, "a record is empty"))?;
    serde_json::from_slice(&bytes).map_err(|error| garbled(from, &printable(&error.to_string())))
}

/// Bytes as words: how many, then they themselves.
pub(crate) fn words_of(bytes: &[u8]) -> Vec<u64> {
    let mut words = vec![bytes.len() as u64];
    words.extend(bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    }));
    words
}

/// The bytes again.
pub(crate) fn bytes_of(words: &[u64]) -> Option<Vec<u8>> {
    let (&length, words) = words.split_first()?;
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.truncate(length as usize);
    Some(bytes)
}

fn garbled(from: u32, why: &str) -> Error {
    Error::Rendezvous(format!(
        "rank {from} sends what rank 0 cannot read ({why}): start all ranks from the same program"
    ))
}

/// The name of a span as a constant. There are as many as this program has, kept for good.
fn name_of_span(name: &str) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.get(name) {
        return known;
    }
    let kept: &'static str = Box::leak(name.to_owned().into_boxed_str());
    names.insert(kept);
    kept
}
