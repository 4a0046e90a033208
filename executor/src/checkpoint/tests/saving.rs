//! A run leaves whole checkpoints and nothing else, also where it cannot write or remove one.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::layouts::save_marked;
use super::*;

#[test]
fn a_run_keeps_its_last_checkpoints_and_nothing_half_written() {
    let run = saved_run(&mut Bench::new("mixtral", 8));
    let all = run.path().join(FOLDER);
    assert_eq!(names(&all), ["step-3", "step-4"]);
    let files = names(&all.join("step-4"));
    assert_eq!(files[0], INDEX);
    assert_eq!(files.len(), 5, "{files:?}");
    let found = find(run.path()).expect("there are two");
    let expected = Resumed {
        checkpoint: all.join("step-4"),
        step: 4,
    };
    assert_eq!(found.resumed, expected);
    let named = find(&all.join("step-3")).expect("it is there");
    assert_eq!(named.resumed.step, 3);
}

#[test]
fn a_checkpoint_that_cannot_be_written_is_said_and_the_next_is_tried_when_it_is_due() {
    let mut bench = Bench::new("mixtral", 8);
    // A run that goes on after two steps, up to `steps`, with `plant` where its next checkpoint is to be: the steps that
    // are saved, what was said, and what is left.
    let mut failed = |steps: u64, plant: &(dyn Fn(&Path) + Sync)| {
        let run = folder();
        let all = run.path().join(FOLDER);
        bench.options.steps = 2;
        let begun = bench.train([4, 2, 4, 1, 2], &bench.saving(2, run.path()));
        begun.expect("trains");
        bench.options.steps = steps;
        let mut options = bench.saving(2, run.path());
        let before = || {
            let found = find(run.path()).expect("the one before is there").resumed;
            assert_eq!(found.step, 2);
            Checkpoint::open(&found.checkpoint, &bench.model).expect("it is whole");
            found
        };
        options.init = Init::Resume(before());
        let (trained, notes) = watched(&bench, &options, &Control::default(), &|step| match step {
            2 => plant(&partial(&all, 4)),
            5 => drop(before()),
            _ => {}
        });
        let trained = trained.expect("training goes on");
        assert_eq!(trained.steps.len() as u64, steps - 2);
        let weights = run.path().join("weights");
        let saved = trained.weights.save(&weights, &serde_json::json!({}));
        saved.expect("weights are saved all the same");
        let [why] = &trained.unsaved[..] else {
            panic!("{:?}", trained.unsaved)
        };
        let said = format!("{why}; training goes on, and the next is tried when it is due");
        assert_eq!(notes, [said]);
        let written = trained.checkpoints.iter().map(|written| written.step);
        (written.collect::<Vec<_>>(), why.clone(), names(&all))
    };
    // A file is where the folder should be, and a folder where the file of a rank should be.
    let (saved, why, left) = failed(8, &|partial| fs::write(partial, "").expect("writes"));
    assert_eq!(saved, [6, 8]);
    assert!(why.contains("step-4.partial: could not create"), "{why}");
    assert_eq!(left, ["step-6", "step-8"], "nothing half-written");
    let in_the_way = |partial: &Path| {
        fs::create_dir_all(partial.join("rank-1.safetensors")).expect("creates");
    };
    let (saved, why, left) = failed(8, &in_the_way);
    assert_eq!(saved, [6, 8]);
    for part in [
        "no checkpoint after 4 steps: rank 1: ",
        "step-4.partial/rank-1.safetensors: could not write the checkpoint",
        "MiB: Is a directory",
    ] {
        assert!(why.contains(part), "{why}");
    }
    assert_eq!(left, ["step-6", "step-8"]);
    // The last one of a run: only what was planted is left beside the one before.
    let (saved, _, left) = failed(4, &in_the_way);
    assert_eq!(saved, [0; 0]);
    assert_eq!(left, ["step-2", "step-4.partial"]);
}

