//! Collectives against a brute-force oracle, their laws, and every way to fail.

use std::panic::resume_unwind;
use std::rc::Rc;
use std::thread::sleep;
use std::time::Duration;

use moefold_emulator::at_hand;
use moefold_kernels::cuda::Architecture;
use moefold_kernels::{Device, DeviceError, Tensor, TensorClass, elementwise};
use moefold_profiles::Dtype;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::error::Error;

const CLASS: TensorClass = TensorClass::Activations;

/// What the ranks of a test compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Cpu,
    /// CUDA made of software, every rank with one of its own, as threads of one GPU.
    Emulated(Dtype),
}

impl Kind {
    pub(super) fn open(self) -> Device {
        match self {
            Self::Cpu => Device::cpu(1),
            Self::Emulated(dtype) => {
                moefold_emulator::device(Architecture::SM80, dtype, 11).expect("there was one")
            }
        }
    }
}

/// The devices at hand: without a C++ compiler none is emulated.
pub(super) fn kinds() -> Vec<Kind> {
    let emulated = moefold_emulator::device(Architecture::SM80, Dtype::F32, 0);
    let emulated = at_hand(emulated).map(|_| [Dtype::F32, Dtype::Bf16].map(Kind::Emulated));
    [Kind::Cpu]
        .into_iter()
        .chain(emulated.into_iter().flatten())
        .collect()
}

/// `lens` on the CPU; on a device made of software those of them that do not take long.
fn lens(device: &Device, lens: &[usize]) -> Vec<usize> {
    let longest = if device.name() == "cpu" {
        usize::MAX
    } else {
        150
    };
    lens.iter().copied().filter(|&len| len <= longest).collect()
}

/// The values as the device stores them.
fn stored(device: &Device, values: &[f32]) -> Vec<f32> {
    tensor(device, values).to_f32()
}

/// Numbers that only `rank` would send, with rounding that shows the order of a sum.
pub(super) fn data(rank: u32, len: usize) -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(u64::from(rank) + 17);
    (0..len)
        .map(|_| random.random_range(-1.0_f32..1.0) * 1e3_f32.powi(random.random_range(-1..2)))
        .collect()
}

fn sum_in_rank_order(parts: &[Vec<f32>]) -> Vec<f32> {
    let mut total = parts[0].clone();
    for part in &parts[1..] {
        total.iter_mut().zip(part).for_each(|(a, b)| *a += b);
    }
    total
}

pub(super) fn all_ranks(world: u32) -> Vec<u32> {
    (0..world).collect()
}

pub(super) fn tensor(device: &Device, values: &[f32]) -> Tensor {
    matrix(device, values, &[values.len()])
}

fn matrix(device: &Device, values: &[f32], dims: &[usize]) -> Tensor {
    let tensor = device.empty(CLASS, device.dtype(), dims);
    tensor.copy_from_f32(values);
    tensor
}

pub(super) fn zeros(device: &Device, dims: &[usize]) -> Tensor {
    device.zeros(CLASS, device.dtype(), dims)
}

/// Runs `body` on every rank of worlds of 1 to 8, on every kind of device, with a group of all ranks.
fn on_worlds(body: impl Fn(&RankContext, &Communicator, &Device) -> Result<(), Error> + Sync) {
    for kind in kinds() {
        for world in 1..=8 {
            World::threads(world)
                .deadline(Duration::from_mins(1))
                .run(|rank| {
                    let group = rank.communicator("all", &all_ranks(world));
                    body(rank, &group, &kind.open())
                })
                .unwrap_or_else(|error| panic!("{world} ranks on {kind:?}: {error}"));
        }
    }
}

