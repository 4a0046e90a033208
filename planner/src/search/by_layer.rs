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
        let mut ways = Vec::with_capacity(self.last().len() * choices.len());
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
mod tests {
    use proptest::prelude::*;

    use moefold_profiles::random::SplitMix64;
    use moefold_profiles::units::Bytes;

    use super::*;
    use crate::runtime::Running;

    /// Bytes that are one here.
    const UNIT: i64 = 1_000_003;

    fn way(set: usize, (seconds, saved, forward, backward): (u32, i64, i64, i64)) -> LayersWay {
        divided(set, (seconds, saved, forward, backward, 0, 0))
    }

    fn divided(
        set: usize,
        (seconds, saved, forward, backward, kept, weight): (u32, i64, i64, i64, i64, i64),
    ) -> LayersWay {
        let bytes = [saved, saved + forward, backward, kept, weight];
        Way {
            seconds: f64::from(seconds),
            bytes: bytes.map(|bytes| bytes * UNIT),
            before: 0,
            choice: set,
        }
    }

    /// What all chunks begin and end with, and the messages that they receive and send.
    type Around = ([Passes; 2], (i64, bool, bool));

    /// The least seconds over all choices of whole chunks, by what a second of each counts, and whether any fits.
    fn brute_force(
        chunks: &[Vec<Vec<LayersWay>>],
        around: &Around,
        (occupancies, room): (&[Occupancy], &[i64]),
        counts: &[Counts],
    ) -> Option<f64> {
        fn chunk_ways(layers: &[Vec<LayersWay>], around: &Around) -> Vec<(f64, Passes<i64>)> {
            let ([first, last], (message, received, sent)) = around;
            let mut all = vec![(0.0, first.totals())];
            for choices in layers {
                let pairs = all.iter().flat_map(|(seconds, before)| {
                    choices
                        .iter()
                        .map(move |next| (seconds + next.seconds, before.then(passes(next.bytes))))
                });
                all = pairs.collect();
            }
            let [received, sent] = [received, sent].map(|is_there| message * i64::from(*is_there));
            let ended = |passes: Passes<i64>| passes.then(last.totals()).between(received, sent);
            let each = all
                .into_iter()
                .map(|(seconds, passes)| (seconds, ended(passes)));
            each.collect()
        }
        let mut all = vec![(0.0, vec![0; occupancies.len()])];
        for (number, layers) in chunks.iter().enumerate() {
            let Counts { weight, within_s } = counts[number];
            let mut ways = chunk_ways(layers, around);
            ways.retain(|(seconds, _)| (within_s[0]..within_s[1]).contains(seconds));
            let pairs = all.iter().flat_map(|(seconds, sums)| {
                ways.iter().map(move |(more, passes)| {
                    let each = sums.iter().zip(occupancies);
                    let sums = each.map(|(sum, at)| sum + taken(passes, number, at));
                    (seconds + more * weight, sums.collect::<Vec<i64>>())
                })
            });
            all = pairs.collect();
        }
        let fits = |sums: &Vec<i64>| sums.iter().zip(room).all(|(sum, room)| sum <= room);
        let fitting = all.into_iter().filter(|(_, sums)| fits(sums));
        fitting.map(|(seconds, _)| seconds).min_by(f64::total_cmp)
    }

    fn seconds_of(chunks: &[Vec<Vec<LayersWay>>], sets: &[Vec<usize>], counts: &[Counts]) -> f64 {
        let of_chunk = |(chunk, sets): (&Vec<Vec<LayersWay>>, &Vec<usize>)| -> f64 {
            let layers = chunk.iter().zip(sets);
            layers.map(|(choices, &set)| choices[set].seconds).sum()
        };
        let each = chunks.iter().zip(sets).map(of_chunk).zip(counts);
        each.map(|(seconds, counts)| seconds * counts.weight).sum()
    }

