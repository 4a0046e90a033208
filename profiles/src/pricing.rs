//! [`Costs`]: what any op or collective costs on a cluster, and how that is known.
//!
//! A price comes from the first of these that has one: a profile measured here ([`local`]), a shipped
//! table of this GPU, an efficiency formula ([`roofline`]). Of a CPU no table ships: ops that memory bounds, and
//! collectives, of kinds that were not measured take as long as measured ones that take as long by formula. All tables are built once into sorted
//! arrays, so that a price is a few lookups without allocation: a search asks for millions.
//!
//! | op | from |
//! |---|---|
//! | dense products | tables of forward products by (m, n, k) ([`matrix`]), wgrad at 0.96 of their rate plus its f32 traffic |
//! | grouped products | dense rates of all rows, derated as training kernels are, plus every group's weights; B200, A100 PCIe and H800 fp8 from their own rows |
//! | attention | rates by sequence and head width, filled by heads ([`attention`]) |
//! | everything else | bytes over 0.8 of the memory bandwidth plus 3 us; gathers at 0.5, softmax of the vocabulary at 0.4 |
//! | collectives | NCCL curves in a domain, NICs across ([`network`]) |
//!
//! fp8 prices are those of block-scaled recipes (blockwise, MXFP8; see
//! [`Costs::with_scales_of_tensors`] for others); quantization passes are ops of their own, not in them. Launch overhead belongs to the software stack and is not here. Two laws hold: more work of a
//! family is never cheaper (but for heads that grow wider in fp8), and more bandwidth is never slower.

mod attention;
mod curve;
mod lender;
mod local;
mod matrix;
mod network;
mod roofline;
mod surface;

use std::iter;

use attention::Attention;
pub use local::Waiting;
use local::{Base, Local, Scaled};
use matrix::{Held, Matrix};
use network::Network;

use crate::calibration::{Calibration, Factors};
use crate::cluster::Cluster;
use crate::collective::{Collective, ExchangeKernel};
use crate::cost::{Cost, Source};
use crate::directory::{Key, Profile, Sample};
use crate::host::{Direction, HostCost, HostTimes};
use crate::op::Op;
use crate::statistics;
use crate::units::{Bytes, Seconds};

/// Prices for one cluster.
#[derive(Debug, Clone)]
pub struct Costs {
    shipped: Shipped,
    local: Local,
    host: HostTimes,
    /// Bytes a second to or from the host, as the cluster has it.
    link_rate: f64,
    /// The same measured, to the device and from it.
    copy_rates: [Option<f64>; 2],
    factors: Factors,
    calibration: Option<Calibration>,
    samples_spread: Option<f64>,
    notes: Vec<String>,
    /// Ranks for each core, where ranks take turns on cores.
    turns: f64,
    loads_are_known: bool,
    /// Whether what ships is assumed of the machine, and not measured on one of its kind.
    assumed: bool,
    /// Time of shipped narrow products over that of block-scaled ones.
    scaled_alike: f64,
    /// Time of an op on the slowest GPU of a job over that on one.
    slowest: f64,
    hopper: bool,
}

/// Memory bandwidths, over the one that is assumed of a CPU, under which its measurements are laid over formulas: what lies in
/// caches is many times faster, and what other cores read beside it slower.
const BALANCES: [f64; 8] = [0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];

/// Prices without a profile.
#[derive(Debug, Clone)]
struct Shipped {
    matrix: Matrix,
    attention: Attention,
    network: Network,
}

