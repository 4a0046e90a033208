//! Tests of `embedding` against its f64 twin in plain loops.

use super::*;
use crate::testing::{Check, integers, oracle, tensor, wide};

#[test]
fn oracle_forward_and_backward() {
    oracle(30, |device, rng| {
        let (tokens, vocab, h) = (rng.size(0..=40), rng.size(1..=12), rng.size(1..=20));
        let start = rng.size(0..=5);
        // Ids below and above the shard's range too, and many equal ones.
        let ids = rng.ids(tokens, vocab + 8);
        let (table, dy) = (rng.values(vocab * h), rng.values(tokens * h));
        let held = |id: i32| (start..start + vocab).contains(&(id as usize));
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
        let dtable_t = tensor(device, &table, &[vocab, h]);
        backward(&tensor(device, &dy, &[tokens, h]), &ids, &dtable_t, start);
        let table = tensor(device, &table, &[vocab, h]);
        vec![
            Check("forward", forward(&ids, &table, start), y),
            Check("backward", dtable_t, dtable),
        ]
    });
}
