//! Which layers a stage holds, as flags and read from flags.

use super::job::Job;
use super::said::Said;
use super::writer::Writer;
use crate::options::PipelineLayout;

pub(super) fn write(job: &Job, out: &mut Writer) {
    let Some(layout) = &job.options.stages else {
        return;
    };
    let pins = &job.options.pins;
    let (pp, vpp) = (pins.pp.unwrap_or(1), pins.vpp.unwrap_or(1));
    if pp == 1 {
        return;
    }
    let stages = layout.stages();
    let layers = job.model.layers.len() as u64;
    if even(layers, pp, vpp).as_deref() == Some(stages) {
        if vpp > 1 {
            out.set("num_virtual_stages_per_pipeline_rank", &vpp);
            out.because(format!(
                "{} layers a stage, {vpp} stages a rank: a shorter bubble",
                stages[0].len()
            ));
        }
        return;
    }
    out.set(
        "pipeline_model_parallel_layout",
        &words(stages, job.model.mtp.len()),
    );
    out.because(format!(
        "E embedding, t layer, {}L head: {} stages balanced by time, {vpp} a rank",
        if job.model.mtp.is_empty() {
            ""
        } else {
            "m MTP, "
        },
        stages.len()
    ));
}

/// As many layers in every stage, where they divide.
fn even(layers: u64, pp: u32, vpp: u32) -> Option<Vec<Vec<u32>>> {
    let stages = u64::from(pp) * u64::from(vpp);
    if stages == 0 || layers == 0 || !layers.is_multiple_of(stages) {
        return None;
    }
    let all: Vec<u32> = (0..layers as u32).collect();
    let each = (layers / stages) as usize;
    Some(all.chunks(each).map(<[u32]>::to_vec).collect())
}

/// Stages in Megatron's words, MTP depths with the head.
fn words(stages: &[Vec<u32>], depths: usize) -> String {
    let last = stages.len() - 1;
    let own: Vec<String> = stages
        .iter()
        .enumerate()
        .map(|(at, layers)| {
            let first = if at == 0 { "E" } else { "" };
            let mut words = format!("{first}{}", repeated('t', layers.len()));
            if at == last {
                words.push_str(&repeated('m', depths));
                words.push('L');
            }
            words
        })
        .collect();
    let runs = own[..last].chunk_by(|a, b| a == b);
    let parts = runs.map(|run| match run {
        [first, _, ..] if !first.is_empty() => format!("({first}|)*{}", run.len()),
        _ => format!("{}|", run[0]).repeat(run.len()),
    });
    parts.collect::<String>() + &own[last]
}

fn repeated(symbol: char, times: usize) -> String {
    match times {
        0..=2 => symbol.to_string().repeat(times),
        _ => format!("{symbol}*{times}"),
    }
}

