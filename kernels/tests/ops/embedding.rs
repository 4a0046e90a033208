//! Tests of `embedding` against its f64 reference in plain loops.

use moefold_kernels::embedding::*;

use crate::support::{Check, inside, integers, oracle_everywhere, statistic, tensor, wide};

#[test]
fn oracle_forward_and_backward() {
    oracle_everywhere(16, |device, rng| {
        let h = [1, 7, 8, 33, 72][rng.size(0..=4)];
        // More rows than one block sorts, and more tokens than a warp takes at a time.
        let (tokens, vocab) = (rng.size(0..=40), [12, 900][rng.size(0..=1)]);
        let tokens = if rng.size(0..=3) == 0 { 1500 } else { tokens };
        let start = rng.size(0..=5);
        // Ids below and above the shard's range too, and many equal ones.
        let distinct = [1, 3, vocab + 8][rng.size(0..=2)];
        let mut ids = rng.ids(tokens, distinct);
        ids.iter_mut().step_by(7).for_each(|id| *id -= 1);
        let (table, dy) = (rng.values(vocab * h), rng.values(tokens * h));
        let held = |id: i32| (start as i32..(start + vocab) as i32).contains(&id);
        let mut y = vec![0.0; tokens * h];
        let mut dtable = wide(&table);
        for (t, &id) in ids.iter().enumerate().filter(|(_, id)| held(**id)) {
            for c in 0..h {
                let at = (id as usize - start) * h + c;
                y[t * h + c] = f64::from(table[at]);
                dtable[at] += f64::from(dy[t * h + c]);
            }
        }
        let ids = integers(device, &ids, &[tokens]);
        let offset = 8 - rng.size(0..=1);
        let kind = [tensor, statistic][rng.size(0..=1)];
        let gradient = inside(&kind(device, &table, &[vocab, h]), offset);
        let dy = inside(&tensor(device, &dy, &[tokens, h]), offset);
        backward(&dy, &ids, &gradient, start);
        let table = inside(&tensor(device, &table, &[vocab, h]), offset);
        let rows = forward(&ids, &table, start);
        assert_eq!(rows.dtype(), device.dtype());
        vec![
            Check("forward", rows, y),
            Check("backward", gradient, dtable),
        ]
    });
}

/// Sums in token order are the same numbers on every device.
#[test]
fn law_gradients_of_equal_ids_are_added_in_token_order() {
    let mut rng = crate::support::Rng::new(5);
    let (tokens, h) = (70, 4);
    let (ids, dy) = (rng.ids(tokens, 3), rng.values(tokens * h));
    let mut devices = crate::support::emulated(1);
    devices.push(moefold_kernels::Device::cpu(1));
    let run = |device: &moefold_kernels::Device| {
        let dtable = statistic(device, &vec![0.0; 3 * h], &[3, h]);
        let dy = statistic(device, &dy, &[tokens, h]);
        backward(&dy, &integers(device, &ids, &[tokens]), &dtable, 0);
        dtable.to_f32()
    };
    let want = run(&moefold_kernels::Device::cpu(1));
    for device in devices {
        crate::support::assert_bits("dtable", &run(&device), &want, 5);
    }
}
