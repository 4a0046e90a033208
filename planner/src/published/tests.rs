//! Lines read as written, or refused with what is wrong.

use std::path::Path;

use super::*;
use crate::choice::{Dispatcher, Masters, ScheduleName, Zero};

const HEADER: &str = "id,model,cluster,gpus,precision,seq_len,global_batch,tp,pp,ep,recompute,\
                      dispatcher,changes,stages,step_ms,tflops_per_gpu,schedule,zero,\
                      instances,masters";

fn one(cells: &str) -> Result<Row, String> {
    let text = format!("{HEADER}\n# a remark\n{cells}\n");
    let rows = parse(Path::new("own.csv"), &text).map_err(|error| error.to_string())?;
    Ok(rows.into_iter().next().expect("one row"))
}

#[test]
fn golden_a_line_is_read_as_written() {
    let row = one(
        "a,mixtral-8x7b,dgx-h100,16,bf16,4096,32,2,2,4,layernorm+moe_act,deepep,layers=4,even,2500,,1f1b,fsdp,4,remainder",
    );
    let row = row.expect("valid");
    assert_eq!((row.id.as_str(), row.source.as_str()), ("a", "own"));
    assert_eq!(row.model.layers.len(), 4);
    assert_eq!(row.step_s, Some(2.5));
    assert_eq!(row.mem_gib, None);
    let options = &row.options;
    assert_eq!(options.pins, "tp=2,pp=2,ep=4".parse().expect("degrees"));
    assert_eq!(options.dispatcher, Some(Dispatcher::Deepep));
    assert_eq!(
        options.recompute,
        Some("layernorm,moe_act".parse().expect("modules"))
    );
    let stages = options.stages.as_ref().expect("given");
    assert_eq!(stages.stages(), [vec![0, 1], vec![2, 3]]);
    assert_eq!(options.schedule, Some(ScheduleName::OneFOneB));
    assert_eq!((options.zero, options.instances), (Zero::Fsdp, 4));
    assert_eq!(options.masters, Masters::Remainder);
    // What is empty is what `plan` takes without the flag.
    let row = one("a,mixtral-8x7b,dgx-h100,16,bf16,4096,32,1,1,8,,,,,2500,,,,,").expect("valid");
    let options = &row.options;
    assert_eq!((options.schedule, options.zero), (None, Zero::States));
    assert_eq!((options.instances, options.masters), (1, Masters::Fp32));
}

#[test]
fn law_the_forms_of_a_time_agree() {
    let of = |ms: &str, tflops: &str| {
        let row = one(&format!(
            "a,mixtral-8x7b,dgx-h100,16,bf16,4096,32,1,1,8,none,,,,{ms},{tflops},,,,"
        ));
        row.expect("valid").step_s.expect("a time")
    };
    // 8,192 tokens a GPU of 79.71 GFLOP each in one second are 653 TFLOP/s.
    let second = of("1000", "");
    assert!((of("", "653") / second - 1.0).abs() < 1e-3);
    assert!((of("", "326.5") / second - 2.0).abs() < 2e-3);
}

#[test]
fn refusals_name_the_file_the_line_and_what_would_work() {
    let valid =
        "a,mixtral-8x7b,dgx-h100,16,bf16,4096,32,2,2,4,none,deepep,,,2500,,1f1b,fsdp,2,remainder";
    assert!(one(valid).is_ok());
    for (found, instead, parts) in [
        ("mixtral-8x7b", "mixtral-9x7b", ["line 3", "`model`"]),
        ("dgx-h100", "dgx-h900", ["`cluster`", "h900"]),
        (",16,", ",sixteen,", ["`gpus`", "whole number"]),
        ("bf16", "bf61", ["`precision`", "mxfp8"]),
        (",4096,", ",,", ["`seq_len`", "above 0"]),
        ("none", "moe_akt", ["`recompute`", "moe_act"]),
        ("deepep", "deep", ["`dispatcher`", "hybridep"]),
        ("deepep,,", "deepep,layer=3,", ["`changes`", "layers=N"]),
        ("deepep,,", "deepep,layers=99,", ["`changes`", "32"]),
        (",,,2500", ",,evenly,2500", ["`stages`", "even"]),
        ("2500", "-1", ["`step_ms`", "above 0"]),
        ("2500", "", ["`step_ms`", "mem_gib"]),
        ("1f1b", "gpipe", ["`schedule`", "zb-h1"]),
        ("fsdp", "3", ["`zero`", "1, 2, fsdp"]),
        ("fsdp,2", "fsdp,0", ["`instances`", "above 0"]),
        ("remainder", "bf16", ["`masters`", "fp32, remainder"]),
        ("2500,", "2500", ["19 cells", "20"]),
    ] {
        let error = one(&valid.replacen(found, instead, 1)).expect_err(instead);
        assert!(error.contains("own.csv"), "{error}");
        for part in parts {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
    let whole = |text: &str| {
        parse(Path::new("own.csv"), text)
            .expect_err(text)
            .to_string()
    };
    assert!(whole("id,modell\n").contains("nearest: `model`"));
    assert!(whole("id,model\n").contains("no column `cluster`"));
    assert!(whole("# nothing\n").contains("no measurement"));
    assert!(whole(HEADER).contains("no measurement"));
    let error = read(Path::new("/nonexistent.csv")).expect_err("refused");
    assert!(error.to_string().contains("/nonexistent.csv"));
}

#[test]
fn shipped_rows_have_names_of_their_own_and_a_source() {
    let rows = shipped_rows();
    let mut names: Vec<&str> = rows.iter().map(|row| row.id.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), rows.len());
    assert!(rows.iter().all(|row| !row.source_ref.is_empty()));
}
