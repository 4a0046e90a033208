//! A recompute set for each layer: the fastest choice whose memory fits a pipeline rank.
//!
//! Ranks need not agree, so each is looked at by itself. Its layers are taken in order, and of the ways to run
//! those so far only those are kept that no other beats in time, in what it keeps and in both peaks: what a
//! run of layers takes composes ([`Passes::then`]), and never falls where a part of it rises. So it is
//! with what its chunks take at the instants of the schedule. No choice is lost but where more than [`MOST`] ways
//! are left, of which some are then let go of. All ways that may still be faster than what was found are then looked at where these are not
//! too many ([`exact`]); elsewhere [`super::mix`] bounds what was lost.

mod exact;

use std::collections::BTreeSet;
use std::ops::Range;

use crate::memory::Occupancy;
use crate::runtime::Passes;

pub(crate) use exact::{Looked, quicker};

/// Ways to run some layers that are kept.
const MOST: usize = 128;

/// Of ways that take about as long.
const BEST: usize = 2;

/// A way to run some layers or chunks: one that was found before, and one more choice.
#[derive(Debug, Clone)]
pub(crate) struct Way<B> {
    /// Backward passes of a microbatch.
    seconds: f64,
    /// Bytes of which fewer are better.
    bytes: B,
    /// The way before.
    before: usize,
    /// What was chosen.
    choice: usize,
}

/// Of some layers: what they keep, the peaks of both passes, and both of gradients of weights.
pub(crate) type LayersWay = Way<[i64; 5]>;

impl LayersWay {
    /// A layer under a recompute set, by its index.
    pub(crate) fn of_layer(set: usize, seconds: f64, passes: &Passes) -> Self {
        Self {
            seconds,
            bytes: array(passes.totals()),
            before: 0,
            choice: set,
        }
    }

    /// The recompute set of a layer, by its index.
    pub(crate) fn set(&self) -> usize {
        self.choice
    }
}

impl<B> Way<B> {
    /// Seconds of a backward pass.
    pub(crate) fn seconds(&self) -> f64 {
        self.seconds
    }
}

fn array(passes: Passes<i64>) -> [i64; 5] {
    let Passes {
        saved,
        forward,
        backward,
        kept,
        weight,
        // Where something leaves, layers do not choose by themselves.
        away: _,
    } = passes;
    [saved, forward, backward, kept, weight]
}

fn passes([saved, forward, backward, kept, weight]: [i64; 5]) -> Passes<i64> {
    Passes {
        saved,
        forward,
        backward,
        kept,
        weight,
        ..Passes::default()
    }
}

fn bytes<B: AsRef<[i64]>>(way: &Way<B>) -> impl Iterator<Item = i64> + Clone {
    way.bytes.as_ref().iter().copied()
}

/// Ways that no other beats, the fastest first, at most [`MOST`] and two.
pub(crate) fn unbeaten<B: AsRef<[i64]>>(ways: Vec<Way<B>>) -> Vec<Way<B>> {
    let mut kept = first_unbeaten(ways, |_| true);
    if kept.len() > MOST {
        let places = spread(&kept, MOST);
        let mut place = 0..;
        kept.retain(|_| place.next().is_some_and(|place| places.contains(&place)));
    }
    kept
}

/// The fastest that no other beats, as long as some number of them is not too many.
fn first_unbeaten<B: AsRef<[i64]>>(
    mut ways: Vec<Way<B>>,
    mut goes_on: impl FnMut(usize) -> bool,
) -> Vec<Way<B>> {
    ways.sort_by(|a, b| {
        let times = a.seconds.total_cmp(&b.seconds);
        times.then_with(|| bytes(a).cmp(bytes(b)))
    });
    let mut kept: Vec<Way<B>> = Vec::new();
    // What beats a way has no more bytes in all: most are told apart by that.
    let mut sums: Vec<i128> = Vec::new();
    for way in ways {
        if !goes_on(kept.len()) {
            break;
        }
        let sum = bytes(&way).map(i128::from).sum();
        // Those before it take no longer.
        let beats = |(before, least): (&Way<B>, &i128)| {
            *least <= sum && bytes(before).zip(bytes(&way)).all(|(a, b)| a <= b)
        };
        if !kept.iter().zip(&sums).rev().any(beats) {
            kept.push(way);
            sums.push(sum);
        }
    }
    kept
}