    /// Of layers whose ways are too many to look at all, the fastest choice is found where all are.
    #[test]
    fn oracle_of_too_many_ways_all_may_be_looked_at() {
        let mut too_many = 0;
        for seed in 0..16 {
            let mut random = SplitMix64::new(seed);
            let mut number = |most: u64| random.below(most) as i64;
            let mut of_layer = || -> Vec<LayersWay> {
                let way = |set| {
                    let bytes = [0; 5].map(|_| number(1000));
                    // Those with fewer bytes take about as much longer.
                    let seconds = 1000 + number(100) - bytes[0];
                    let [saved, forward, backward, kept, weight] = bytes;
                    divided(
                        set,
                        (seconds as u32, saved, forward, backward, kept, weight),
                    )
                };
                (0..3).map(way).collect()
            };
            let chunks = vec![(0..10).map(|_| of_layer()).collect::<Vec<_>>()];
            let own: Vec<Vec<LayersWay>> = chunks[0].iter().cloned().map(unbeaten).collect();
            let chunk = Chunk::new(
                None,
                own.iter().map(Vec::as_slice).collect(),
                None,
                (0, false, false),
            );
            let at = |live, kept, running| Occupancy {
                live: vec![live],
                kept: vec![kept],
                chunk: 0,
                running,
                messages: 0,
            };
            let occupancies = [
                at(2, 0, Running::Forward),
                at(1, 1, Running::Backward),
                at(0, 3, Running::Weight),
            ];
            let room = [8000, 9000, 30_000].map(|room| room * UNIT);
            let (under, counts) = ((&occupancies[..], &room[..]), [Counts::all(1.0)]);
            let around = ([Passes::default(); 2], (0, false, false));
            let least = brute_force(&chunks, &around, under, &counts);
            let asked = (&counts[..], f64::INFINITY);
            let looked = |looked| quicker(&[&chunk], under, asked, looked);
            let all = looked(Looked::All(&|| true)).expect("all ways");
            assert_eq!(all.map(|best| best.0), least, "seed {seed}");
            let (few, stopped) = (looked(Looked::Few), looked(Looked::All(&|| false)));
            too_many += u32::from(few.is_err());
            for some in [few, stopped] {
                match some {
                    Ok(some) => assert_eq!(some.map(|best| best.0), least, "seed {seed}"),
                    Err(least_s) => {
                        assert!(least.is_none_or(|least| least_s <= least), "seed {seed}");
                    }
                }
            }
        }
        assert!(too_many > 2, "{too_many}");
    }