impl Costs {
    /// Collects every table that applies to a cluster.
    ///
    /// Profiles of another device are left out, which [`Self::notes`] says ([`Profile::check`] refuses
    /// them earlier). On a CPU, ranks share cores: profiles taken with as many concurrent ranks as the
    /// cluster has are used as they are; where there is none, the times of ops of the others are scaled
    /// by the cores a rank owned then and owns now, and are not called measured. Where profiles hold
    /// calibrations, prices are multiplied by the factors of the last one.
    pub fn for_cluster(cluster: &Cluster, profiles: &[Profile]) -> Self {
        let shipped = Shipped::of(cluster, 1.0);
        let mut notes = Vec::new();
        let calibration = calibration(cluster, profiles, &mut notes);
        let scaled = applicable(cluster, profiles, &mut notes);
        let turns = if cluster.gpu.is_cpu() {
            let cores = scaled.iter().map(|scaled| scaled.profile.cores).max();
            cores.map_or(1.0, |cores| {
                f64::from(cluster.gpus_per_node) / f64::from(cores)
            })
        } else {
            1.0
        };
        let turns = turns.max(1.0);
        let host = host_times(&scaled);
        let balances: Vec<f64> = if cluster.gpu.is_cpu() && !scaled.is_empty() {
            BALANCES.into()
        } else {
            Vec::new()
        };
        let others: Vec<(f64, Shipped)> = (balances.into_iter())
            .map(|faster| (faster, Shipped::of(cluster, faster)))
            .collect();
        let by_itself = |shipped: &Shipped, op: &Op| shipped.op(op, Held::ByItself).0;
        let bases: Vec<Base<'_>> = iter::once((1.0, &shipped))
            .chain(others.iter().map(|(faster, shipped)| (*faster, shipped)))
            .map(|(faster, shipped)| Base {
                faster,
                op: Box::new(move |op| by_itself(shipped, op)),
            })
            .collect();
        let local = Local::new(&scaled, &bases, &|collective| {
            shipped.network.price(collective).0
        });
        drop(bases);
        let own = Self {
            samples_spread: samples_spread(&scaled),
            shipped,
            local,
            host,
            link_rate: cluster.host_gb_per_s() * 1e9,
            copy_rates: [Direction::ToDevice, Direction::ToHost]
                .map(|direction| copy_rate(&scaled, direction)),
            factors: Factors::default(),
            calibration: None,
            notes,
            turns,
            loads_are_known: false,
            assumed: cluster.gpu.is_cpu(),
            scaled_alike: 1.0,
            slowest: 1.0,
            hopper: cluster.gpu.arch == "sm_90",
        };
        match calibration {
            None => own,
            Some(calibration) => Self {
                calibration: Some(calibration.clone()),
                ..own.times(calibration.factors())
            },
        }
    }

    /// The factors that prices are multiplied by.
    pub fn factors(&self) -> Factors {
        self.factors
    }

    /// The same prices multiplied by these factors, instead of by those they had; they count as not
    /// calibrated.
    #[must_use]
    pub fn times(&self, factors: Factors) -> Self {
        Self {
            factors,
            calibration: None,
            host: HostTimes {
                factor: Some(factors.host),
                ..self.host
            },
            ..self.clone()
        }
    }

    /// What measured steps of these devices were fitted to, where they were.
    pub fn calibration(&self) -> Option<&Calibration> {
        self.calibration.as_ref()
    }

    /// The relative spread of measured samples, where there are any: the median over keys of the standard
    /// deviation that a normal distribution of their interquartile range has.
    pub fn samples_spread(&self) -> Option<f64> {
        self.samples_spread
    }

    /// What a user should know about how profiles were used, one sentence each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// What a transfer of tensors takes over the link between a device and its host: at the rate of the largest
    /// copy that a profile measured that way, else at what the cluster leaves a device while all of its node copy
    /// ([`Cluster::host_gb_per_s`]). What a copy takes beside its bytes is left out.
    pub fn transfer(&self, bytes: Bytes, leaves: bool) -> Cost {
        let measured = self.copy_rates[usize::from(leaves)];
        Cost {
            time: Seconds(bytes.0 as f64 / measured.unwrap_or(self.link_rate)),
            source: match measured {
                Some(_) => Source::Interpolated,
                None => Source::Extrapolated,
            },
        }
    }

    /// What was measured between the devices and their host.
    pub fn host(&self) -> &HostTimes {
        &self.host
    }