/// Places of about so many ways, which are in order of time: of those that take about as long the [`BEST`] that have the fewest bytes in all,
/// and the fastest and the smallest; of all where there are no more.
fn spread<B: AsRef<[i64]>>(ways: &[Way<B>], most: usize) -> BTreeSet<usize> {
    if ways.len() <= most {
        return (0..ways.len()).collect();
    }
    let smallest = (0..ways.len()).min_by_key(|&place| bytes(&ways[place]).max());
    let sum = |place: &usize| bytes(&ways[*place]).map(i128::from).sum::<i128>();
    let parts = (most / BEST).max(1);
    let best = (0..parts).flat_map(|part| {
        let [from, to] = [part, part + 1].map(|part| part * ways.len() / parts);
        let mut own: Vec<usize> = (from..to).collect();
        own.sort_by_key(sum);
        own.into_iter().take(BEST)
    });
    best.chain([0]).chain(smallest).collect()
}

/// Ways after each choice of a row of them, the first what it begins with.
#[derive(Debug)]
struct Row<B>(Vec<Vec<Way<B>>>);

impl<B: AsRef<[i64]>> Row<B> {
    fn new(bytes: B) -> Self {
        let start = Way {
            seconds: 0.0,
            bytes,
            before: 0,
            choice: 0,
        };
        Self(vec![vec![start]])
    }

    fn last(&self) -> &[Way<B>] {
        &self.0[self.0.len() - 1]
    }

    /// Takes one of some choices next; `then` has the bytes with it, and none where it is none.
    fn choose<C>(&mut self, choices: &[Way<C>], then: impl Fn(&B, &C) -> Option<B>) {
        let then = |a: &Way<B>, b: &Way<C>| then(&a.bytes, &b.bytes);
        self.0.push(unbeaten(self.ways(choices, then)));
    }

    /// All ways with one of some choices next, but those of which the bytes are none.
    fn ways<C>(
        &self,
        choices: &[Way<C>],
        then: impl Fn(&Way<B>, &Way<C>) -> Option<B>,
    ) -> Vec<Way<B>> {
        let mut ways = Vec::new();
        for (before, way) in self.last().iter().enumerate() {
            ways.extend(choices.iter().filter_map(|next| {
                Some(Way {
                    seconds: way.seconds + next.seconds,
                    bytes: then(way, next)?,
                    before,
                    choice: next.choice,
                })
            }));
        }
        ways
    }

    /// What was chosen on the way to one of the last.
    fn choices(&self, mut place: usize) -> Vec<usize> {
        let mut chosen: Vec<usize> = self.0[1..]
            .iter()
            .rev()
            .map(|ways| {
                let way = &ways[place];
                place = way.before;
                way.choice
            })
            .collect();
        chosen.reverse();
        chosen
    }
}

/// The ways to run a chunk.
#[derive(Debug)]
pub(crate) struct Chunk<'l> {
    row: Row<[i64; 5]>,
    first: Passes<i64>,
    layers: Vec<&'l [LayersWay]>,
    last: Passes<i64>,
    /// Bytes that it receives and sends.
    messages: [i64; 2],
}

