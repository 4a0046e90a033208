//! The choice of a rank, against all choices of its layers.

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