    proptest! {
        #[test]
        fn oracle_it_is_the_fastest_of_all_choices_that_fit(
            kinds in prop::collection::vec(prop::collection::vec((0_u32..9, 0_i64..9, 0_i64..9, 0_i64..12, 0_i64..7, 0_i64..7), 1..4), 2),
            layout in prop::collection::vec(prop::collection::vec(0_usize..2, 0..4), 1..3),
            moments in prop::collection::vec((0_u32..4, 0_u32..4, 0_usize..2, 0_usize..3, 0_i64..60), 1..4),
            left in prop::collection::vec(0_u32..3, 2),
            counts in prop::collection::vec(0_u32..4, 2),
            ends in (0_u64..9, 0_u64..9, 0_i64..6, any::<bool>(), any::<bool>()),
        ) {
            let (first, last, message, received, sent) = ends;
            let around = ([first, last].map(|bytes| Passes::keeping(Bytes(bytes * UNIT as u64))), (message * UNIT, received, sent));
            let kinds: Vec<Vec<LayersWay>> = kinds
                .iter()
                .map(|kind| kind.iter().enumerate().map(|(set, &numbers)| divided(set, numbers)).collect())
                .collect();
            let chunks: Vec<Vec<Vec<LayersWay>>> = layout
                .iter()
                .map(|layers| layers.iter().map(|&kind| kinds[kind].clone()).collect())
                .collect();
            let occupancies: Vec<Occupancy> = moments
                .iter()
                .map(|&(first, second, chunk, running, _)| {
                    let (mut live, mut kept) = (vec![first, second], left.clone());
                    live.truncate(chunks.len());
                    kept.truncate(chunks.len());
                    let chunk = chunk.min(chunks.len() - 1);
                    let running = [Running::Forward, Running::Backward, Running::Weight][running];
                    let own = if running == Running::Weight { &mut kept } else { &mut live };
                    own[chunk] = own[chunk].max(1);
                    Occupancy { live, kept, chunk, running, messages: 0 }
                })
                .collect();
            let room: Vec<i64> = moments.iter().map(|moment| moment.4 * UNIT).collect();
            let own: Vec<Vec<Vec<LayersWay>>> = chunks
                .iter()
                .map(|layers| layers.iter().map(|choices| unbeaten(choices.clone())).collect())
                .collect();
            let ways: Vec<Chunk<'_>> = own
                .iter()
                .map(|layers| {
                    let layers = layers.iter().map(Vec::as_slice).collect();
                    let ([first, last], messages) = &around;
                    Chunk::new(Some(first), layers, Some(last), *messages)
                })
                .collect();
            let ways: Vec<&Chunk<'_>> = ways.iter().collect();
            let under = (&occupancies[..], &room[..]);
            let each = |own: &dyn Fn(usize) -> Counts| -> Vec<Counts> { (0..2).map(own).collect() };
            let alike = each(&|_| Counts::all(1.0));
            let weighted = each(&|chunk| Counts::all(f64::from(counts[chunk])));
            let least = brute_force(&chunks, &around, under, &alike).unwrap_or(0.0);
            // Each chunk by turns takes less than about half of that, or no less.
            let divided = [0, 1].map(|longer| {
                each(&|chunk| Counts {
                    within_s: if chunk == longer { [(0.5 * least).ceil(), f64::INFINITY] } else { [0.0, (0.5 * least).ceil()] },
                    ..weighted[chunk]
                })
            });
            for counts in [alike, weighted].iter().chain(&divided) {
                let (found, least_s) = fastest(&ways, under, counts, Looked::Few);
                let found = found.map(|found| seconds_of(&chunks, &found.1, counts));
                let least = brute_force(&chunks, &around, under, counts);
                prop_assert_eq!(found, least);
                prop_assert_eq!(least_s, least.unwrap_or(f64::INFINITY));
                // A way that is quicker than something is found where there is one.
                let least = least.unwrap_or(f64::INFINITY);
                let looked = [Looked::Few, Looked::All(&|| true)];
                let asked = [least, least + 0.5, f64::INFINITY].map(|below_s| looked.map(|looked| (below_s, looked)));
                for (below_s, looked) in asked.into_iter().flatten() {
                    let quicker = quicker(&ways, under, (counts, below_s), looked).expect("few ways");
                    prop_assert_eq!(quicker.is_some(), least < below_s);
                    let of = quicker.map(|(seconds, sets)| [seconds, seconds_of(&chunks, &sets, counts)]);
                    prop_assert!(of.is_none_or(|of| of == [least; 2]));
                }
            }
        }

        #[test]
        fn law_of_many_ways_the_smallest_is_kept(
            numbers in prop::collection::vec((0_u32..100_000, 0_i64..100_000), 1..2000),
        ) {
            let ways: Vec<LayersWay> = numbers
                .iter()
                .map(|&(seconds, bytes)| way(0, (seconds, bytes, 0, bytes)))
                .collect();
            let smallest = ways.iter().map(|way| way.bytes[0]).min();
            let kept = unbeaten(ways);
            prop_assert!(kept.len() <= MOST + 2);
            prop_assert_eq!(kept.iter().map(|way| way.bytes[0]).min(), smallest);
            prop_assert!(kept.windows(2).all(|pair| pair[0].seconds <= pair[1].seconds));
        }
    }
}
