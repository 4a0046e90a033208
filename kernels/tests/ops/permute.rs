//! Tests of `permute` against its f64 reference in plain loops.

use moefold_kernels::Device;
use moefold_kernels::permute::*;

use crate::support::{
    Check, differences, inner, integers, oracle_everywhere, statistic, tensor, wide,
};

/// The rows in order: for each expert in turn, its slots in turn.
fn slots_by_expert(ids: &[i32], experts: usize) -> Vec<usize> {
    let of = |e: usize| (0..ids.len()).filter(move |&slot| ids[slot] as usize == e);
    (0..experts).flat_map(of).collect()
}

/// Everything in the map, exactly.
#[track_caller]
fn assert_map(map: &RowMap, ids: &[i32], topk: usize, experts: usize) {
    let slots = slots_by_expert(ids, experts);
    let as_i32 = |x: &[usize]| x.iter().map(|&x| x as i32).collect::<Vec<_>>();
    assert_eq!(map.slot_of.to_i32(), as_i32(&slots));
    let tokens: Vec<usize> = slots.iter().map(|slot| slot / topk).collect();
    assert_eq!(map.token_of.to_i32(), as_i32(&tokens));
    let mut row_of = vec![0; ids.len()];
    for (row, &slot) in slots.iter().enumerate() {
        row_of[slot] = row as i32;
    }
    assert_eq!(map.row_of.to_i32(), row_of);
    let count = |e: usize| ids.iter().filter(|&&id| id as usize == e).count();
    assert_eq!(map.counts(), (0..experts).map(count).collect::<Vec<_>>());
    let ends = (0..=experts).map(|e| (0..e).map(count).sum());
    assert_eq!(map.offsets.to_i32(), as_i32(&ends.collect::<Vec<_>>()));
}

/// More slots than a block sorts at a time, more experts than a block has threads, ids in runs.
#[test]
fn oracle_map_of_many_slots() {
    oracle_everywhere(3, |device, rng| {
        let (topk, experts) = (
            rng.size(1..=8),
            [3, 33, 128, 600, MAX_EXPERTS][rng.size(0..=4)],
        );
        let n = rng.size(50..=400) * topk;
        let runs = rng.coin();
        let ids: Vec<i32> = (0..n)
            .map(|slot| {
                let id = if runs {
                    slot / 50 % experts
                } else {
                    rng.size(0..=experts - 1)
                };
                id as i32
            })
            .collect();
        let map = map(&integers(device, &ids, &[n / topk, topk]), experts);
        assert_map(&map, &ids, topk, experts);
        Vec::new()
    });
}

#[test]
fn oracle_map_and_copies() {
    oracle_everywhere(10, |device, rng| {
        let (tokens, topk, experts) = (
            [0, 1, rng.size(2..=40)][rng.size(0..=2)],
            rng.size(1..=9),
            rng.size(1..=9),
        );
        // Any width, and whole 16-byte pieces.
        let h = [rng.size(1..=20), 8 * rng.size(1..=5)][rng.size(0..=1)];
        let n = tokens * topk;
        let ids = if rng.size(0..=3) == 0 {
            vec![rng.size(0..=experts - 1) as i32; n]
        } else {
            rng.ids(n, experts)
        };
        let slots = slots_by_expert(&ids, experts);
        let map = map(&integers(device, &ids, &[tokens, topk]), experts);
        assert_map(&map, &ids, topk, experts);

        let (x, y, dy) = (rng.values(tokens * h), rng.values(n * h), rng.values(n * h));
        let (weights, dx) = (rng.values(n), rng.values(tokens * h));
        let permute = |x: &[f64]| -> Vec<f64> {
            slots
                .iter()
                .flat_map(|s| x[s / topk * h..][..h].to_vec())
                .collect()
        };
        let unpermute_twin = |y: &[f64], w: &[f64]| {
            let mut x = vec![0.0; tokens * h];
            for (row, slot) in slots.iter().enumerate() {
                for c in 0..h {
                    x[slot / topk * h + c] += w[*slot] * y[row * h + c];
                }
            }
            x
        };
        let (yw, ww, ones) = (wide(&y), wide(&weights), vec![1.0; n]);
        let by_row: Vec<f64> = slots.iter().map(|&s| ww[s]).collect();
        let t = |values: &[f32], rows: usize| tensor(device, values, &[rows, h]);
        let w = statistic(device, &weights, &[tokens, topk]);
        let (dy_got, dw_got) = unpermute_weighted_backward(&t(&dx, tokens), &map, &t(&y, n), &w);
        let row_weights = permute_slots(&w, &map);
        vec![
            Check("forward", forward(&t(&x, tokens), &map), permute(&wide(&x))),
            Check("backward", backward(&t(&dy, n), &map), {
                differences(&x, |x| inner(&permute(x), &dy))
            }),
            Check(
                "unpermute",
                unpermute(&t(&y, n), &map, None),
                unpermute_twin(&yw, &ones),
            ),
            Check(
                "weighted",
                unpermute(&t(&y, n), &map, Some(&w)),
                unpermute_twin(&yw, &ww),
            ),
            Check(
                "unpermute_backward",
                unpermute_backward(&t(&dx, tokens), &map),
                permute(&wide(&dx)),
            ),
            Check(
                "dy",
                dy_got,
                differences(&y, |y| inner(&unpermute_twin(y, &ww), &dx)),
            ),
            Check("dweights", dw_got, {
                differences(&weights, |w| inner(&unpermute_twin(&yw, w), &dx))
            }),
            Check(
                "unpermute_slots",
                unpermute_slots(&row_weights, &map),
                ww.clone(),
            ),
            Check("permute_slots", row_weights, by_row),
        ]
    });
}