#[test]
fn oracle_all_reduce_sums_in_rank_order_and_takes_the_maximum() {
    on_worlds(|rank, group, device| {
        for len in lens(device, &[0, 1, 5, 150, 1001]) {
            let part = |r| stored(device, &data(r, len));
            let parts: Vec<_> = (0..rank.ranks()).map(part).collect();
            let sum = tensor(device, &data(rank.rank(), len));
            group.all_reduce(&sum)?;
            assert_eq!(sum.to_f32(), stored(device, &sum_in_rank_order(&parts)));
            let max = tensor(device, &data(rank.rank(), len));
            group.all_reduce_max(&max)?;
            let expected: Vec<f32> = (0..len)
                .map(|i| parts.iter().map(|p| p[i]).fold(f32::MIN, f32::max))
                .collect();
            assert_eq!(max.to_f32(), expected);
        }
        Ok(())
    });
}

/// Every rank sends the next several messages before it receives any, and the one before it as many by
/// another group; what came, in order. Messages of a group of two cross each other.
pub(super) fn messages(rank: &RankContext, device: &Device) -> Result<Vec<Vec<f32>>, Error> {
    const LENS: [usize; 3] = [5, 1, 12];
    let (me, size) = (rank.rank() as usize, rank.ranks() as usize);
    let all = all_ranks(rank.ranks());
    let forward: Vec<[usize; 2]> = (0..size).map(|i| [i, (i + 1) % size]).collect();
    let backward: Vec<[usize; 2]> = forward.iter().map(|&[from, to]| [to, from]).collect();
    let groups = [forward, backward].map(|pairs| rank.lines("pp", &all, &pairs));
    let [next, before] = [(me + 1) % size, (me + size - 1) % size];
    let mut pending = Vec::new();
    for (group, to, sign) in [(&groups[0], next, 1.0), (&groups[1], before, -1.0)] {
        for (number, len) in (0..).zip(LENS) {
            let value = sign * (10 * me + number) as f32;
            let tensor = zeros(device, &[len]);
            elementwise::fill(&tensor, value);
            pending.push(group.start_send(&tensor, to)?);
        }
    }
    let mut came = Vec::new();
    for (group, from) in [(&groups[1], next), (&groups[0], before)] {
        for len in LENS {
            let tensor = zeros(device, &[len]);
            group.receive(&tensor, from)?;
            came.push(tensor);
        }
    }
    for pending in pending {
        pending.wait()?;
    }
    Ok(came.iter().map(Tensor::to_f32).collect())
}

/// What [`messages`] gives a rank.
pub(super) fn oracle_messages(me: usize, size: usize) -> Vec<Vec<f32>> {
    let from = [((me + 1) % size, -1.0), ((me + size - 1) % size, 1.0)];
    let sent = from.into_iter().flat_map(|(from, sign)| {
        let lens = (0..).zip([5, 1, 12]);
        lens.map(move |(number, len)| vec![sign * (10 * from + number) as f32; len])
    });
    sent.collect()
}

#[test]
fn oracle_messages_come_in_their_order_and_wait_for_nobody() {
    for kind in kinds() {
        for size in 2..=5 {
            let run = World::threads(size)
                .deadline(Duration::from_mins(1))
                .run(|rank| messages(rank, &kind.open()));
            for (me, came) in run.expect("every rank finishes").into_iter().enumerate() {
                assert_eq!(came, oracle_messages(me, size as usize), "{kind:?}");
            }
        }
    }
}

/// On the CPU a message is on its way as soon as it is sent: its sender may end, and the receiver come later.
#[test]
fn a_message_outlives_its_sender() {
    let run = World::threads(2).run(|rank| {
        let (device, line) = (Device::cpu(1), rank.lines("pp", &[0, 1], &[[0, 1]]));
        let tensor = tensor(&device, &data(rank.rank(), 4));
        if rank.rank() == 0 {
            line.start_send(&tensor, 1)?.wait()?;
        } else {
            sleep(Duration::from_millis(50));
            line.receive(&tensor, 0)?;
        }
        Ok(tensor.to_f32())
    });
    assert_eq!(run.expect("both finish"), [data(0, 4), data(0, 4)]);
}