    /// The price of an op.
    pub fn op(&self, op: &Op) -> Cost {
        self.op_alone(op).times(self.factors.compute * self.slowest)
    }

    /// The price of a collective; nothing for a group of one.
    pub fn collective(&self, collective: &Collective) -> Cost {
        let alone = self.collective_alone(collective);
        alone.times(self.factors.network)
    }

    fn op_alone(&self, op: &Op) -> Cost {
        if let Some(cost) = self.local.op(op) {
            return cost;
        }
        let (time, source) = self.shipped.op(op, Held::AmongOthers);
        if self.assumed && !op.is_bound_by_sms() {
            let time = Seconds(self.local.like_ops(time));
            return Cost { time, source };
        }
        let narrow =
            matches!(op, Op::Gemm { .. } | Op::GroupedGemm { .. }) && op.dtype().bits() < 16;
        Cost {
            time: Seconds(time * if narrow { self.scaled_alike } else { 1.0 }),
            source,
        }
    }

    fn collective_alone(&self, collective: &Collective) -> Cost {
        if collective.ranks <= 1 {
            return NOTHING;
        }
        let shipped = |collective: &Collective| self.shipped.network.price(collective).0;
        if let Some(cost) = self.local.collective(collective, &shipped) {
            return cost;
        }
        let (time, source) = self.shipped.network.price(collective);
        let time = if self.assumed {
            self.local.like_messages(time)
        } else {
            time
        };
        Cost {
            time: Seconds(time),
            source,
        }
    }

    /// The same for a question that says how experts are loaded: what ranks wait for the busiest of them is priced
    /// by that, and not once more by what a profile measured of it.
    #[must_use]
    pub fn with_known_loads(self) -> Self {
        Self {
            loads_are_known: true,
            ..self
        }
    }

    /// The same for a recipe with one scale for a whole tensor. Shipped prices of fp8 are those of scaled blocks, which
    /// Hopper multiplies at a lower rate: its largest products reach 1271 TFLOP/s, and 1507 without
    /// (ai-dynamo/aiconfigurator@095f58a51c4c, `fp8_block` and `fp8` of its H100). Blackwell scales blocks as it multiplies.
    #[must_use]
    pub fn with_scales_of_tensors(self) -> Self {
        Self {
            scaled_alike: if self.hopper { 1271.0 / 1507.0 } else { 1.0 },
            ..self
        }
    }

    /// The same for a job whose slowest GPU takes so many times as long for an op as one that was measured.
    #[must_use]
    pub fn of_slowest(self, slowest: f64) -> Self {
        Self { slowest, ..self }
    }

    /// A message between stages of a pipeline that reaches over so many NVLink domains. Where messages were measured, they passed
    /// the switches that there are.
    pub fn message(&self, message: &Collective, domains: u32) -> Cost {
        let cost = self.collective(message);
        if cost.source == Source::Extrapolated {
            cost.times(self.shipped.network.farther(message, domains))
        } else {
            cost
        }
    }

    /// Ranks for each core, where profiles are of a CPU with too few: a rank whose peers wait then has a core
    /// more often, and up to so many times the mean load costs no time.
    pub fn turns(&self) -> f64 {
        self.turns
    }

    /// What the mean of some ranks waits at a collective for the last to come, as training measured it on this machine; nothing
    /// where none did. Prices of collectives are without it.
    pub fn waiting(&self, collective: &Collective) -> Waiting {
        if collective.ranks <= 1 {
            return Waiting::default();
        }
        self.local.waiting(collective, self.loads_are_known)
    }

    /// The share of a device's multiprocessors that a collective holds while it runs, which what runs beside it lacks;
    /// nothing where training timed ops, for they lacked it then.
    pub fn taken(&self, collective: &Collective) -> f64 {
        if self.local.is_of_training() {
            return 0.0;
        }
        self.shipped.network.taken(collective)
    }

    /// The share of a device that so many multiprocessors are.
    pub fn share_of_sms(&self, sms: f64) -> f64 {
        self.shipped.network.share(sms)
    }

