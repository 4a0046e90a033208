//! What other numbers of GPUs ([`table`]) and other lengths of sequences ([`lengths`]) come to, of an answer that has
//! tried several.

use moefold_planner::answer::{Answer, Length, Size};

use crate::format;
use crate::tables::Table;

/// A column of a number of GPUs: its head, and what it says where it is known.
type Column = (&'static str, fn(&Size) -> Option<String>);

/// In order.
const COLUMNS: [Column; 8] = [
    (">GPUs", |size| Some(format::grouped(size.gpus.into()))),
    (">step (s)", |size| Some(format::three_digits(size.step_s))),
    (">tokens/s", |size| {
        Some(format::grouped(size.tokens_per_s.round() as u64))
    }),
    (">save every (steps)", |size| {
        let failures = size.failures?;
        Some(format::grouped(failures.save_every_steps))
    }),
    (">that is (min)", |size| {
        let steps = size.failures?.save_every_steps as f64;
        Some(format::three_digits(steps * size.step_s / 60.0))
    }),
    (">goodput (%)", |size| {
        Some(format::three_digits(100.0 * size.failures?.goodput))
    }),
    (">days", |size| Some(format::three_digits(size.days?))),
    (">USD per 1e12 tokens", |size| {
        let usd = size.usd_per_trillion_tokens?;
        Some(format::grouped(usd.round() as u64))
    }),
];

/// One row for each number of GPUs, that of the plans marked; nothing where one was asked about.
pub(crate) fn table(answer: &Answer) -> Option<Table> {
    let chosen = answer.request.as_ref().map(|request| request.gpus);
    let known = |column: &Column| answer.sizes.iter().any(|size| column.1(size).is_some());
    let columns: Vec<Column> = COLUMNS.into_iter().filter(known).collect();
    let heads = columns.iter().map(|(head, _)| *head);
    let mut table = Table::new(heads.chain([""]));
    for size in &answer.sizes {
        let row = columns.iter().map(|(_, own)| own(size).unwrap_or_default());
        let mark = if chosen == Some(size.gpus) { "#1" } else { "" };
        table.row(row.chain([mark.to_owned()]));
    }
    (!answer.sizes.is_empty()).then_some(table)
}

/// One row for each length, that of the plans marked; nothing where one was asked about.
pub(crate) fn lengths(answer: &Answer) -> Option<Table> {
    let batch = answer.request.as_ref().map(|request| request.batch);
    let heads = [
        ">tokens a sequence",
        ">step (s)",
        ">tokens/s",
        ">peak (GiB)",
        "",
    ];
    let mut table = Table::new(heads);
    for length in &answer.lengths {
        let Length {
            seq_len,
            step_s,
            peak_gib,
        } = *length;
        let rate = step_s.zip(batch).map(|(step_s, batch)| {
            (seq_len as f64 * batch.global_batch as f64 / step_s).round() as u64
        });
        let is_chosen = batch.is_some_and(|batch| batch.seq_len == seq_len);
        let mark = match (step_s, is_chosen) {
            (None, _) => "does not fit",
            (_, true) => "#1",
            _ => "",
        };
        table.row([
            format::grouped(seq_len),
            step_s.map_or(String::new(), format::three_digits),
            rate.map_or(String::new(), format::grouped),
            peak_gib.map_or(String::new(), format::three_digits),
            mark.to_owned(),
        ]);
    }
    (!answer.lengths.is_empty()).then_some(table)
}