#[test]
fn a_message_that_cannot_come_is_an_error_of_both() {
    let run = |wrong: bool| {
        World::threads(2).run(|rank| {
            let (device, line) = (Device::cpu(1), rank.lines("pp", &[0, 1], &[[0, 1]]));
            if rank.rank() == 1 {
                line.receive(&zeros(&device, &[4]), 0)?;
            } else if wrong {
                line.start_send(&zeros(&device, &[5]), 1)?.wait()?;
            }
            Ok(())
        })
    };
    let text = run(false).expect_err("nothing was sent").to_string();
    assert!(
        text.contains("rank 1 waits in send_recv of 4 f32") && text.contains("[0]"),
        "{text}"
    );
    let text = run(true).expect_err("another size").to_string();
    assert!(
        text.contains("send_recv of 4 f32") && text.contains("send_recv of 5 f32"),
        "{text}"
    );
}

#[test]
fn oracle_gather_scatter_and_broadcast() {
    on_worlds(|rank, group, device| {
        let (size, me) = (group.size(), group.index());
        for len in lens(device, &[1, 7, 24, 256]) {
            let shard = |r| stored(device, &data(r, len));
            let shards: Vec<_> = (0..rank.ranks()).map(shard).collect();
            let gathered = zeros(device, &[size * len]);
            group.all_gather(&tensor(device, &shards[me]), &gathered)?;
            assert_eq!(gathered.to_f32(), shards.concat());

            let whole = |r| stored(device, &data(r, size * len));
            let wholes: Vec<_> = (0..rank.ranks()).map(whole).collect();
            let shard = zeros(device, &[len]);
            let src = tensor(device, &wholes[me]);
            group.reduce_scatter(&src, &shard)?;
            let sum = stored(device, &sum_in_rank_order(&wholes));
            let own = me * len..(me + 1) * len;
            assert_eq!(shard.to_f32(), sum[own.clone()]);
            assert_eq!(src.to_f32(), wholes[me], "a source is left as it is");

            // A shard in its place of the whole, as the optimizer keeps it.
            group.reduce_scatter(&src, &src.view(own.start, &[len]))?;
            assert_eq!(src.to_f32()[own.clone()], sum[own]);
            group.all_gather(&src.view(me * len, &[len]), &src)?;
            assert_eq!(src.to_f32(), sum);

            let root = len % size;
            let copied = tensor(device, &data(rank.rank(), len));
            group.broadcast(&copied, root)?;
            assert_eq!(copied.to_f32(), shards[root]);

            let ids = device.from_i32(CLASS, &[rank.rank() as i32; 3], &[3]);
            let all_ids = device.zeros(CLASS, Dtype::I32, &[3 * size]);
            group.all_gather(&ids, &all_ids)?;
            let expected: Vec<i32> = (0..size as i32).flat_map(|r| [r; 3]).collect();
            assert_eq!(all_ids.to_i32(), expected);
        }
        Ok(())
    });
}

/// Rows that `from` sends to `to`: ragged, many of them zero.
fn rows_between(from: usize, to: usize) -> usize {
    [0, 3, 0, 1, 5, 0, 2][(3 * from + 5 * to) % 7]
}

#[test]
fn oracle_ragged_all_to_all_delivers_rows_with_their_provenance() {
    const WIDTH: usize = 3;
    on_worlds(|_, group, device| {
        let (size, me) = (group.size(), group.index());
        // A row says who sent it to whom, and which one it is.
        let rows = |from: usize, to: usize| -> Vec<f32> {
            (0..rows_between(from, to))
                .flat_map(|row| [from as f32, to as f32, row as f32])
                .collect()
        };
        let send: Vec<usize> = (0..size).map(|to| rows_between(me, to)).collect();
        let receive: Vec<usize> = (0..size).map(|from| rows_between(from, me)).collect();
        let sent: Vec<f32> = (0..size).flat_map(|to| rows(me, to)).collect();
        let expected: Vec<f32> = (0..size).flat_map(|from| rows(from, me)).collect();
        let src = matrix(device, &sent, &[send.iter().sum(), WIDTH]);
        let dst = zeros(device, &[receive.iter().sum(), WIDTH]);
        group.all_to_all(&src, &send, &dst, &receive)?;
        assert_eq!(dst.to_f32(), expected);
        // Sending everything back restores it.
        let back = zeros(device, &[send.iter().sum(), WIDTH]);
        group.all_to_all(&dst, &receive, &back, &send)?;
        assert_eq!(back.to_f32(), sent);
        Ok(())
    });
}