#[test]
fn every_rank_removes_what_it_wrote_of_a_checkpoint_that_failed() {
    let (bench, run) = (Bench::new("mixtral", 8), folder());
    let failing = partial(&run.path().join(FOLDER), 5);
    let blocked = failing.join("rank-2.safetensors");
    fs::create_dir_all(&blocked).expect("creates");
    save_marked(&bench, [4, 2, 4, 1, 2], run.path(), 5).expect_err("a folder is in the way");
    assert_eq!(names(&failing), ["rank-2.safetensors"]);
    fs::remove_dir(&blocked).expect("only what was planted is left");
    let written = save_marked(&bench, [4, 2, 4, 1, 2], run.path(), 5).expect("saves");
    let sizes: Vec<u64> = written.iter().map(|written| written.bytes).collect();
    assert_eq!(
        sizes[0],
        sizes[1..].iter().sum::<u64>() + first_file(&written[0].dir)
    );
}

/// Bytes of rank 0's file.
fn first_file(dir: &Path) -> u64 {
    let file = fs::metadata(dir.join("rank-0.safetensors"));
    file.expect("it is there").len()
}

#[test]
fn an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run() {
    let (bench, run) = (Bench::new("mixtral", 8), folder());
    let all = run.path().join(FOLDER);
    let save = |step| {
        let written = save_marked(&bench, [2, 1, 2, 1, 2], run.path(), step).expect("saves");
        written[0].not_removed.clone()
    };
    assert_eq!([save(1), save(2)], [[""; 0]; 2]);
    // A folder cannot take a file's name.
    fs::write(all.join("step-1.partial"), "").expect("writes");
    let said = save(3);
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("step-1: could not remove"), "{said:?}");
    assert_eq!(names(&all), ["step-1", "step-2", "step-3"]);
    assert_eq!(save(4), [""; 0]);
    assert_eq!(names(&all), ["step-3", "step-4"]);
}

#[test]
fn a_file_that_rank_0_does_not_see_is_told_by_where_it_was_written() {
    let (bench, run) = (Bench::new("mixtral", 8), folder());
    save_marked(&bench, [2, 1, 2, 1, 2], run.path(), 1).expect("saves");
    let all = run.path().join(FOLDER);
    let (whole, dir) = (folder_of(&all, 1), partial(&all, 1));
    let index = Index::load(&whole).expect("an index");
    fs::rename(&whole, &dir).expect("renames");
    fs::remove_file(dir.join("rank-1.safetensors")).expect("removes");
    let refused = |apart| write::commit(&all, &index, apart).expect_err("a file is missing");
    let (of_processes, of_threads) = (refused(true), refused(false));
    assert!(of_processes.is_bad_request(), "{of_processes}");
    let text = of_processes.to_string();
    for part in [
        "rank-1.safetensors: is missing from its checkpoint",
        "a run directory that all of them share",
    ] {
        assert!(text.contains(part), "{text}");
    }
    // Ranks of one process have one file system.
    assert!(!of_threads.is_bad_request(), "{of_threads}");
    assert!(!of_threads.to_string().contains("share"), "{of_threads}");
    // Not to be read is not to be missing.
    std::os::unix::fs::symlink("rank-1.safetensors", dir.join("rank-1.safetensors"))
        .expect("links");
    let unreadable = refused(true);
    assert!(!unreadable.is_bad_request(), "{unreadable}");
    assert!(
        unreadable.to_string().contains("could not measure"),
        "{unreadable}"
    );
}

/// A run that hears of every step and notes what it says.
fn watched(
    bench: &Bench,
    options: &TrainOptions,
    control: &Control,
    on_step: &(dyn Fn(u64) + Sync),
) -> (Result<Trained, Error>, Vec<String>) {
    let notes = Mutex::new(Vec::new());
    let watch = Watch {
        on_step: &|record| {
            on_step(record.step);
            Ok(())
        },
        on_note: &|note| notes.lock().expect("no panic").push(note.to_owned()),
        control,
    };
    let trained = bench.train_watched([4, 2, 4, 1, 2], options, watch);
    (trained, notes.into_inner().expect("no panic"))
}

