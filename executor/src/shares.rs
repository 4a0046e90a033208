//! Which tokens of a microbatch a rank computes on.

use moefold_planner::mesh;

use crate::rank::Context;

/// The tokens of the rank's tensor-parallel group, in its order, as places in the microbatch of
/// `[sequences, seq_len]`. Of context-parallel ranks each has two chunks of every sequence: the first ones of
/// all sequences, then the second ones.
pub(crate) fn tokens(
    cx: &Context,
    [sequences, seq_len]: [usize; 2],
) -> impl ExactSizeIterator<Item = usize> + Clone + use<> {
    let chunks = match cx.layout.cp() {
        1 => vec![0],
        cp => mesh::chunks(cp, cx.at.cp).to_vec(),
    };
    let own = sequences * seq_len / cx.layout.cp() as usize;
    let len = own / (chunks.len() * sequences);
    (0..own).map(move |token| {
        let run = token / len;
        let (chunk, sequence) = (chunks[run / sequences] as usize, run % sequences);
        sequence * seq_len + chunk * len + token % len
    })
}

/// Runs of tokens that [`tokens`] gives of one sequence each: of how many tokens one is. Run `i` is of sequence
/// `i % sequences`.
pub(crate) fn run_len(cx: &Context, tokens: usize) -> usize {
    let runs = cx.layout.mbs() as usize * if cx.layout.cp() == 1 { 1 } else { 2 };
    tokens / runs
}
