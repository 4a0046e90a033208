//! What a recorder measures, on the CPU and on an emulated GPU.

use std::thread::sleep;
use std::time::Duration;

use moefold_emulator::at_hand;
use moefold_kernels::cuda::Architecture;
use moefold_kernels::{Dtype, TensorClass, elementwise};
use moefold_profiles::units::Bytes;
use moefold_profiles::{Collective, CollectiveKind};

use super::*;
use crate::transport::{CollectiveLog, World};

fn nap() {
    sleep(Duration::from_millis(2));
}

#[test]
fn law_categories_of_a_step_sum_to_its_wall_time() {
    let recorder = Recorder::new(3, time::Instant::now());
    recorder.begin_step(7, Detail::Spans);
    recorder.at_layer(Some(1));
    recorder.span(Category::Host, "forward", || {
        recorder.span(Category::Attention, "gemm", nap);
        recorder.at_layer(Some(2));
        recorder.communication(Category::EpComm, "all_to_all", || (nap(), Noted::default()));
        nap();
    });
    nap();
    let step = recorder.end_step();
    assert!(
        (step.time.total().0 - step.step.0).abs() < 1e-6,
        "{step:?} does not sum"
    );
    assert!(step.time.get(Category::Attention).0 >= 2e-3);
    assert!(step.time.get(Category::Host).0 >= 4e-3);
    assert!(step.busy[&(Lane::Communication, "all_to_all")].seconds >= 2e-3);
    // The outer span counts only what no inner span covers.
    assert!(step.busy[&(Lane::Compute, "forward")].seconds < step.step.0 - 4e-3);

    let spans = recorder.take_spans();
    assert_eq!(spans.len(), 3);
    let exchange = spans
        .iter()
        .find(|s| s.name == "all_to_all")
        .expect("recorded");
    assert_eq!(exchange.rank, 3);
    assert_eq!(exchange.lane, Lane::Communication);
    assert_eq!((exchange.step, exchange.layer), (Some(7), Some(2)));
    let forward = spans
        .iter()
        .find(|s| s.name == "forward")
        .expect("recorded");
    assert!(forward.start <= exchange.start && exchange.end <= forward.end);
}

/// What a rank notes that waited so long for the others at one collective.
fn awaited(waited_ns: u64) -> Noted {
    let log = CollectiveLog::default();
    let collective = Collective {
        kind: CollectiveKind::AllToAll,
        bytes: Bytes(64),
        ranks: 2,
        ranks_per_domain: 2,
    };
    let started = log.start(&"ep".into(), collective);
    let mut noted = log.take();
    noted.awaited.push(started);
    noted.waited_ns = waited_ns;
    noted
}

#[test]
fn waiting_for_other_ranks_is_a_category_and_still_sums() {
    let recorder = Recorder::new(0, time::Instant::now());
    recorder.begin_step(0, Detail::Spans);
    recorder.span(Category::Dense, "gemm", nap);
    recorder.communication(Category::EpComm, "all_to_all", || {
        (nap(), awaited(1_500_000))
    });
    let step = recorder.end_step();
    assert_eq!(step.time.get(Category::Waiting), Seconds(1.5e-3));
    let exchange = step.busy[&(Lane::Communication, "all_to_all")];
    assert_eq!(exchange.calls, 1.0);
    let whole = step.time.get(Category::EpComm).0;
    assert!((whole - exchange.seconds).abs() < 1e-9, "{step:?}");
    assert!((step.time.total().0 - step.step.0).abs() < 1e-6, "{step:?}");
    let [(key, time)] = &step.keys.iter().collect::<Vec<_>>()[..] else {
        panic!("one key, found {:?}", step.keys);
    };
    assert_eq!(key.stem(), "all_to_all");
    let [[waited, apart]] = time.waits[..] else {
        panic!("one meeting, found {time:?}");
    };
    assert!((waited - 1.5e-3).abs() < 1e-9 && apart >= 2e-3, "{time:?}");
}

/// Who waits for a message of another pipeline rank waits for its work, and has met nobody since.
#[test]
fn waiting_for_a_message_is_the_bubble_and_no_meeting() {
    let recorder = Recorder::new(0, time::Instant::now());
    recorder.begin_step(0, Detail::Sums);
    let message = || {
        let mut noted = awaited(1_000_000);
        noted.awaited[0].collective.kind = CollectiveKind::SendRecv;
        (nap(), noted)
    };
    recorder.communication(Category::PpComm, "send_recv", message);
    recorder.communication(Category::EpComm, "all_to_all", || (nap(), awaited(500_000)));
    let step = recorder.end_step();
    assert_eq!(step.time.get(Category::Bubble), Seconds(1e-3));
    let waiting = step.time.get(Category::Waiting).0;
    assert!((waiting - 5e-4).abs() < 1e-9, "{step:?}");
    assert!((step.time.total().0 - step.step.0).abs() < 1e-6, "{step:?}");
    let of = |stem: &str| {
        let mut all = step.keys.iter();
        let found = all.find(|(key, _)| key.stem() == stem);
        found.map(|(_, time)| (time.calls, time.waits.clone()))
    };
    assert_eq!(of("send_recv"), Some((1, Vec::new())));
    let Some((1, waits)) = of("all_to_all") else {
        panic!("one exchange, found {step:?}");
    };
    let [[waited, apart]] = waits[..] else {
        panic!("one meeting, found {waits:?}");
    };
    // The millisecond in which there was no work is not time that ranks drifted apart in.
    let most = step.step.0 - 1.5e-3 + 1e-9;
    assert!((waited - 5e-4).abs() < 1e-9 && apart <= most, "{step:?}");
}