#[test]
fn law_a_checkpoint_is_of_its_step_though_training_goes_on() {
    let mut bench = Bench::new("mixtral", 8);
    bench.options.lr = LearningRate::constant(1e-3);
    let [run, alone] = [folder(), folder()];
    let partial = partial(&run.path().join(FOLDER), 3);
    let beside = AtomicUsize::new(0);
    write::PAUSE_MS.store(5, Ordering::Relaxed);
    let options = bench.saving(3, run.path());
    let (trained, notes) = watched(&bench, &options, &Control::default(), &|step| {
        if step >= 3 && partial.exists() {
            beside.fetch_add(1, Ordering::Relaxed);
        }
    });
    write::PAUSE_MS.store(0, Ordering::Relaxed);
    assert_eq!(notes, [""; 0]);
    let written = trained.expect("trains").checkpoints;
    let steps: Vec<u64> = written.iter().map(|written| written.step).collect();
    assert_eq!(steps, [3, 6, 8]);
    assert!(
        beside.into_inner() > 0,
        "no step ended while a file was written"
    );
    assert!(
        written
            .iter()
            .all(|written| written.held_s <= written.seconds)
    );

    // Written with nothing beside it, of a run that ends there.
    bench.options.steps = 6;
    bench
        .train([4, 2, 4, 1, 2], &bench.saving(6, alone.path()))
        .expect("trains");
    let read = |run: &Path| {
        let dir = step_dir(run, 6);
        let names = names(&dir).into_iter();
        names
            .map(|name| fs::read(dir.join(name)).expect("there"))
            .collect::<Vec<_>>()
    };
    assert!(
        read(run.path()) == read(alone.path()),
        "other bytes than those of step 6"
    );
}

#[test]
fn a_checkpoint_is_saved_when_it_is_asked_for_and_a_run_ends_when_it_is_told() {
    let bench = Bench::new("mixtral", 8);
    let run = folder();
    let mut options = bench.saving(100, run.path());
    options.save.as_mut().expect("it saves").every = None;
    let stop = Arc::new(AtomicUsize::new(0));
    let control = Control::stopped_by(Arc::clone(&stop));
    let (trained, notes) = watched(&bench, &options, &control, &|step| match step {
        1 => control.save(),
        4 => stop.store(15, Ordering::Relaxed),
        _ => {}
    });
    assert_eq!(notes, [""; 0]);
    let trained = trained.expect("trains");
    let steps: Vec<u64> = trained
        .checkpoints
        .iter()
        .map(|written| written.step)
        .collect();
    // Ranks agree at the end of the step after the one in which they were told.
    assert_eq!(steps, [3, 6]);
    assert_eq!((trained.steps.len(), control.stopped()), (6, Some(15)));
    let (trained, _) = watched(&bench, &options, &Control::default(), &|_| ());
    assert_eq!(trained.expect("trains").checkpoints, [], "nobody asked");
}

#[test]
fn a_run_goes_on_without_a_checkpoint_that_was_only_tried() {
    let bench = Bench::new("mixtral", 8);
    let run = folder();
    let all = run.path().join(FOLDER);
    let mut options = bench.saving(100, run.path());
    options.save.as_mut().expect("it saves").every = None;
    let control = Control::default();
    let blocked = partial(&all, 3).join("rank-2.safetensors");
    let (trained, notes) = watched(&bench, &options, &control, &|step| {
        if step == 1 {
            fs::create_dir_all(&blocked).expect("creates");
            control.save();
        }
    });
    assert_eq!(trained.expect("trains").steps.len(), 8);
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(
        notes[0].starts_with("no checkpoint after 3 steps: "),
        "{notes:?}"
    );
    assert_eq!(
        names(&partial(&all, 3)),
        ["rank-2.safetensors"],
        "the others took theirs back"
    );
}

#[test]
fn weights_that_are_no_numbers_are_not_saved() {
    let mut bench = Bench::new("mixtral", 8);
    bench.options.steps = 1;
    bench.options.lr = LearningRate::constant(1e39);
    let run = folder();
    let failed = bench.train([4, 2, 4, 1, 2], &bench.saving(1, run.path()));
    let text = failed.expect_err("they are not finite").to_string();
    assert!(
        text.contains("values of its master are no finite numbers"),
        "{text}"
    );
    assert!(!step_dir(run.path(), 1).exists());
    let trained = bench
        .train([4, 2, 4, 1, 2], &bench.options)
        .expect("trains");
    let folder = run.path().join("weights");
    let saved = trained.weights.save(&folder, &serde_json::json!({}));
    let text = saved.expect_err("they are not finite").to_string();
    assert!(
        text.contains("values of its weights are no finite numbers"),
        "{text}"
    );
    assert!(!folder.exists());
}