    /// The price of an [`Exchange`]: the slower of what goes over NVLink at the rate of its kernel and what goes over
    /// NICs, after a latency, and its copies at the rate of gathers. A plain all-to-all is a [`Collective`].
    pub fn exchange(&self, exchange: &Exchange) -> Cost {
        let &Exchange {
            kernel,
            local,
            remote,
            copied,
            ranks,
            ranks_per_domain,
        } = exchange;
        if ranks <= 1 {
            return NOTHING;
        }
        let (n, m) = (
            f64::from(ranks),
            f64::from(ranks_per_domain.clamp(1, ranks)),
        );
        let (time, source) =
            self.shipped
                .network
                .exchange(kernel, [local.0 as f64, remote.0 as f64], [n, m]);
        let cost = Cost {
            time: Seconds(time),
            source,
        }
        .times(self.factors.network);
        let copies = self.shipped.matrix.roofline().gather(copied.0 as f64);
        Cost {
            time: cost.time + Seconds(copies * self.factors.compute),
            ..cost
        }
    }
}

/// A dispatch of tokens, or what brings them back, as [`Costs::exchange`] prices it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Exchange {
    /// What runs it.
    pub kernel: ExchangeKernel,
    /// Bytes that each rank sends to the others of its NVLink domain.
    pub local: Bytes,
    /// Bytes that each rank sends over its NIC.
    pub remote: Bytes,
    /// Bytes of the device's memory that are read and written besides.
    pub copied: Bytes,
    /// Ranks.
    pub ranks: u32,
    /// Of which so many share an NVLink domain.
    pub ranks_per_domain: u32,
}

/// What a group of one pays.
const NOTHING: Cost = Cost {
    time: Seconds::ZERO,
    source: Source::Measured,
};

impl Shipped {
    /// Those of the devices of a cluster, had they so many times their memory bandwidth.
    fn of(cluster: &Cluster, faster: f64) -> Self {
        let mut gpu = cluster.gpu.clone();
        gpu.memory_gb_per_s *= faster;
        let matrix = Matrix::new(&gpu);
        Self {
            attention: Attention::new(&gpu, matrix.roofline()),
            network: Network::new(cluster),
            matrix,
        }
    }

    fn op(&self, op: &Op, held: Held) -> (f64, Source) {
        let roofline = self.matrix.roofline();
        match op {
            Op::Gemm { .. } => self.matrix.gemm(op, held),
            Op::GroupedGemm { .. } => self.matrix.grouped_gemm(op, held),
            Op::Attention { .. } => self.attention.price(op),
            Op::LinearAttention { .. } => (roofline.recurrent(op), Source::Extrapolated),
            _ => (roofline.memory_bound(op), Source::Extrapolated),
        }
    }
}

/// The last calibration of the cluster's device.
fn calibration<'a>(
    cluster: &Cluster,
    profiles: &'a [Profile],
    notes: &mut Vec<String>,
) -> Option<&'a Calibration> {
    let own = profiles
        .iter()
        .filter(|profile| profile.check(cluster).is_ok());
    let mut fits = own.filter_map(|profile| profile.calibration.as_ref());
    let last = fits.next_back();
    let others = fits.count();
    if others > 0 {
        notes.push(format!(
            "{} profiles hold calibrations: the last one is used",
            others + 1
        ));
    }
    last
}

