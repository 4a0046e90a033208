//! The choice of a rank that takes the least time of all that fit it, where there are not too many ways to look at.
//!
//! At one instant a rank is a knapsack: what its layers save, keep and work in there at least is to fit its room. It is known before what
//! layers take at least in so much of that room. So a way to run the first of them is looked at only where no other beats it, and where it may be
//! faster with the best of the others than what was found: dynamic programming with states that a relaxation fathoms (Morin and Marsten,
//! Branch-and-bound strategies for dynamic programming, 1976).

use std::cell::Cell;

use super::{
    Choice, Chunk, Counts, LayersWay, Row, Way, array, at_instants, fewest, first_unbeaten, held,
    passes, taken, then,
};
use crate::memory::Occupancy;
use crate::runtime::Passes;
use crate::search::savers::best_steps;

/// Ways of which none is let go of, where not all are looked at; few in tests, whose layers are.
const MANY: usize = if cfg!(test) { 40 } else { 1000 };
/// Ways of two chunks together that are looked at then.
const PAIRS: usize = 200_000;
/// Ways that are held at once, where all are looked at: half a gigabyte or so.
const HELD: usize = 1 << 22;
/// After how many ways more it is asked whether to go on.
const ASKED: usize = 1 << 10;
/// Ways by what they take at an instant that are kept apart.
const APART: usize = if cfg!(test) { 24 } else { 400 };

/// Ways are too many to look at all.
#[derive(Debug)]
struct TooMany;

/// How many ways are looked at.
#[derive(Clone, Copy)]
pub(crate) enum Looked<'w> {
    /// Where they are not too many.
    Few,
    /// All, as long as this says to go on.
    All(&'w dyn Fn() -> bool),
}

impl Looked<'_> {
    /// How many ways are kept, and of two chunks together looked at, at most.
    fn most(self) -> [usize; 2] {
        match self {
            Self::Few => [MANY, PAIRS],
            Self::All(_) => [HELD, usize::MAX],
        }
    }
}

/// Counts ways that are looked at.
struct Count<'w> {
    looked: Looked<'w>,
    seen: Cell<usize>,
    /// Since some were told apart last.
    held: Cell<usize>,
    /// Whether not all were looked at.
    is_over: Cell<bool>,
}

impl<'w> Count<'w> {
    fn new(looked: Looked<'w>) -> Self {
        Self {
            looked,
            seen: Cell::new(0),
            held: Cell::new(0),
            is_over: Cell::new(false),
        }
    }

    /// Whether another way is looked at.
    fn goes_on(&self) -> bool {
        self.seen.set(self.seen.get() + 1);
        let goes_on = match self.looked {
            Looked::Few => true,
            Looked::All(goes_on) => {
                self.held.get() <= HELD && (!self.seen.get().is_multiple_of(ASKED) || goes_on())
            }
        };
        self.is_over.set(self.is_over.get() || !goes_on);
        !self.is_over.get()
    }

    /// A way, if there is one and it is looked at.
    fn holds<T>(&self, way: impl FnOnce() -> Option<T>) -> Option<T> {
        if !self.goes_on() {
            return None;
        }
        let way = way();
        self.held.set(self.held.get() + usize::from(way.is_some()));
        way
    }

    /// Of ways that were held, those that no other beats.
    fn unbeaten<B: AsRef<[i64]>>(&self, ways: Vec<Way<B>>) -> Result<Vec<Way<B>>, TooMany> {
        self.held.set(0);
        let [most, _] = self.looked.most();
        let ways = first_unbeaten(ways, |kept| kept <= most && self.goes_on());
        if self.is_over.get() || ways.len() > most {
            return Err(TooMany);
        }
        Ok(ways)
    }
}

/// A way to run layers by what it takes at an instant.
#[derive(Debug, Clone, Copy, Default)]
struct Own {
    seconds: f64,
    bytes: i64,
    /// Seconds that it takes more than the best way, were bytes to be had at the rate at which parts of layers let go of them: with it a rank
    /// takes so much more than parts of layers do, at least (a reduced cost).
    more_s: f64,
}

/// The fastest first; those behind have fewer bytes.
type Front = Vec<Own>;