#[test]
fn of_too_few_cores_a_rank_has_what_its_thread_ran() {
    let recorder = Recorder::new(0, time::Instant::now()).stretched(2.0);
    recorder.begin_step(0, Detail::Sums);
    let spin = || {
        let begun = recorder.0.as_ref().map_or(0, |inner| inner.clock.own_ns());
        let ran = || recorder.0.as_ref().map_or(0, |inner| inner.clock.own_ns()) - begun;
        while ran() < 1_000_000 {}
    };
    // It runs for a millisecond and sleeps for two: of two ranks on a core another one had it then.
    recorder.span(Category::Dense, "gemm", || (spin(), nap()));
    recorder.communication(Category::EpComm, "all_to_all", || {
        (nap(), awaited(2_000_000))
    });
    let step = recorder.end_step();
    let [dense, host, waiting] =
        [Category::Dense, Category::Host, Category::Waiting].map(|c| step.time.get(c).0);
    assert!((2e-3..step.step.0).contains(&dense), "{step:?}");
    assert!(
        waiting > 0.0 && waiting <= step.step.0 - dense - host + 1e-9,
        "{step:?}"
    );
    assert!((step.time.total().0 - step.step.0).abs() < 1e-6, "{step:?}");
    let waited: f64 = step
        .keys
        .values()
        .flat_map(|time| &time.waits)
        .map(|w| w[0])
        .sum();
    assert!((waited - waiting).abs() < 1e-9, "{step:?}");
}

/// Its start and the wait for it are where the compute stream stood still; what a trace shows is when
/// the communication stream did it.
#[test]
fn a_collective_of_a_device_is_one_span_of_the_communication_lane() {
    let open = || moefold_emulator::device(Architecture::SM80, Dtype::F32, 3);
    if at_hand(open()).is_none() {
        return;
    }
    let steps = World::threads(2).run(|rank| {
        let device = open().expect("there was one");
        let (log, recorder) = (CollectiveLog::default(), rank.recorder().on(&device));
        let group = rank.noting(&log).communicator("all", &[0, 1]);
        let zeros = |len| device.zeros(TensorClass::Activations, Dtype::F32, &[len]);
        let [own, all, other] = [4, 8, 8].map(zeros);
        recorder.begin_step(0, Detail::Spans);
        let gather = || (group.start_all_gather(&own, &all), log.take());
        let pending = recorder.communication(Category::TpComm, "all_gather", gather)?;
        recorder.counting(Category::Dense, || {
            elementwise::scale(&other, 2.0);
            // Meanwhile the gather comes to its end.
            group.barrier()
        })?;
        let wait = || (pending.wait(), log.take());
        recorder.communication(Category::TpComm, "all_gather", wait)?;
        group.barrier()?;
        Ok((recorder.end_step(), recorder.take_spans()))
    });
    for (step, spans) in steps.expect("every rank finishes") {
        let of = |lane| spans.iter().filter(move |span| span.lane == lane);
        assert_eq!(of(Lane::Compute).count(), 1);
        let gathers: Vec<_> = of(Lane::Communication).collect();
        assert_eq!(gathers.len(), 1, "{spans:?}");
        assert_eq!(gathers[0].category, Category::TpComm);
        let busy = step.busy[&(Lane::Communication, "all_gather")].seconds;
        assert!((busy - gathers[0].duration().seconds().0).abs() < 1e-8);
        // What does not fall into the span of compute ran before it.
        let hidden = step.hidden.get(Category::TpComm).0;
        assert!(hidden <= busy && busy > 0.0, "{step:?}");
        assert!((step.time.total().0 - step.step.0).abs() < 1e-6, "{step:?}");
    }
}

#[test]
fn spans_are_kept_only_for_the_steps_asked_for() {
    let recorder = Recorder::new(0, time::Instant::now());
    for step in 0..3 {
        let detail = [Detail::Sums, Detail::Spans, Detail::Whole][step as usize];
        recorder.begin_step(step, detail);
        recorder.span(Category::Dense, "gemm", || ());
        let busy = recorder.end_step().busy;
        let recorded = busy.contains_key(&(Lane::Compute, "gemm"));
        assert_eq!(recorded, detail != Detail::Whole);
    }
    let spans = recorder.take_spans();
    assert_eq!(spans.len(), 1);
    assert_eq!(spans[0].step, Some(1));
}

#[test]
fn an_off_recorder_records_nothing() {
    let recorder = Recorder::off();
    recorder.begin_step(0, Detail::Spans);
    assert_eq!(recorder.span(Category::Dense, "gemm", || 5), 5);
    assert_eq!(recorder.end_step(), StepTime::default());
    assert!(recorder.take_spans().is_empty());
}