/// The spread of the samples that prices come from.
fn samples_spread(profiles: &[Scaled<'_>]) -> Option<f64> {
    let samples = profiles.iter().flat_map(|scaled| &scaled.profile.samples);
    let timed = samples.filter(|sample| sample.seconds.len() > 1);
    let spreads: Vec<f64> = timed.map(|sample| sample.spread() / QUARTILES).collect();
    let any = profiles
        .iter()
        .any(|scaled| !scaled.profile.samples.is_empty());
    any.then(|| statistics::median(spreads).unwrap_or(0.0))
}

/// The interquartile range of a normal distribution, in standard deviations.
const QUARTILES: f64 = 1.349;

/// The profiles of the cluster's device that hold samples, with the factor their op times are to be multiplied by.
fn applicable<'a>(
    cluster: &Cluster,
    profiles: &'a [Profile],
    notes: &mut Vec<String>,
) -> Vec<Scaled<'a>> {
    let mut fitting = Vec::new();
    for profile in profiles {
        match profile.check(cluster) {
            // A calibration alone says nothing of single ops.
            Ok(()) if profile.samples.is_empty() && profile.overhead.is_none() => {}
            Ok(()) => {
                let collective = |sample: &Sample| matches!(sample.key, Key::Collective(_));
                if profile.shared_device && profile.samples.iter().any(collective) {
                    notes.push(format!(
                        "the profile of {} measured collectives among ranks on one device: they are \
                         left out, since they say nothing of links between devices",
                        profile.date
                    ));
                }
                fitting.push(profile);
            }
            Err(error) => notes.push(error.to_string()),
        }
    }
    let whole = |profile| Scaled {
        profile,
        factor: 1.0,
    };
    if !cluster.gpu.is_cpu() {
        return fitting.into_iter().map(whole).collect();
    }
    let ranks = cluster.gpus_per_node;
    let same: Vec<_> = fitting
        .iter()
        .filter(|profile| profile.concurrent_ranks == ranks)
        .map(|profile| whole(profile))
        .collect();
    if !same.is_empty() {
        return same;
    }
    let mut scaled = Vec::new();
    for profile in fitting {
        let factor = owned_cores(profile.cores, profile.concurrent_ranks)
            / owned_cores(profile.cores, ranks);
        notes.push(format!(
            "the profile of {} ran {} ranks at a time and the plan runs {ranks}: its op times are \
             multiplied by {factor:.2}, the ratio of cores a rank owns; measure with {ranks} ranks \
             for better",
            profile.date, profile.concurrent_ranks
        ));
        scaled.push(Scaled { profile, factor });
    }
    scaled
}

/// Bytes a second of the largest copies that profiles measured in a direction.
fn copy_rate(profiles: &[Scaled<'_>], direction: Direction) -> Option<f64> {
    let samples = profiles.iter().flat_map(|scaled| &scaled.profile.samples);
    let copies = samples.filter_map(|sample| match sample.key {
        Key::Host(HostCost::Copy {
            bytes,
            direction: of,
        }) if of == direction => Some((bytes, statistics::median(sample.seconds.clone())?)),
        _ => None,
    });
    let largest = copies.max_by(|a, b| a.0.cmp(&b.0).then(b.1.total_cmp(&a.1)));
    largest.map(|(bytes, seconds)| bytes.0 as f64 / seconds)
}

/// Medians over the profiles; of memory, the most that one of them saw.
fn host_times(profiles: &[Scaled<'_>]) -> HostTimes {
    let median = |cost: HostCost| {
        let samples = profiles.iter().flat_map(|scaled| &scaled.profile.samples);
        let of_cost = samples.filter(|sample| sample.key == Key::Host(cost));
        let seconds: Vec<f64> = of_cost.flat_map(|sample| sample.seconds.clone()).collect();
        statistics::median(seconds).map(Seconds)
    };
    let overheads = profiles.iter().filter_map(|scaled| scaled.profile.overhead);
    HostTimes {
        factor: None,
        launch: median(HostCost::Launch),
        read: median(HostCost::Read),
        overhead: overheads.map(|overhead| overhead.total()).max(),
    }
}

/// Cores one of `ranks` rank threads has to itself, as [`crate::presets::local_on`] divides them.
fn owned_cores(cores: u32, ranks: u32) -> f64 {
    let (cores, ranks) = (cores.max(1), ranks.max(1));
    if cores >= ranks {
        f64::from(cores / ranks)
    } else {
        f64::from(cores) / f64::from(ranks)
    }
}

#[cfg(test)]
mod tests;
