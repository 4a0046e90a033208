//! Tests of `latent_kv` against its f64 reference in plain loops.

use moefold_kernels::latent_kv::*;

use crate::support::{Check, differences, inner, oracle_everywhere, tensor, wide};

/// `[tokens, heads, nope, rope, v]`.
type Sizes = [usize; 5];

/// Keys, then values.
fn reference(kv: &[f64], shared: &[f64], [tokens, heads, nope, rope, v]: Sizes) -> [Vec<f64>; 2] {
    let (mut keys, mut values) = (Vec::new(), Vec::new());
    for token in 0..tokens {
        for head in 0..heads {
            let at = (token * heads + head) * (nope + v);
            for i in 0..nope {
                keys.push(kv[at + i]);
            }
            for i in 0..rope {
                keys.push(shared[token * rope + i]);
            }
            for i in 0..v {
                values.push(kv[at + nope + i]);
            }
        }
    }
    [keys, values]
}

#[test]
fn oracle_forward_and_backward() {
    oracle_everywhere(12, |device, rng| {
        // Whole accesses and not, heads that fill a block's threads and more.
        let whole = rng.coin();
        let mut width = |most: usize| {
            if whole {
                8 * rng.size(1..=most)
            } else {
                rng.size(1..=8 * most)
            }
        };
        let (nope, rope, v) = (width(5), width(3), width(5));
        let (tokens, heads) = (rng.size(0..=6), [1, rng.size(2..=9), 70][rng.size(0..=2)]);
        let sizes = [tokens, heads, nope, rope, v];
        let (kv, shared) = (
            rng.values(tokens * heads * (nope + v)),
            rng.values(tokens * rope),
        );
        let dkeys = rng.values(tokens * heads * (nope + rope));
        let dvalues = rng.values(tokens * heads * v);
        let [keys_want, values_want] = reference(&wide(&kv), &wide(&shared), sizes);
        let loss = |kv: &[f64], shared: &[f64]| {
            let [keys, values] = reference(kv, shared, sizes);
            inner(&keys, &dkeys) + inner(&values, &dvalues)
        };
        // Copies have their gradients one by one; only a few are asked by differences.
        let (few, rest) = kv.split_at(kv.len().min(40));
        let dkv_want = differences(few, |few| {
            loss(&[few, &wide(rest)].concat(), &wide(&shared))
        });
        let dshared_want = differences(&shared, |shared| loss(&wide(&kv), shared));

        let kv = tensor(device, &kv, &[tokens, heads, nope + v]);
        let (keys, values) = forward(&kv, &tensor(device, &shared, &[tokens, rope]), v);
        let dkeys = tensor(device, &dkeys, &[tokens, heads, nope + rope]);
        let dvalues = tensor(device, &dvalues, &[tokens, heads, v]);
        let (dkv, dshared) = backward(&dkeys, &dvalues, rope);
        // Backward undoes forward, but for what is summed.
        let (back, _) = backward(&keys, &values, rope);
        assert_eq!(back.to_f32(), kv.to_f32());
        vec![
            Check("keys", keys, keys_want),
            Check("values", values, values_want),
            Check("dkv", dkv.view(0, &[dkv_want.len()]), dkv_want),
            Check("dshared", dshared, dshared_want),
        ]
    });
}