/// Virtual stages a rank, and the stages; none where they are not as Megatron-LM would have them, which is said.
pub(super) fn read(
    said: &mut Said<'_>,
    layers: u64,
    depths: usize,
    pp: u32,
) -> (u32, Option<PipelineLayout>) {
    let given = [
        "pipeline_model_parallel_layout",
        "num_virtual_stages_per_pipeline_rank",
        "num_layers_per_virtual_pipeline_stage",
    ];
    let several: Vec<String> = given
        .into_iter()
        .filter(|name| said.is_there(name))
        .map(super::text::flag)
        .collect();
    if several.len() > 1 {
        said.illegal(
            format!("{} say the same thing", several.join(" and ")),
            format!("{} alone", several[0]),
        );
    }
    if let Some(text) = said.word("pipeline_model_parallel_layout") {
        return of_words(said, text, depths, pp);
    }
    let mut vpp = said
        .degree("num_virtual_stages_per_pipeline_rank")
        .unwrap_or(1);
    // Megatron-LM's `validate_args` counts the ends among the layers of a rank where they are accounted for.
    let embedding = u64::from(said.on("account_for_embedding_in_pipeline_split"));
    let head = u64::from(said.on("account_for_loss_in_pipeline_split"));
    if let Some(each) = said.number("num_layers_per_virtual_pipeline_stage", layers) {
        let share = (layers + embedding + head) / u64::from(pp.max(1));
        if share == 0 || !share.is_multiple_of(each) {
            said.illegal(
                format!("--num-layers-per-virtual-pipeline-stage {each} does not divide the {share} layers of a rank"),
                "a divisor of them, or --pipeline-model-parallel-layout",
            );
        } else {
            vpp = (share / each) as u32;
        }
    }
    if pp == 1 {
        return (vpp, None);
    }
    let first = said.number("decoder_first_pipeline_num_layers", layers);
    let last = said.number("decoder_last_pipeline_num_layers", layers);
    let stages = if first.is_some() || last.is_some() {
        uneven(layers, pp, vpp, first, last)
    } else if embedding + head > 0 {
        even(layers + embedding + head, pp, vpp).map(|stages| {
            let mut sizes: Vec<u64> = stages.iter().map(|stage| stage.len() as u64).collect();
            if let Some(first) = sizes.first_mut() {
                *first -= embedding;
            }
            if let Some(last) = sizes.last_mut() {
                *last -= head;
            }
            of_sizes(&sizes)
        })
    } else {
        even(layers, pp, vpp)
    };
    if stages.is_none() {
        said.illegal(
            format!("{layers} layers do not divide into {pp} x {vpp} stages as the flags say"),
            "--pipeline-model-parallel-layout, which says the layers of every stage",
        );
        said.notes.push(
            "priced with stages balanced by time, for those of the flags do not exist".to_owned(),
        );
    }
    (vpp, stages.map(Into::into))
}

/// A layout in words. An MTP depth apart from the head is priced with it.
fn of_words(
    said: &mut Said<'_>,
    text: &str,
    depths: usize,
    pp: u32,
) -> (u32, Option<PipelineLayout>) {
    let text: String = text.chars().filter(|c| *c != ',').collect();
    let given = depths_of(&text);
    if given != Some(depths) {
        let found = given.map_or("in other places".to_owned(), |given| given.to_string());
        let what = format!(
            "--pipeline-model-parallel-layout has MTP depths (m) {found}, and those of --mtp-num-layers are {depths}, all in one \
             stage behind the last layer (t) and before the head (L)"
        );
        let nearest = match depths {
            0 => "no m".to_owned(),
            1 => "m before L".to_owned(),
            _ => format!("m*{depths} before L"),
        };
        said.illegal(what, nearest);
    }
    let read = text.parse::<PipelineLayout>();
    let read = read.map(|layout| layout.with_depths(depths));
    let layout = read.or_else(|error| {
        let moved = without_depths(&text).0.parse::<PipelineLayout>();
        moved
            .map(|layout| {
                said.notes.push(
                    "the MTP depth has a stage of its own in the layout; it is priced beside the head".to_owned(),
                );
                layout.with_depths(depths)
            })
            .map_err(|_| error)
    });
    match layout {
        Ok(layout) => {
            let stages = layout.stages().len() as u64;
            if !stages.is_multiple_of(u64::from(pp)) {
                said.illegal(
                    format!("--pipeline-model-parallel-layout has {stages} stages, which {pp} pipeline ranks do not share evenly"),
                    format!("a multiple of {pp}"),
                );
                return (1, None);
            }
            let vpp = (stages / u64::from(pp)).max(1) as u32;
            (vpp, (pp > 1).then_some(layout))
        }
        Err(error) => {
            let expected = error.to_string();
            let expected = expected.strip_prefix("expected ").unwrap_or(&expected);
            said.wrong("pipeline_model_parallel_layout", &text, expected);
            (1, None)
        }
    }
}

/// How many MTP depths the words name; none where they are not in one stage behind the last layer and before the head
/// (`validate_layer_layout` of Megatron-Core's `pipeline_parallel_layer_layout.py`).
fn depths_of(text: &str) -> Option<usize> {
    let (Some(first), Some(last)) = (text.find('m'), text.rfind('m')) else {
        return Some(0);
    };
    let in_place = text.rfind('t').is_none_or(|layer| layer < first)
        && text.rfind('L').is_some_and(|head| last < head)
        && !text[first..last].contains('|');
    in_place.then(|| without_depths(text).1)
}