/// Chunks of a rank at an instant.
struct Knapsack<'r, 'l> {
    chunks: &'r [&'r Chunk<'l>],
    counts: &'r [Counts],
    at: &'r Occupancy,
    /// By chunk, what it takes beside its layers at least.
    beside: Vec<i64>,
    /// What layers may take.
    room: i64,
    /// Seconds that all layers count at least, where parts of them may take other choices; infinite where these have no room.
    least_s: f64,
    /// Seconds of a byte that the last of these parts lets go of.
    rate: f64,
}

/// The sets of the layers of each chunk that take the least time of all that fit, where that is less than something. None where none does.
///
/// # Errors
/// Where there are too many ways to say: seconds that any counts at least.
pub(crate) fn quicker(
    chunks: &[&Chunk<'_>],
    under: (&[Occupancy], &[i64]),
    (counts, below_s): (&[Counts], f64),
    looked: Looked<'_>,
) -> Result<Option<Choice>, f64> {
    let knapsacks = under.0.iter().zip(under.1);
    let knapsacks = knapsacks.map(|(at, room)| Knapsack::new(chunks, counts, (at, *room)));
    let tightest = (knapsacks.enumerate()).max_by(|a, b| a.1.least_s.total_cmp(&b.1.least_s));
    let (instant, knapsack) = tightest.expect("passes run at instants");
    let least_s = knapsack.least_s;
    if least_s >= below_s {
        return Ok(None);
    }
    // The best is mostly near what parts of layers take, below which there are fewer ways to look at.
    let far_s = if below_s < f64::INFINITY {
        below_s - least_s
    } else {
        least_s
    };
    let nearer = [1.0 / 16.0, 0.25].map(|part| least_s + part * far_s);
    let mut no_less_s = least_s;
    for below_s in nearer.into_iter().chain([below_s]) {
        if no_less_s >= below_s {
            continue;
        }
        let found = knapsack.look((instant, under), below_s, looked);
        let found = found.map_err(|TooMany| no_less_s)?;
        if found.is_some() {
            return Ok(found);
        }
        no_less_s = below_s;
    }
    Ok(None)
}

impl<'r, 'l> Knapsack<'r, 'l> {
    fn new(
        chunks: &'r [&'r Chunk<'l>],
        counts: &'r [Counts],
        (at, room): (&'r Occupancy, i64),
    ) -> Self {
        let of_chunk = |(number, chunk): (usize, &&Chunk<'_>)| {
            let ends = passes(chunk.ended(&array(chunk.first)));
            if chunk.layers.is_empty() {
                return taken(&ends, number, at);
            }
            let [received, sent] = chunk.messages;
            let last = chunk.last.between(received, sent);
            held(&ends, number, at) + running(&last, number, at)
        };
        let beside: Vec<i64> = chunks.iter().enumerate().map(of_chunk).collect();
        let mut knapsack = Self {
            room: room - beside.iter().sum::<i64>(),
            chunks,
            counts,
            at,
            beside,
            least_s: 0.0,
            rate: 0.0,
        };
        (knapsack.least_s, knapsack.rate) = knapsack.in_parts();
        knapsack
    }

    /// The best choice at all instants that counts less than something, if there is one. This is one of the instants.
    fn look(
        &self,
        (instant, (occupancies, room)): (usize, (&[Occupancy], &[i64])),
        below_s: f64,
        looked: Looked<'_>,
    ) -> Result<Option<Choice>, TooMany> {
        let (chunks, count) = (0..self.chunks.len(), Count::new(looked));
        let each: Vec<Row<[i64; 5]>> = chunks
            .map(|number| self.ways(number, below_s, &count))
            .collect::<Result<_, _>>()?;
        let tried = each.iter().enumerate().map(|(number, row)| {
            let chunk = (number, self.counts[number].weight);
            at_instants(row.last(), 0..row.last().len(), chunk, occupancies)
        });
        let tried: Vec<Vec<Way<Vec<i64>>>> = tried.collect();
        let later = self.later(below_s);
        let mut row = Row::new(room.iter().map(|room| -room).collect::<Vec<i64>>());
        for (number, own) in tried.iter().enumerate() {
            if row.last().len().saturating_mul(own.len()) > looked.most()[1] {
                return Err(TooMany);
            }
            let behind = number + 1;
            let fewest = fewest(&tried[behind..], room.len());
            let beside: i64 = self.beside[behind..].iter().sum();
            let with = |before: &Way<Vec<i64>>, own: &Way<Vec<i64>>| {
                let left = -(before.bytes[instant] + own.bytes[instant]) - beside;
                let least_s = least(&later[behind], left)?;
                let both = || before.bytes.iter().zip(&own.bytes).map(|(a, b)| a + b);
                let may_win = before.seconds + own.seconds + least_s < below_s;
                let fits = may_win && both().zip(&fewest).all(|(both, later)| both + later <= 0);
                fits.then(|| both().collect())
            };
            let mut ways = row.ways(own, |before, own| count.holds(|| with(before, own)));
            if behind == tried.len() {
                let fastest = ways
                    .into_iter()
                    .min_by(|a, b| a.seconds.total_cmp(&b.seconds));
                ways = fastest.into_iter().collect();
            }
            row.0.push(count.unbeaten(ways)?);
        }
        let best = row.last().first().map(|best| {
            let places = row.choices(0).into_iter().zip(&each);
            let sets = places.map(|(place, row)| row.choices(place));
            (best.seconds, sets.collect())
        });
        Ok(best)
    }

    /// Seconds that a layer counts and bytes that it takes at least under each of its choices, of those that no other beats.
    fn of_layer(&self, number: usize, layer: usize) -> Front {
        let chunk = self.chunks[number];
        let is_last = layer + 1 == chunk.layers.len() && chunk.last == Passes::default();
        let of = |way: &LayersWay| {
            let own = passes(way.bytes);
            let works = if is_last {
                running(&own, number, self.at)
            } else {
                0
            };
            let bytes = held(&own, number, self.at) + works;
            let seconds = way.seconds * self.counts[number].weight;
            let more_s = seconds + self.rate * bytes as f64;
            Own {
                seconds,
                bytes,
                more_s,
            }
        };
        let mut ways: Front = chunk.layers[layer].iter().map(of).collect();
        let best_s = ways.iter().map(|way| way.more_s);
        let best_s = best_s.fold(f64::INFINITY, f64::min);
        for way in &mut ways {
            way.more_s -= best_s;
        }
        unbeaten(ways)
    }

    /// Those of all layers of a chunk, the last first.
    fn of_layers(&self, number: usize) -> impl Iterator<Item = Front> {
        let layers = (0..self.chunks[number].layers.len()).rev();
        layers.map(move |layer| self.of_layer(number, layer))
    }

    /// See [`Self::least_s`] and [`Self::rate`].
    fn in_parts(&self) -> (f64, f64) {
        let (mut seconds, mut over, mut rate) = (0.0, -self.room as f64, 0.0);
        let mut steps = Vec::new();
        for front in (0..self.chunks.len()).flat_map(|number| self.of_layers(number)) {
            // A layer without a choice has none that fits.
            let Some(first) = front.first() else {
                return (f64::INFINITY, 0.0);
            };
            seconds += first.seconds;
            over += first.bytes as f64;
            let ways = front.iter().map(|way| {
                let less = first.bytes - way.bytes;
                [way.seconds - first.seconds, less as f64]
            });
            steps.extend(best_steps(ways.collect()));
        }
        steps.sort_by(|a, b| (a[0] * b[1]).total_cmp(&(b[0] * a[1])));
        for [own_s, bytes] in steps {
            if over <= 0.0 {
                break;
            }
            rate = own_s / bytes;
            if over <= bytes {
                seconds += over * rate;
                over = 0.0;
                break;
            }
            seconds += own_s;
            over -= bytes;
        }
        let seconds = if over > 1.0 { f64::INFINITY } else { seconds };
        (seconds, rate)
    }

    /// Ways of some layers and of more of which any may be part of a choice that counts less than something.
    fn both(&self, front: &Front, other: &Front, below_s: f64) -> Front {
        // Sums are rounded.
        let more_s = (below_s - self.least_s) + 1e-9 * below_s;
        let each = other.iter().flat_map(|own| {
            let with = move |way: &Own| Own {
                seconds: way.seconds + own.seconds,
                bytes: way.bytes + own.bytes,
                more_s: way.more_s + own.more_s,
            };
            front.iter().map(with)
        });
        let may_win = |way: &Own| way.seconds < below_s && way.more_s < more_s;
        let ways = unbeaten(each.filter(may_win).collect());
        // Of too many, some that are next to each other are one that is no worse than any of them.
        let parts = ways.chunks(ways.len().div_ceil(APART).max(1));
        let each = parts.map(|part| {
            let (first, bytes) = (part[0], part[part.len() - 1].bytes);
            let more_s = first.more_s - self.rate * (first.bytes - bytes) as f64;
            Own {
                bytes,
                more_s,
                ..first
            }
        });
        each.collect()
    }

    /// Ways of all layers of chunks from each on, and of none.
    fn later(&self, below_s: f64) -> Vec<Front> {
        let mut fronts = vec![vec![Own::default()]];
        for number in (0..self.chunks.len()).rev() {
            let behind = fronts[fronts.len() - 1].clone();
            let of_layers = self.of_layers(number);
            fronts.push(of_layers.fold(behind, |front, own| self.both(&front, &own, below_s)));
        }
        fronts.reverse();
        fronts
    }

    /// Ways of a chunk that may be part of one that counts less than something.
    fn ways(
        &self,
        number: usize,
        below_s: f64,
        count: &Count<'_>,
    ) -> Result<Row<[i64; 5]>, TooMany> {
        let chunk = self.chunks[number];
        let others = (0..self.chunks.len()).filter(|other| *other != number);
        let others = others.flat_map(|other| self.of_layers(other));
        let others = others.fold(vec![Own::default()], |front, own| {
            self.both(&front, &own, below_s)
        });
        let mut rest = vec![others];
        for own in self.of_layers(number) {
            rest.push(self.both(&rest[rest.len() - 1], &own, below_s));
        }
        rest.pop();
        let first = held(&chunk.first, number, self.at);
        let mut row = Row::new(array(chunk.first));
        if chunk.layers.is_empty() {
            row.0[0][0].bytes = chunk.ended(&row.0[0][0].bytes);
        }
        for (layer, choices) in (1..).zip(&chunk.layers) {
            let rest = rest.pop().expect("one for each layer");
            let is_last = layer == chunk.layers.len();
            let with = |before: &LayersWay, own: &LayersWay| {
                let seconds = (before.seconds + own.seconds) * self.counts[number].weight;
                let bytes = then(&before.bytes, &own.bytes);
                let (bytes, taken) = if is_last {
                    let ended = chunk.ended(&bytes);
                    let taken = taken(&passes(ended), number, self.at);
                    (ended, taken - self.beside[number])
                } else {
                    (bytes, held(&passes(bytes), number, self.at) - first)
                };
                let least_s = least(&rest, self.room - taken)?;
                (seconds + least_s < below_s).then_some(bytes)
            };
            let ways = row.ways(choices, |before, own| count.holds(|| with(before, own)));
            row.0.push(count.unbeaten(ways)?);
        }
        let mut ways = row.0.pop().expect("what it begins with");
        let among = self.counts[number].among(&ways);
        ways.truncate(among.end);
        ways.drain(..among.start);
        row.0.push(ways);
        Ok(row)
    }
}

/// What the pass works in that runs at an instant, where it is of a chunk.
fn running(passes: &Passes<i64>, chunk: usize, at: &Occupancy) -> i64 {
    taken(passes, chunk, at) - held(passes, chunk, at)
}

/// Seconds of the fastest that takes so many bytes at most.
fn least(front: &Front, most: i64) -> Option<f64> {
    let place = front.partition_point(|way| way.bytes > most);
    front.get(place).map(|way| way.seconds)
}

/// Those that no other beats.
fn unbeaten(mut ways: Front) -> Front {
    ways.sort_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.bytes.cmp(&b.bytes)));
    let mut fewest = i64::MAX;
    ways.retain(|way| {
        let are_fewer = way.bytes < fewest;
        fewest = fewest.min(way.bytes);
        are_fewer
    });
    ways
}
