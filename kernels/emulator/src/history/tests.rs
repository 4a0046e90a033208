//! A history against a naive twin that keeps every use of every byte.

use moefold_kernels::cuda::platform::Stream;

use super::*;
use crate::random::Random;
use crate::streams::Streams;

const BYTES: usize = 12;

fn some_uses(random: &mut Random) -> Vec<Use> {
    let one = |random: &mut Random| {
        let start = random.below(BYTES);
        Use {
            range: start..start + 1 + random.below(BYTES - start),
            writes: random.one_in(4),
        }
    };
    let count = 1 + random.below(2);
    (0..count).map(|_| one(random)).collect()
}

/// Whether two uses do not go together.
fn meet(a: &Use, b: &Use) -> bool {
    (a.writes || b.writes) && a.range.start < b.range.end && b.range.start < a.range.end
}

/// Whatever streams do and wait for, a use is refused exactly where some use of one of its bytes before it,
/// of whatever age, is not over and one of the two writes.
#[test]
fn differential_a_use_is_in_order_where_it_comes_after_every_use_before() {
    let (mut refused, mut longest) = (0, 0);
    for seed in 0..1500 {
        let mut random = Random::new(seed, 0);
        let mut ranks = [Streams::new(1, None), Streams::new(1, None)];
        let mut history = History::new(BYTES);
        let mut all: Vec<(Work, Use)> = Vec::new();
        for _ in 0..80 {
            let by = random.below(2);
            ranks[by].switch(Stream::ALL[random.below(3)]);
            if !random.one_in(6) {
                // It waits for where another stream has come.
                let of = &mut ranks[random.below(2)];
                let back = of.switch(Stream::ALL[random.below(3)]);
                let mark = of.mark();
                of.switch(back);
                ranks[by].wait_for(&mark);
                continue;
            }
            let uses = some_uses(&mut random);
            let (event, over) = ranks[by].begin("work");
            let in_order = all.iter().all(|(before, used)| {
                over.knows(*before) || !uses.iter().any(|new| meet(used, new))
            });
            let noted = history.note(event, over, &uses);
            assert_eq!(noted.is_ok(), in_order, "seed {seed}: {noted:?}");
            if !in_order {
                refused += 1;
                break;
            }
            all.extend(uses.into_iter().map(|used| (event, used)));
            longest = longest.max(all.len());
        }
    }
    assert!(
        refused > 500 && longest > 15,
        "{refused} of 1500, {longest}"
    );
}

#[test]
fn golden_what_collides_is_named_with_the_bytes_that_both_use() {
    let mut ranks = [Streams::new(1, None), Streams::new(1, None)];
    let mut history = History::new(BYTES);
    let used = |range, writes| [Use { range, writes }];
    let (event, over) = ranks[0].begin("norm");
    history
        .note(event, over, &used(2..6, true))
        .expect("the first");
    let done = ranks[0].mark();
    ranks[1].switch(Stream::Communication);
    ranks[1].wait_for(&done);
    let (read, over) = ranks[1].begin("sum");
    history
        .note(read, over, &used(4..9, false))
        .expect("it waited");
    let (write, over) = ranks[0].begin("fill");
    let collision = history.note(write, over, &used(0..12, true));
    let expected = Collision {
        range: 4..6,
        writes: true,
        before: read,
        wrote_before: false,
    };
    assert_eq!(collision, Err(expected));
    let said = read.to_string();
    assert!(
        said.starts_with("sum in the communication stream of emulator "),
        "{said}"
    );
}

/// What is used as a whole is remembered as one piece again.
#[test]
fn pieces_with_one_past_are_joined() {
    let mut streams = Streams::new(1, None);
    let mut history = History::new(BYTES);
    for at in 0..BYTES {
        let (event, over) = streams.begin("rows");
        let range = at..at + 1;
        history
            .note(
                event,
                over,
                &[Use {
                    range,
                    writes: at % 2 == 0,
                }],
            )
            .expect("one stream");
    }
    assert_eq!(history.pieces.len(), BYTES);
    let (event, over) = streams.begin("all");
    history
        .note(
            event,
            over,
            &[Use {
                range: 0..BYTES,
                writes: true,
            }],
        )
        .expect("one stream");
    assert_eq!(history.pieces.len(), 1);
    for at in 0..BYTES {
        let (event, over) = streams.begin("rows");
        history
            .note(
                event,
                over,
                &[Use {
                    range: at..at + 1,
                    writes: false,
                }],
            )
            .expect("one stream");
    }
    let (event, over) = streams.begin("all");
    history
        .note(
            event,
            over,
            &[Use {
                range: 0..BYTES,
                writes: false,
            }],
        )
        .expect("one stream");
    assert_eq!(history.pieces.len(), 1);
}