impl<'l> Chunk<'l> {
    /// A chunk that begins with `first`, has some layers, each with its unbeaten choices, and ends with `last`.
    /// The messages that it receives and sends are `message` bytes, where they are.
    pub(crate) fn new(
        first: Option<&Passes>,
        layers: Vec<&'l [LayersWay]>,
        last: Option<&Passes>,
        (message, received, sent): (i64, bool, bool),
    ) -> Self {
        let [first, last] = [first, last].map(|end| end.map(Passes::totals).unwrap_or_default());
        let mut chunk = Self {
            row: Row::new(array(first)),
            first,
            layers,
            last,
            messages: [received, sent].map(|is_there| message * i64::from(is_there)),
        };
        for choices in &chunk.layers {
            chunk.row.choose(choices, |a, b| Some(then(a, b)));
        }
        let mut ways = chunk.row.0.pop().expect("what it begins with");
        for way in &mut ways {
            way.bytes = chunk.ended(&way.bytes);
        }
        chunk.row.0.push(ways);
        chunk
    }

    /// Its layers with what the chunk ends with and its messages.
    fn ended(&self, layers: &[i64; 5]) -> [i64; 5] {
        let [received, sent] = self.messages;
        array(passes(*layers).then(self.last).between(received, sent))
    }
}

fn then(a: &[i64; 5], b: &[i64; 5]) -> [i64; 5] {
    array(passes(*a).then(passes(*b)))
}

/// How much a chunk of a rank counts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counts {
    /// A second of it.
    pub(crate) weight: f64,
    /// It is to take no less than the first, and less than the second.
    pub(crate) within_s: [f64; 2],
}

impl Counts {
    /// All of its ways, of which a second counts so much.
    pub(crate) fn all(weight: f64) -> Self {
        Self {
            weight,
            within_s: [0.0, f64::INFINITY],
        }
    }

    /// Places of the ways that it is to take, of some that are in order of time.
    fn among<B>(&self, ways: &[Way<B>]) -> Range<usize> {
        let [from, to] = self
            .within_s
            .map(|seconds| ways.partition_point(|way| way.seconds < seconds));
        from..to.max(from)
    }
}

/// Seconds that a choice counts, and the sets of the layers of each chunk.
pub(crate) type Choice = (f64, Vec<Vec<usize>>);