/// The words without MTP depths, and how many these are.
fn without_depths(text: &str) -> (String, usize) {
    let (mut out, mut depths) = (String::new(), 0);
    let mut symbols = text.chars().peekable();
    while let Some(symbol) = symbols.next() {
        if symbol != 'm' {
            out.push(symbol);
            continue;
        }
        let mut digits = String::new();
        if symbols.next_if_eq(&'*').is_some() {
            while let Some(digit) = symbols.next_if(char::is_ascii_digit) {
                digits.push(digit);
            }
        }
        depths += digits.parse().unwrap_or(1);
    }
    (out, depths)
}

/// Layers of the first and the last rank as said, the others' evenly.
fn uneven(
    layers: u64,
    pp: u32,
    vpp: u32,
    first: Option<u64>,
    last: Option<u64>,
) -> Option<Vec<Vec<u32>>> {
    let (pp, vpp) = (u64::from(pp), u64::from(vpp));
    if pp > layers {
        return None;
    }
    let ends = u64::from(first.is_some()) + u64::from(last.is_some());
    let rest = layers.checked_sub(first.unwrap_or(0) + last.unwrap_or(0))?;
    let others = pp.checked_sub(ends)?;
    let each = match others {
        0 if rest == 0 => 0,
        0 => return None,
        _ if rest.is_multiple_of(others) => rest / others,
        _ => return None,
    };
    let of_rank = |rank: u64| match rank {
        0 => first.unwrap_or(each),
        rank if rank == pp - 1 => last.unwrap_or(each),
        _ => each,
    };
    if (0..pp).any(|rank| !of_rank(rank).is_multiple_of(vpp)) {
        return None;
    }
    let chunk: Vec<u64> = (0..pp).map(|rank| of_rank(rank) / vpp).collect();
    Some(of_sizes(&chunk.repeat(vpp as usize)))
}

fn of_sizes(sizes: &[u64]) -> Vec<Vec<u32>> {
    let mut next = 0;
    let stages = sizes.iter().map(|&size| {
        let first = next;
        next += size as u32;
        (first..next).collect()
    });
    stages.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_words_are_read_as_they_are_written() {
        for sizes in [
            vec![3, 2, 2, 2, 1, 0],
            vec![1, 0, 0, 2],
            vec![4, 4],
            vec![0, 5, 5, 5, 0],
            vec![2, 0],
        ] {
            for depths in [0, 1, 2] {
                let stages = of_sizes(&sizes);
                let text = words(&stages, depths);
                let read: PipelineLayout = text.parse().expect(&text);
                assert_eq!(read.stages(), stages, "{text}");
                assert_eq!(read.depths(), depths, "{text}");
            }
        }
        assert_eq!(words(&of_sizes(&[3, 2, 2, 2, 1]), 1), "Et*3|(tt|)*3tmL");
    }

    #[test]
    fn golden_places_of_depths() {
        for (text, depths) in [
            ("Et|t|L", Some(0)),
            ("Et*3|(tt|)*3tmL", Some(1)),
            ("Ett|tt|mL", Some(1)),
            ("Ett|ttm*2L", Some(2)),
            ("Ett|ttmmL", Some(2)),
            ("Ett|tt|m|L", Some(1)),
            ("Ettm|tt|L", None),
            ("Ett|ttLm", None),
            ("Ett|ttm|mL", None),
            ("Ett|tmt|L", None),
        ] {
            assert_eq!(depths_of(text), depths, "{text}");
        }
    }

    #[test]
    fn golden_uneven_ends() {
        let sizes = |stages: Vec<Vec<u32>>| stages.iter().map(Vec::len).collect::<Vec<_>>();
        let found = uneven(61, 8, 1, Some(7), Some(6)).expect("divides");
        assert_eq!(sizes(found), [7, 8, 8, 8, 8, 8, 8, 6]);
        let found = uneven(20, 4, 2, Some(2), None).expect("divides");
        assert_eq!(sizes(found), [1, 3, 3, 3, 1, 3, 3, 3]);
        assert_eq!(uneven(20, 4, 1, Some(3), None), None);
    }
}