#[test]
fn oracle_a_shift_brings_what_the_rank_before_has() {
    on_worlds(|rank, group, device| {
        let (me, ranks) = (rank.rank(), rank.ranks());
        let mut own = tensor(device, &data(me, 11));
        // All the way around: then it is one's own again.
        for step in 1..=ranks {
            let next = zeros(device, &[11]);
            group.start_shift(&own, &next)?.wait()?;
            let from = (me + ranks - step % ranks) % ranks;
            assert_eq!(next.to_f32(), stored(device, &data(from, 11)), "{step}");
            own = next;
        }
        Ok(())
    });
}

#[test]
fn oracle_host_numbers() {
    on_worlds(|rank, group, _| {
        let mine: Vec<u64> = vec![u64::from(rank.rank()); rank.rank() as usize];
        let expected: Vec<Rc<[u64]>> = (0..u64::from(rank.ranks()))
            .map(|r| vec![r; r as usize].into())
            .collect();
        assert_eq!(group.exchange_counts(&mine)?, expected);
        let mut values = [f64::from(rank.rank()), 0.1];
        group.all_reduce_f64(&mut values)?;
        let n = rank.ranks();
        assert_eq!(values[0], f64::from(n * (n - 1) / 2));
        assert_eq!(values[1], (0..n).map(|_| 0.1).sum::<f64>());
        group.barrier()?;
        Ok(())
    });
}

#[test]
fn started_collectives_of_several_groups_interleave_and_end_in_any_order() {
    const WORLD: u32 = 4;
    let run = |kind: Kind| {
        World::threads(WORLD)
            .deadline(Duration::from_mins(1))
            .run(|rank| {
                let device = kind.open();
                let me = rank.rank();
                let pair = rank.communicator("tp", &[me & !1, me | 1]);
                let stride = rank.communicator("dp", &[me % 2, me % 2 + 2]);
                let world = rank.communicator("world", &all_ranks(WORLD));
                let groups = [&pair, &stride, &world, &pair];
                let tensors: Vec<Tensor> = (0..4)
                    .map(|i| tensor(&device, &data(10 * i + me, 100)))
                    .collect();
                let mut pending: Vec<(usize, Pending)> = Vec::new();
                for (i, group) in groups.iter().enumerate() {
                    pending.push((i, group.start_all_reduce(&tensors[i])?));
                }
                // A blocking one in between, and every rank awaits in another order.
                world.barrier()?;
                pending.rotate_left(me as usize);
                for (i, pending) in pending {
                    pending.wait()?;
                    let parts: Vec<_> = groups[i]
                        .ranks()
                        .iter()
                        .map(|r| stored(&device, &data(10 * i as u32 + r, 100)))
                        .collect();
                    let sum = stored(&device, &sum_in_rank_order(&parts));
                    assert_eq!(tensors[i].to_f32(), sum);
                }
                Ok(())
            })
    };
    for kind in kinds() {
        let ended = run(kind);
        ended.unwrap_or_else(|error| panic!("no order of waiting deadlocks on {kind:?}: {error}"));
    }
}