/// The choice for the layers of each chunk of a rank that counts the fewest seconds of those that fit, if any does: at each instant, what
/// all chunks take is at most its `room`. And what none counts less than: where not all ways were looked at, there may be one that does.
pub(crate) fn fastest(
    chunks: &[&Chunk<'_>],
    under: (&[Occupancy], &[i64]),
    counts: &[Counts],
    looked: Looked<'_>,
) -> (Option<Choice>, f64) {
    let fast = fast(chunks, under, counts);
    let below_s = fast.as_ref().map_or(f64::INFINITY, |fast| fast.0);
    match quicker(chunks, under, (counts, below_s), looked) {
        Ok(quicker) => {
            let best = quicker.or(fast);
            let least_s = best.as_ref().map_or(f64::INFINITY, |best| best.0);
            (best, least_s)
        }
        Err(least_s) => (fast, least_s),
    }
}

/// The same of the ways that are kept.
pub(crate) fn fast(
    chunks: &[&Chunk<'_>],
    (occupancies, room): (&[Occupancy], &[i64]),
    counts: &[Counts],
) -> Option<Choice> {
    // Instants tell more ways apart than passes do.
    let most = (MOST / chunks.len()).max(8);
    // Of a chunk the ways that are tried, each with its place, and what it takes at each instant.
    let tried = chunks.iter().enumerate().map(|(number, chunk)| {
        let ways = chunk.row.last();
        let among = counts[number].among(ways);
        let places = spread(&ways[among.clone()], most).into_iter();
        let places = places.map(|place| among.start + place);
        at_instants(ways, places, (number, counts[number].weight), occupancies)
    });
    let tried: Vec<Vec<Way<Vec<i64>>>> = tried.collect();
    let (last, earlier) = tried.split_last()?;
    let mut row = Row::new(room.iter().map(|room| -room).collect::<Vec<i64>>());
    for (number, ways) in earlier.iter().enumerate() {
        let later = fewest(&tried[number + 1..], room.len());
        row.choose(ways, |sum, own| {
            let both = || sum.iter().zip(own).map(|(sum, own)| sum + own);
            // What does not fit with the least of what is to come never will.
            let fits = both().zip(&later).all(|(both, later)| both + later <= 0);
            fits.then(|| both().collect())
        });
    }
    // With the last chunk a way need not be told apart from all others: the first that fits is the fastest.
    let mut best: Option<(f64, Vec<i64>, [usize; 2])> = None;
    for (before, way) in row.last().iter().enumerate() {
        for own in last {
            let seconds = way.seconds + own.seconds;
            let least = best.as_ref().map_or(f64::INFINITY, |best| best.0);
            if seconds > least {
                break;
            }
            let both = || bytes(way).zip(bytes(own)).map(|(a, b)| a + b);
            let smaller =
                |best: &(f64, Vec<i64>, _)| seconds < best.0 || both().lt(best.1.iter().copied());
            if both().all(|over| over <= 0) && best.as_ref().is_none_or(smaller) {
                best = Some((seconds, both().collect(), [before, own.choice]));
            }
        }
    }
    let (seconds, _, [place, choice]) = best?;
    let mut choices = row.choices(place);
    choices.push(choice);
    let sets = |(chunk, place): (&&Chunk<'_>, usize)| chunk.row.choices(place);
    Some((seconds, chunks.iter().zip(choices).map(sets).collect()))
}

/// Ways of a chunk at some places by what they take at each instant, each with its place; a second of the chunk counts so much.
fn at_instants(
    ways: &[LayersWay],
    places: impl Iterator<Item = usize>,
    (number, weight): (usize, f64),
    occupancies: &[Occupancy],
) -> Vec<Way<Vec<i64>>> {
    let of = |place: usize| {
        let own = passes(ways[place].bytes);
        let taken = occupancies.iter().map(|at| taken(&own, number, at));
        Way {
            seconds: ways[place].seconds * weight,
            bytes: taken.collect(),
            before: 0,
            choice: place,
        }
    };
    places.map(of).collect()
}

/// The least that some chunks take at each of some instants.
fn fewest(chunks: &[Vec<Way<Vec<i64>>>], instants: usize) -> Vec<i64> {
    let of_chunk =
        |ways: &Vec<Way<Vec<i64>>>, at: usize| ways.iter().map(|way| way.bytes[at]).min();
    let sum = |at| chunks.iter().filter_map(|ways| of_chunk(ways, at)).sum();
    (0..instants).map(sum).collect()
}

/// The most bytes that a layer, which without any choice takes `seconds` and keeps what `plain` says, lets go of
/// for a second of one of its choices where so many microbatches are between forward and backward pass, and before
/// their gradients of weights.
pub(crate) fn best_saver(
    choices: &[LayersWay],
    seconds: f64,
    plain: &Passes<i64>,
    [live, kept]: [u32; 2],
) -> f64 {
    let rate = |way: &LayersWay| {
        let own = passes(way.bytes);
        let saved = (plain.saved - own.saved) * i64::from(live);
        let less = (saved + (plain.kept - own.kept) * i64::from(kept)).max(0) as f64;
        less / (way.seconds - seconds).max(f64::MIN_POSITIVE)
    };
    choices.iter().map(rate).fold(0.0, f64::max)
}

/// What a chunk takes at an instant.
fn taken(passes: &Passes<i64>, chunk: usize, at: &Occupancy) -> i64 {
    let running = if at.chunk == chunk {
        passes.running(at.running)
    } else {
        0
    };
    held(passes, chunk, at) + running
}

/// What of it is there whatever runs.
fn held(passes: &Passes<i64>, chunk: usize, at: &Occupancy) -> i64 {
    passes.saved * i64::from(at.live[chunk]) + passes.kept * i64::from(at.kept[chunk])
}

#[cfg(test)]
mod tests;
