//! Whatever is wrong with a checkpoint is said, and nothing that is there is passed over without a word.

use std::fs;
use std::path::Path;

use super::*;

#[test]
fn a_run_stopped_between_two_files_leaves_the_checkpoint_before() {
    let run = saved_run(&mut Bench::new("mixtral", 8));
    let all = run.path().join(FOLDER);
    let (last, stopped) = (all.join("step-4"), partial(&all, 4));
    // Stopped before its name was changed, with ever fewer files.
    fs::rename(&last, &stopped).expect("renames");
    for name in names(&stopped) {
        assert_eq!(find(run.path()).expect("step 3").resumed.step, 3);
        fs::remove_file(stopped.join(name)).expect("removes");
    }
    fs::remove_dir(&stopped).expect("is empty");
    // Without it there is the other, which a copy may have left incomplete.
    fs::remove_file(all.join("step-3/rank-2.safetensors")).expect("removes");
    let text = find(run.path()).expect_err("none is left").to_string();
    for part in [
        "holds no complete checkpoint",
        "rank-2.safetensors: is missing",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn an_incomplete_checkpoint_is_passed_over_with_a_word() {
    let run = saved_run(&mut Bench::new("mixtral", 8));
    let cut = step_dir(run.path(), 4).join("rank-1.safetensors");
    let bytes = fs::read(&cut).expect("there");
    fs::write(&cut, &bytes[..bytes.len() - 1]).expect("writes");
    let found = find(run.path()).expect("step 3");
    assert_eq!((found.resumed.step, found.passed_over.len()), (3, 1));
    let text = &found.passed_over[0];
    let expected = format!(
        "holds {} bytes; {} were written",
        bytes.len() - 1,
        bytes.len()
    );
    assert!(text.contains(&expected), "{text}");
}

/// Expects a refusal of the checkpoint in `dir` that says all of `expected`.
fn refused(bench: &Bench, dir: &Path, options: &TrainOptions, expected: &[&str]) {
    let options = TrainOptions {
        init: from(dir),
        ..options.clone()
    };
    let error = bench.train([2, 1, 2, 1, 2], &options).expect_err("refused");
    let text = error.to_string();
    assert!(error.is_bad_request(), "{text}");
    for part in expected {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

#[test]
fn a_damaged_checkpoint_is_refused_by_its_file() {
    let mut bench = Bench::new("mixtral", 8);
    let run = saved_run(&mut bench);
    bench.options.steps = 8;
    let dir = step_dir(run.path(), 4);
    let check = |expected: &[&str]| refused(&bench, &dir, &bench.options, expected);
    let damaged = |name: &str, damage: &dyn Fn(&mut Vec<u8>), expected: &str| {
        let path = dir.join(name);
        let whole = fs::read(&path).expect("there");
        let mut bytes = whole.clone();
        damage(&mut bytes);
        fs::write(&path, bytes).expect("writes");
        check(&[name, expected]);
        fs::write(&path, whole).expect("writes");
    };
    for rank in 0..4 {
        let name = format!("rank-{rank}.safetensors");
        // One bit of one moment of one element.
        let flip = |bytes: &mut Vec<u8>| *bytes.last_mut().expect("not empty") ^= 1;
        damaged(&name, &flip, "does not hold what was written");
        damaged(&name, &|bytes| bytes.truncate(100), "holds 100 bytes;");
    }
    let text = |from: &'static str, to: &'static str| {
        move |bytes: &mut Vec<u8>| {
            let text = String::from_utf8(bytes.clone()).expect("JSON");
            assert!(text.contains(from), "{from}");
            *bytes = text.replacen(from, to, 1).into_bytes();
        }
    };
    damaged(
        INDEX,
        &|bytes| bytes.truncate(1000),
        "is no index of a checkpoint",
    );
    damaged(
        INDEX,
        &text("\"version\":1", "\"version\":7"),
        "version 7, this program reads 1",
    );
    damaged(
        INDEX,
        &text("\"rank-0.", "\"../rank-0."),
        "expected files beside it",
    );
    damaged(
        INDEX,
        &text("\"rows\":[0,", "\"rows\":[1,"),
        "is not there in full",
    );
    damaged(
        INDEX,
        &text("\"tensor\":\"lm", "\"tensor\":\"km"),
        "is not of this model",
    );
    // What nothing else would tell.
    damaged(
        INDEX,
        &text("\"step\":4", "\"step\":3"),
        "does not hold what was written",
    );
    damaged(
        INDEX,
        &|bytes| {
            let end = bytes.len() - 4;
            bytes[end] ^= 1;
        },
        "does not hold what was written",
    );
    check_resumes(&bench, &dir);
    fs::remove_file(dir.join("rank-3.safetensors")).expect("removes");
    check(&["rank-3.safetensors: is missing from its checkpoint"]);
}

/// What is mended is read again, so that the damage above was the reason.
fn check_resumes(bench: &Bench, dir: &Path) {
    let resumed = bench.resume([2, 1, 2, 1, 2], dir, &bench.options);
    assert_eq!(resumed.steps[0].step, 4);
}

#[test]
fn what_would_not_go_on_as_it_began_is_refused_with_what_differs() {
    let mut bench = Bench::new("mixtral", 8);
    let run = saved_run(&mut bench);
    let dir = step_dir(run.path(), 4);
    let now = &bench.options;
    refused(
        &bench,
        &dir,
        now,
        &["4 steps are done, of 4 that are asked for in all: ask for more"],
    );

    let mut other = TrainOptions {
        steps: 8,
        ..now.clone()
    };
    other.lr.peak = 2e-3;
    other.adam.clip = None;
    other.balancing.aux_loss_coef = 0.5;
    let all = [
        "was trained otherwise",
        "lr was 0.001 and is 0.002",
        "clip was 1.0 and is none",
        "aux_loss_coef was 0.0 and is 0.5",
    ];
    refused(&bench, &dir, &other, &all);

    // A decaying rate depends on how long the run is, a constant one does not.
    let options = TrainOptions {
        steps: 8,
        ..now.clone()
    };
    let mut decaying = options.clone();
    decaying.lr = LearningRate {
        decay: Decay::Wsd,
        steps: 8,
        ..options.lr
    };
    let both = [
        "lr_schedule was \"constant\" and is \"wsd\"",
        "steps was none and is 8",
    ];
    refused(&bench, &dir, &decaying, &both);

    let mut longer = Bench::new("mixtral", 16);
    longer.options = options.clone();
    refused(&longer, &dir, &options, &["global_batch was 8 and is 16"]);
    let ids = vec![1; 500];
    let order = Order::TokenStream;
    bench.samples =
        Samples::new(TokenStream::of_ids("ones", ids), SEQ_LEN, 128, order).expect("enough");
    let data = [
        "data_blake3 was",
        "data_tokens was",
        "shuffle_seed was 3 and is none",
    ];
    refused(&bench, &dir, &options, &data);

    let mut other = Bench::new("qwen3_moe", 8);
    other.options = options.clone();
    let model = [
        "is a checkpoint of another model than",
        "model_type was \"mixtral\" and is \"qwen3_moe\"",
        "layers differs",
        "vocab_size was 128 and is 96",
    ];
    refused(&other, &dir, &options, &model);
}

#[test]
fn what_is_no_checkpoint_says_what_would_be_one() {
    let folder = folder();
    let text = find(folder.path()).expect_err("empty").to_string();
    assert!(text.contains("is no checkpoint and no run"), "{text}");
    assert!(text.contains("asked to save"), "{text}");
    fs::create_dir_all(folder.path().join("checkpoints/step-3.partial")).expect("creates");
    let text = find(folder.path())
        .expect_err("none is complete")
        .to_string();
    assert!(
        text.ends_with("checkpoints: holds no complete checkpoint"),
        "{text}"
    );
}

#[test]
fn only_what_is_not_complete_is_passed_over() {
    let run = saved_run(&mut Bench::new("mixtral", 8));
    let newest = step_dir(run.path(), 4);
    let index = newest.join(INDEX);
    let text = fs::read_to_string(&index).expect("there");
    let passed_over = |text: &str| {
        fs::write(&index, text).expect("writes");
        find(run.path()).map(|found| (found.resumed.step, found.passed_over.len()))
    };
    assert_eq!(passed_over(&text).expect("whole"), (4, 0));
    for cut in [0, 1, text.len() / 2, text.len() - 1] {
        assert_eq!(
            passed_over(&text[..cut]).expect("the one before"),
            (3, 1),
            "{cut}"
        );
    }
    for (from, to, expected) in [
        (
            "\"version\":1",
            "\"version\":2",
            "version 2, this program reads 1",
        ),
        (
            "\"step\":4",
            "\"step\":\"4\"",
            "is no index of a checkpoint",
        ),
        (
            "\"step\":4",
            "\"step\":5",
            "is of step 5, in a folder named after step 4",
        ),
    ] {
        assert!(text.contains(from), "{from}");
        let error = passed_over(&text.replacen(from, to, 1)).expect_err("step 4 is not lost");
        assert!(error.to_string().contains(expected), "{error}");
    }
    fs::write(&index, &text).expect("writes");
    // A file that is there and cannot be read, whoever asks.
    let file = newest.join("rank-0.safetensors");
    fs::remove_file(&file).expect("removes");
    std::os::unix::fs::symlink("rank-0.safetensors", &file).expect("links");
    let error = find(run.path())
        .expect_err("step 4 is not lost")
        .to_string();
    assert!(
        error.contains("rank-0.safetensors: could not measure"),
        "{error}"
    );
}

#[test]
fn ranks_that_read_different_checkpoints_are_told() {
    let mut bench = Bench::new("mixtral", 8);
    let run = saved_run(&mut bench);
    let verified = |steps: [u64; 2]| {
        World::threads(2).run(|rank| {
            let step = steps[rank.rank() as usize];
            let saved = Checkpoint::open(&step_dir(run.path(), step), &bench.model)?;
            saved.verify(&rank.communicator("world", &[0, 1]))
        })
    };
    verified([4, 4]).expect("one checkpoint");
    let error = verified([4, 3]).expect_err("two checkpoints");
    assert!(error.is_bad_request(), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("ranks 0 and 1 read different checkpoints"),
        "{text}"
    );
}

#[test]
fn a_checkpoint_is_of_a_model_by_what_decides_training() {
    let mut bench = Bench::new("mixtral", 8);
    let run = saved_run(&mut bench);
    let dir = step_dir(run.path(), 4);
    let mut model = bench.model.clone();
    model.name = "another/name".to_owned();
    model.max_position = Some(1 << 20);
    model.initializer_range = 0.5;
    Checkpoint::open(&dir, &model).expect("it trains alike");
    model.norm.eps *= 2.0;
    let error = Checkpoint::open(&dir, &model)
        .expect_err("another model")
        .to_string();
    assert!(error.ends_with("another/name: norm differs"), "{error}");
}

#[test]
fn a_checkpoint_that_is_not_read_is_not_open() {
    let mut bench = Bench::new("mixtral", 8);
    let run = saved_run(&mut bench);
    let dir = step_dir(run.path(), 4).canonicalize().expect("there");
    let saved = Checkpoint::open(&dir, &bench.model).expect("complete");
    let tensors = global_tensors(&bench.model);
    let values = saved.read(State::Master, &tensors[0].whole());
    assert_eq!(values.expect("reads").len(), tensors[0].len());
    let open = fs::read_dir("/proc/self/fd").expect("this system lists open files");
    let files = open
        .flatten()
        .filter_map(|entry| fs::read_link(entry.path()).ok());
    let open: Vec<_> = files.filter(|file| file.starts_with(&dir)).collect();
    assert!(open.is_empty(), "{open:?}");
}