/// The slots that a limit leaves each expert, by the definition.
fn within(ids: &[i32], experts: usize, capacity: usize, probs: Option<&[f32]>) -> Vec<i32> {
    let mut kept = vec![-1; ids.len()];
    for e in 0..experts {
        let mut slots: Vec<usize> = (0..ids.len()).filter(|&s| ids[s] as usize == e).collect();
        if let Some(probs) = probs {
            slots.sort_by(|&a, &b| probs[b].partial_cmp(&probs[a]).unwrap().then(a.cmp(&b)));
        }
        for &slot in slots.iter().take(capacity) {
            kept[slot] = e as i32;
        }
    }
    kept
}

/// A limit, the map of what it leaves in rows of any room, and copies by that map. Equal probabilities too.
#[test]
fn oracle_what_a_limit_leaves() {
    oracle_everywhere(8, |device, rng| {
        let (tokens, topk, experts) = (rng.size(0..=60), rng.size(1..=4), rng.size(1..=9));
        let (n, h) = (tokens * topk, [rng.size(1..=20), 8][rng.size(0..=1)]);
        let ids = rng.ids(n, experts);
        let probs: Vec<f32> = (0..n).map(|_| rng.size(0..=5) as f32 / 8.0).collect();
        let capacity = rng.size(1..=(2 * n / experts).max(1));
        let dims = [tokens, topk];
        let all = map(&integers(device, &ids, &dims), experts);
        let by = rng.coin().then_some(&probs[..]);
        let by_there = by.map(|probs| statistic(device, probs, &dims));
        let left = limit(
            &integers(device, &ids, &dims),
            &all,
            capacity,
            by_there.as_ref(),
        );
        let kept = within(&ids, experts, capacity, by);
        assert_eq!(left.to_i32(), kept);

        // Some of the experts, as a rank holds them.
        let first = rng.size(0..=experts - 1);
        let held = first..rng.size(first + 1..=experts);
        let mut rows = Vec::new();
        let mut offsets = vec![0];
        let each = rng.coin();
        for e in held.clone() {
            rows.extend(
                (0..n)
                    .filter(|&slot| kept[slot] == e as i32)
                    .map(|slot| slot as i32),
            );
            if each {
                rows.resize((e + 1 - first) * capacity, -1);
            }
            offsets.push(rows.len() as i32);
        }
        let room = if each {
            Room::Each(capacity)
        } else {
            // The rest is the last expert's.
            rows.resize(rows.len() + rng.size(0..=5), -1);
            *offsets.last_mut().expect("an end") = rows.len() as i32;
            Room::Rows(rows.len())
        };
        let map = map_of(&left, held, room);
        if !rows.is_empty() {
            assert_eq!(map.offsets.to_i32(), offsets);
        }
        assert_eq!(map.slot_of.to_i32(), rows);
        let token = |&slot: &i32| if slot < 0 { -1 } else { slot / topk as i32 };
        assert_eq!(
            map.token_of.to_i32(),
            rows.iter().map(token).collect::<Vec<_>>()
        );

        let (x, y, slots) = (
            rng.values(tokens * h),
            rng.values(rows.len() * h),
            rng.values(n),
        );
        let mut there = vec![0.0; rows.len() * h];
        let mut back = vec![0.0; tokens * h];
        let mut by_row = vec![0.0; rows.len()];
        let mut by_slot = vec![0.0; n];
        for (row, &slot) in rows.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            let slot = slot as usize;
            for c in 0..h {
                there[row * h + c] = wide(&x)[slot / topk * h + c];
                back[slot / topk * h + c] += wide(&y)[row * h + c];
            }
            by_row[row] = f64::from(slots[slot]);
            by_slot[slot] = by_row[row];
        }
        let by_rows = permute_slots(&statistic(device, &slots, &dims), &map);
        let y = tensor(device, &y, &[rows.len(), h]);
        vec![
            Check(
                "forward",
                forward(&tensor(device, &x, &[tokens, h]), &map),
                there,
            ),
            Check("unpermute", unpermute(&y, &map, None), back),
            Check("unpermute_slots", unpermute_slots(&by_rows, &map), by_slot),
            Check("permute_slots", by_rows, by_row),
        ]
    });
}

/// With one row a token and identity experts, there and back is where it began.
#[test]
fn law_permute_then_unpermute_is_identity() {
    let device = Device::cpu(1);
    let map = map(&integers(&device, &[2, 0, 2, 1, 0], &[5, 1]), 3);
    let x: Vec<f32> = (0..15).map(|i| i as f32).collect();
    let y = forward(&tensor(&device, &x, &[5, 3]), &map);
    assert_eq!(unpermute(&y, &map, None).to_f32(), x);
    assert_eq!(map.counts(), [2, 1, 2]);
}
