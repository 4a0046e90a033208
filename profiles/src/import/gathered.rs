//! What is gathered from a file: samples by key, and what becomes none.

use std::collections::BTreeMap;

use serde::Serialize;

use super::source::Format;
use crate::directory::{Key, Profile, Sample, Taken};
use crate::presets;

/// What was read from a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Imported {
    /// What the file is.
    pub format: Format,
    /// Its measurements. The date is empty where the file has none.
    pub profile: Profile,
    /// What became no sample, that with the most time first.
    pub left_out: Vec<LeftOut>,
    /// How the device spent the time of a trace.
    pub device_time: Option<DeviceTime>,
    /// What one should know about how the file was read, a sentence each.
    pub notes: Vec<String>,
}

/// Work of one name that became no sample.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LeftOut {
    /// The name in the file.
    pub name: String,
    /// Why it is left out.
    pub why: String,
    /// How often it is there.
    pub count: u64,
    /// Its time, seconds; absent where the file has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds: Option<f64>,
    /// Its share of all the time of ops and collectives in the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
}

/// How a device spent the time from the first op of a trace to the end of the last, seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DeviceTime {
    /// From the first op to the end of the last.
    pub span_s: f64,
    /// At least one op, copy or collective ran.
    pub busy_s: f64,
    /// Nothing ran: the device waited for its host, or for other ranks.
    pub idle_s: f64,
    /// A collective ran, waiting for its last rank included.
    pub collective_s: f64,
    /// A collective ran and nothing else.
    pub exposed_collective_s: f64,
}

/// The most ranks of a group that share an NVLink domain, where `of_host` of them share a host: a domain
/// may be larger than a host (`gb200-nvl72`), which the presets of the device's clusters say.
pub(super) fn of_one_domain(device: &str, ranks: u32, of_host: u32) -> u32 {
    let clusters = presets::cluster_names()
        .into_iter()
        .filter(|&name| name != "local")
        .filter_map(|name| presets::cluster(name).ok());
    let wide = clusters
        .filter(|cluster| cluster.gpu.name.eq_ignore_ascii_case(device))
        .filter(|cluster| cluster.gpus_per_domain > cluster.gpus_per_node)
        .map(|cluster| cluster.gpus_per_domain)
        .max();
    wide.unwrap_or(of_host).max(of_host).min(ranks)
}

/// Timings by key, in the order of keys.
#[derive(Debug, Default)]
pub(super) struct Timings(pub(super) BTreeMap<Key, Vec<f64>>);

impl Timings {
    pub(super) fn add(&mut self, key: Key, seconds: f64) {
        self.0.entry(key).or_default().push(seconds);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn into_samples(self, taken: Taken) -> Vec<Sample> {
        let samples = self.0.into_iter();
        let sample = |(key, seconds)| Sample::of(key, taken, seconds);
        samples.map(sample).collect()
    }
}

/// What becomes no sample, by name and reason.
#[derive(Debug, Default)]
pub(super) struct Leftovers(BTreeMap<(String, String), (u64, Option<f64>)>);

impl Leftovers {
    pub(super) fn add(&mut self, name: &str, why: &str, seconds: Option<f64>) {
        let key = (name.to_owned(), why.to_owned());
        let (count, total) = self.0.entry(key).or_default();
        *count += 1;
        if let Some(seconds) = seconds {
            *total = Some(total.unwrap_or(0.0) + seconds);
        }
    }

    /// The list, that with the most time first; shares are of `total` seconds.
    pub(super) fn into_list(self, total: Option<f64>) -> Vec<LeftOut> {
        let entries = self.0.into_iter();
        let mut list: Vec<LeftOut> = entries
            .map(|((name, why), (count, seconds))| LeftOut {
                name,
                why,
                count,
                seconds,
                share: seconds
                    .zip(total.filter(|&total| total > 0.0))
                    .map(|(seconds, total)| seconds / total),
            })
            .collect();
        let time = |item: &LeftOut| item.seconds.unwrap_or(0.0);
        list.sort_by(|a, b| {
            let by_time = time(b).total_cmp(&time(a));
            by_time
                .then(b.count.cmp(&a.count))
                .then(a.name.cmp(&b.name))
        });
        list
    }
}