/// A rank that goes on to write what it has sent does so after the others have read it, however late
/// they come to that.
#[test]
fn what_was_sent_is_written_again_only_when_all_have_read_it() {
    let run = |kind: Kind, late: u32| {
        World::threads(3)
            .deadline(Duration::from_mins(1))
            .run(|rank| {
                let (device, group) = (kind.open(), rank.communicator("all", &all_ranks(3)));
                let nap = || {
                    if rank.rank() == late {
                        sleep(Duration::from_millis(30));
                    }
                };
                let mine = tensor(&device, &[rank.rank() as f32; 20]);
                let all = zeros(&device, &[60]);
                let gathered = group.start_all_gather(&mine, &all)?;
                nap();
                gathered.wait()?;
                elementwise::fill(&mine, 9.0);
                let expected: Vec<f32> = (0..60u8).map(|i| f32::from(i / 20)).collect();
                assert_eq!(
                    all.to_f32(),
                    expected,
                    "all_gather on {kind:?}, {late} is late"
                );

                let sum = tensor(&device, &[1.0; 40]);
                let summed = group.start_all_reduce(&sum)?;
                nap();
                summed.wait()?;
                let seen = elementwise::duplicate(&sum, CLASS);
                elementwise::fill(&sum, 9.0);
                group.barrier()?;
                assert_eq!(
                    seen.to_f32(),
                    [3.0; 40],
                    "all_reduce on {kind:?}, {late} is late"
                );

                let copied = tensor(&device, &[rank.rank() as f32; 10]);
                let sent = group.start_broadcast(&copied, 1)?;
                nap();
                sent.wait()?;
                let seen = elementwise::duplicate(&copied, CLASS);
                elementwise::fill(&copied, 9.0);
                assert_eq!(
                    seen.to_f32(),
                    [1.0; 10],
                    "broadcast on {kind:?}, {late} is late"
                );
                Ok(())
            })
    };
    for kind in kinds() {
        for late in 0..3 {
            run(kind, late).expect("every rank finishes");
        }
    }
}

#[test]
fn who_waits_for_a_message_goes_on_with_what_is_in_flight() {
    for kind in kinds() {
        World::threads(2)
            .deadline(Duration::from_secs(10))
            .run(|rank| {
                let device = kind.open();
                let group = rank.communicator("all", &[0, 1]);
                let sum = tensor(&device, &data(rank.rank(), 6));
                let pending = group.start_all_reduce(&sum)?;
                // Rank 1 says nothing before the sum is there, which takes rank 0 too.
                if rank.rank() == 0 {
                    rank.receive(1)?;
                    pending.wait()?;
                } else {
                    pending.wait()?;
                    rank.send_first(Payload::U64(vec![1]))?;
                }
                let parts = [0, 1].map(|rank| stored(&device, &data(rank, 6)));
                let expected = sum_in_rank_order(&parts);
                assert_eq!(sum.to_f32(), stored(&device, &expected), "{kind:?}");
                Ok(())
            })
            .unwrap_or_else(|error| panic!("{kind:?}: {error}"));
    }
}

#[test]
fn communicators_of_one_name_and_ranks_are_separate() {
    let run = |kind: Kind| {
        World::threads(2)
            .deadline(Duration::from_mins(1))
            .run(|rank| {
                let first = rank.communicator("ep", &[0, 1]);
                let second = rank.communicator("ep", &[0, 1]);
                let word = u64::from(rank.rank());
                // Rank 0 and rank 1 use them in opposite orders: one stream of calls would mismatch.
                let device = kind.open();
                let t = tensor(&device, &[1.0]);
                if word == 0 {
                    let pending = first.start_all_reduce(&t)?;
                    second.exchange_counts(&[word])?;
                    pending.wait()?;
                } else {
                    let pending = second.exchange_counts(&[word]);
                    first.all_reduce(&t)?;
                    pending?;
                }
                assert_eq!(t.to_f32(), [2.0]);
                Ok(())
            })
    };
    for kind in kinds() {
        run(kind).expect("both finish");
    }
}

