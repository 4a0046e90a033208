//! [`table`]: what other numbers of GPUs come to, of an answer that has tried several.

use moefold_planner::answer::{Answer, Size};

use crate::format;
use crate::tables::Table;

/// One row for each number of GPUs, that of the plans marked; nothing where one was asked about.
pub(crate) fn table(answer: &Answer) -> Option<Table> {
    let chosen = answer.request.as_ref().map(|request| request.gpus);
    let (has_days, has_usd) = {
        let any =
            |own: fn(&Size) -> Option<f64>| answer.sizes.iter().any(|size| own(size).is_some());
        (
            any(|size| size.days),
            any(|size| size.usd_per_trillion_tokens),
        )
    };
    let heads = [">GPUs", ">step (s)", ">tokens/s"].into_iter();
    let heads = heads.chain(has_days.then_some(">days"));
    let heads = heads.chain(has_usd.then_some(">USD per 1e12 tokens"));
    let mut table = Table::new(heads.chain([""]));
    for size in &answer.sizes {
        let row = [
            format::grouped(size.gpus.into()),
            format::three_digits(size.step_s),
            format::grouped(size.tokens_per_s.round() as u64),
        ];
        let days = size.days.map_or(String::new(), format::three_digits);
        let usd = size.usd_per_trillion_tokens;
        let usd = usd.map_or(String::new(), |usd| format::grouped(usd.round() as u64));
        let row = row.into_iter().chain(has_days.then_some(days));
        let mark = if chosen == Some(size.gpus) { "#1" } else { "" };
        table.row(row.chain(has_usd.then_some(usd)).chain([mark.to_owned()]));
    }
    (!answer.sizes.is_empty()).then_some(table)
}