#[test]
fn law_the_same_bits_under_random_delays() {
    let seed: u64 = std::env::var("SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(20);
    let run = |kind: Kind, delays: u64| {
        World::threads(5)
            .run(|rank| {
                let device = kind.open();
                let group = rank.communicator("all", &all_ranks(5));
                let mut random =
                    ChaCha8Rng::seed_from_u64(seed ^ delays ^ (u64::from(rank.rank()) << 32));
                let (len, rounds) = if kind == Kind::Cpu {
                    (333, 20)
                } else {
                    (43, 5)
                };
                let t = tensor(&device, &data(rank.rank(), len));
                for _ in 0..rounds {
                    sleep(Duration::from_micros(random.random_range(0..300)));
                    group.all_reduce(&t)?;
                    let scaled: Vec<f32> = t.to_f32().iter().map(|x| x / 4.9).collect();
                    t.copy_from_f32(&scaled);
                }
                Ok(t.to_f32().iter().map(|x| x.to_bits()).collect::<Vec<_>>())
            })
            .expect("finishes")
    };
    for kind in kinds() {
        let first = run(kind, 1);
        assert!(first.iter().all(|rank| *rank == first[0]));
        for delays in 2..if kind == Kind::Cpu { 6 } else { 4 } {
            assert_eq!(
                run(kind, delays),
                first,
                "SEED={seed}, delays {delays}, {kind:?}"
            );
        }
    }
}

#[test]
fn a_failing_rank_stops_the_others_and_is_the_error_of_the_world() {
    let error = World::threads(4)
        .run(|rank| {
            let group = rank.communicator("ep", &all_ranks(4));
            if rank.rank() == 2 {
                sleep(Duration::from_millis(20));
                return Err(Error::Request("the data ran out".to_owned()));
            }
            let stopped = group.barrier().expect_err("rank 2 never comes");
            let text = stopped.to_string();
            assert!(
                text.contains("rank 2 failed: the data ran out")
                    && text.contains("number 0 of group ep [0, 1, 2, 3]"),
                "{text}"
            );
            Err::<(), _>(stopped.into())
        })
        .expect_err("the world fails");
    assert_eq!(error.to_string(), "rank 2: the data ran out");
    assert!(error.is_bad_request());
}

#[test]
fn a_panic_becomes_an_error_that_names_the_rank_and_its_last_collective() {
    let error = World::threads(3)
        .run(|rank| {
            let group = rank.communicator("dp", &all_ranks(3));
            group.barrier()?;
            assert!(rank.rank() != 1, "a defect");
            group.barrier()?;
            Ok(())
        })
        .expect_err("the world fails");
    let text = error.to_string();
    assert!(
        text.starts_with("rank 1 panicked after starting gather_words")
            && text.contains("number 0 of group dp [0, 1, 2]")
            && text.ends_with("a defect"),
        "{text}"
    );
}

#[test]
fn a_failure_of_a_device_becomes_an_error_that_names_the_rank_the_call_and_the_op() {
    let error = World::threads(2)
        .run(|rank| {
            let group = rank.communicator("dp", &all_ranks(2));
            if rank.rank() == 1 {
                resume_unwind(Box::new(DeviceError {
                    call: "cuMemAlloc",
                    code: Some((2, "CUDA_ERROR_OUT_OF_MEMORY".to_owned())),
                    op: Some("gemm::forward"),
                    detail: "asked for 2 GiB, 1 GiB is free".to_owned(),
                }));
            }
            group.barrier()?;
            Ok(())
        })
        .expect_err("the world fails");
    assert_eq!(
        error.to_string(),
        "rank 1: device: gemm::forward: cuMemAlloc failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): asked \
         for 2 GiB, 1 GiB is free"
    );
}

#[test]
fn a_missing_rank_is_named_at_the_deadline() {
    let error = World::threads(3)
        .deadline(Duration::from_millis(50))
        .run(|rank| {
            let group = rank.communicator("tp", &all_ranks(3));
            if rank.rank() == 1 {
                sleep(Duration::from_millis(300));
            }
            group.barrier()?;
            Ok(())
        })
        .expect_err("rank 1 is too late");
    let text = error.to_string();
    assert!(text.contains("for ranks [1], which did not come"), "{text}");
}

#[test]
fn a_rank_that_returns_early_is_named_at_once() {
    let error = World::threads(3)
        .run(|rank| {
            let group = rank.communicator("tp", &all_ranks(3));
            if rank.rank() != 1 {
                group.barrier()?;
            }
            Ok(())
        })
        .expect_err("rank 1 left");
    let text = error.to_string();
    assert!(
        text.contains("for ranks [1], which have finished without it"),
        "{text}"
    );
}

#[test]
fn mismatched_collectives_are_refused_with_both_calls() {
    for kind in kinds() {
        refuses_mismatches(kind);
    }
}

fn refuses_mismatches(kind: Kind) {
    let element = match kind {
        Kind::Cpu => Dtype::F32,
        Kind::Emulated(dtype) => dtype,
    };
    let run = |call: fn(&Communicator, &Device, u32) -> Result<(), TransportError>| {
        World::threads(2)
            .run(|rank| {
                let group = rank.communicator("edp", &[0, 1]);
                call(&group, &kind.open(), rank.rank())?;
                Ok(())
            })
            .expect_err("refused")
            .to_string()
    };
    let sizes = run(|group, device, rank| group.all_reduce(&zeros(device, &[4 + rank as usize])));
    for size in [4, 5] {
        let call = format!("all_reduce of {size} {element}");
        assert!(sizes.contains(&call), "{sizes}");
    }
    assert!(sizes.contains("number 0 of group edp [0, 1]"), "{sizes}");

    let kinds = run(|group, device, rank| match rank {
        0 => group.all_reduce(&zeros(device, &[4])),
        _ => group.broadcast(&zeros(device, &[4]), 0),
    });
    assert!(
        ["all_reduce", "broadcast"]
            .iter()
            .all(|call| kinds.contains(&format!("{call} of 4 {element}"))),
        "{kinds}"
    );

    let rows = run(|group, device, rank| {
        let sent = zeros(device, &[2, 8]);
        let received = zeros(device, &[2 + rank as usize, 8]);
        group.all_to_all(&sent, &[1, 1], &received, &[1, 1 + rank as usize])
    });
    assert_eq!(
        rows,
        format!(
            "rank 1 expects 2 rows from rank 1 in all_to_all of 8 {element} (number 0 of group edp \
             [0, 1]), which sends 1"
        )
    );
}

#[test]
fn collectives_are_noted_by_group_and_key() {
    let noted = World::threads(2)
        .run(|rank| {
            let log = CollectiveLog::default();
            let rank = rank.noting(&log);
            let device = Device::cpu(1);
            let group = rank.communicator("tp", &[0, 1]);
            let solo = rank.communicator("cp", &[rank.rank()]);
            let t = tensor(&device, &[1.0, 2.0]);
            group.all_reduce(&t)?;
            solo.all_reduce(&t)?;
            let gathered = zeros(&device, &[4]);
            group.all_gather(&t, &gathered)?;
            assert_eq!(gathered.to_f32(), [2.0, 4.0, 2.0, 4.0]);
            // What hosts exchange has keys, too.
            group.exchange_counts(&[1, 2, 3])?;
            group.all_reduce_f64(&mut [1.0, 2.0, 3.0])?;
            let Noted {
                started, awaited, ..
            } = log.take();
            assert_eq!(started, awaited);
            let call = |started: Started| {
                let Collective {
                    kind, bytes, ranks, ..
                } = started.collective;
                (
                    started.number,
                    started.group.to_string(),
                    kind.stem(),
                    bytes.0,
                    ranks,
                )
            };
            Ok(started.into_iter().map(call).collect::<Vec<_>>())
        })
        .expect("finishes");
    let call = |number, stem, bytes| (number, "tp".to_owned(), stem, bytes, 2);
    let expected = vec![
        call(0, "all_reduce", 8),
        call(1, "all_gather", 16),
        call(2, "all_gather", 48),
        call(3, "all_reduce", 24),
    ];
    assert_eq!(noted, vec![expected.clone(), expected]);
}
