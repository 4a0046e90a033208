//! Worlds of processes, here threads with a connection each: they find each other, compute what rank
//! threads compute, and every way not to.

use std::net::Shutdown;

use moefold_kernels::{Device, Tensor, TensorClass};
use moefold_profiles::Dtype;

use super::*;
use crate::error::Blame;
use crate::transport::tests::{messages, oracle_messages};
use crate::transport::{Payload, RankContext, World};

pub(in crate::transport) const PATIENCE: Duration = Duration::from_secs(20);

/// The connections of a rank, its pulse first, that comes to a rank 0 of the test's own.
fn come_to(listener: &TcpListener, first: &Launched) -> [TcpStream; 2] {
    [true, false].map(|pulse| {
        let (mut connection, _) = listener.accept().expect("a rank comes");
        let hello = greeting(&mut connection, &first.secret).expect("it is one of the run");
        assert_eq!(hello.pulse, pulse);
        connection
    })
}

fn meeting() -> Meeting {
    Meeting {
        terms: Terms::new(),
        deadline: PATIENCE,
        heartbeat: PATIENCE,
    }
}

/// A port that nobody listened at a moment ago.
fn port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.local_addr().expect("bound").port()
}

/// Runs `body` on each of these ranks as a process would; their outcomes, in the same order.
pub(in crate::transport) fn processes<T: Send>(
    all: &[Launched],
    deadline: Duration,
    body: impl Fn(&RankContext) -> Result<T, Error> + Sync,
) -> Vec<Result<T, String>> {
    thread::scope(|scope| {
        let run = |launched: &Launched| {
            let (world, body) = (World::process(launched.clone()).deadline(deadline), &body);
            scope.spawn(move || world.run(body))
        };
        let running: Vec<_> = all.iter().map(run).collect();
        let one = |mut results: Vec<T>| results.pop().expect("its own");
        running
            .into_iter()
            .map(|thread| {
                let outcome = thread.join().expect("a panic of a rank is caught");
                outcome.map(one).map_err(|error| error.to_string())
            })
            .collect()
    })
}

pub(crate) fn world_of(ranks: u32) -> Vec<Launched> {
    let port = port();
    (0..ranks)
        .map(|rank| Launched::here(rank, ranks, port))
        .collect()
}

/// Everything a rank can ask of a group, on numbers whose sums show their order.
pub(in crate::transport) fn collectives(
    rank: &RankContext,
    device: &Device,
) -> Result<Vec<f32>, Error> {
    let everyone: Vec<u32> = (0..rank.ranks()).collect();
    let (me, size) = (rank.rank() as usize, everyone.len());
    let world = rank.communicator("world", &everyone);
    let pair = rank.communicator("pair", &[rank.rank() & !1, rank.rank() | 1]);
    let tensor = |len: usize| -> Tensor {
        let values: Vec<f32> = (0..len).map(|i| 0.1 * (i + 7 * me) as f32).collect();
        device.from_f32(TensorClass::Activations, &values, &[len])
    };
    let empty = |len| device.zeros(TensorClass::Activations, Dtype::F32, &[len]);
    let mut results = Vec::new();
    let (first, second) = (tensor(9), tensor(5));
    let pending = [
        world.start_all_reduce(&first)?,
        pair.start_all_reduce(&second)?,
    ];
    for pending in pending.into_iter().rev() {
        pending.wait()?;
    }
    let max = tensor(3);
    world.all_reduce_max(&max)?;
    let (gathered, shard) = (empty(4 * size), empty(2));
    world.all_gather(&tensor(4), &gathered)?;
    world.reduce_scatter(&tensor(2 * size), &shard)?;
    let copied = tensor(6);
    pair.broadcast(&copied, 1)?;
    // One row to the other of the pair, as many as its rank is to itself.
    let index = pair.index();
    let mut send = [1, 1];
    send[index] = me;
    let received = empty(3 * (me + 1));
    let src = tensor(3 * (me + 1)).reshape(&[me + 1, 3]);
    let dst = received.reshape(&[me + 1, 3]);
    pair.all_to_all(&src, &send, &dst, &send)?;
    let (own, before) = (tensor(7), empty(7));
    world.start_shift(&own, &before)?.wait()?;
    let ids = device.from_i32(TensorClass::Activations, &[me as i32], &[1]);
    let all_ids = device.zeros(TensorClass::Activations, Dtype::I32, &[size]);
    world.all_gather(&ids, &all_ids)?;
    results.extend(all_ids.to_i32().into_iter().map(|id| id as f32));
    for tensor in [
        first, second, max, gathered, shard, copied, received, before,
    ] {
        results.extend(tensor.to_f32());
    }
    for words in world.exchange_counts(&vec![1 << 40; me])? {
        results.push(words.len() as f32);
    }
    Ok(results)
}

fn on_cpu(rank: &RankContext) -> Result<Vec<f32>, Error> {
    collectives(rank, &Device::cpu(1))
}

#[test]
fn differential_processes_compute_what_threads_compute_to_the_bit() {
    for ranks in [2, 4] {
        let threads = World::threads(ranks).run(on_cpu).expect("finishes");
        let outcomes = processes(&world_of(ranks), PATIENCE, on_cpu);
        for (threads, process) in threads.into_iter().zip(outcomes) {
            assert_eq!(process.expect("finishes"), threads);
        }
    }
    let alone = processes(&world_of(1), PATIENCE, |rank| {
        Ok((rank.is_apart(), rank.local_ranks()))
    });
    assert_eq!(alone, [Ok((true, 1))]);
}

#[test]
fn messages_between_processes_come_in_their_order() {
    for ranks in [2, 3] {
        let outcomes = processes(&world_of(ranks), PATIENCE, |rank| {
            messages(rank, &Device::cpu(1))
        });
        for (me, came) in outcomes.into_iter().enumerate() {
            assert_eq!(came, Ok(oracle_messages(me, ranks as usize)));
        }
    }
}

#[test]
fn messages_reach_rank_0_in_their_order() {
    let outcomes = processes(&world_of(3), PATIENCE, |rank| {
        let mut received = Vec::new();
        if rank.rank() == 0 {
            for from in [2, 1] {
                for _ in 0..3 {
                    received.push(rank.receive(from)?);
                }
            }
        } else {
            let number = u64::from(rank.rank());
            rank.send_first(Payload::U64(vec![number; 5]))?;
            rank.send_first(Payload::F32(vec![number as f32].into()))?;
            rank.send_first(Payload::I32(Vec::new()))?;
        }
        Ok(received)
    });
    let of = |number: u64| {
        [
            Payload::U64(vec![number; 5]),
            Payload::F32(vec![number as f32].into()),
            Payload::I32(Vec::new()),
        ]
    };
    assert_eq!(outcomes[0], Ok([of(2), of(1)].concat()));
}

#[test]
fn a_failure_of_one_is_told_to_all_in_its_words() {
    let outcomes = processes(&world_of(3), PATIENCE, |rank| {
        let world = rank.communicator("world", &[0, 1, 2]);
        world.barrier()?;
        if rank.rank() == 2 {
            return Err(Error::Request("a bad file".to_owned()));
        }
        world.barrier()?;
        Ok(())
    });
    let errors: Vec<String> = outcomes
        .into_iter()
        .map(|o| o.expect_err("fails"))
        .collect();
    assert_eq!(errors[2], "rank 2: a bad file");
    for (rank, error) in errors[..2].iter().enumerate() {
        assert_eq!(
            *error,
            format!(
                "rank {rank} stopped in gather_words of 0 u64 (number 1 of group world [0, 1, 2]) \
                 because rank 2 failed: a bad file"
            )
        );
    }
}

#[test]
fn mismatches_deadlines_and_early_leavers_read_as_between_threads() {
    let mismatch = processes(&world_of(2), PATIENCE, |rank| {
        let group = rank.communicator("edp", &[0, 1]);
        let len = 4 + rank.rank() as usize;
        let tensor = Device::cpu(1).zeros(TensorClass::Activations, Dtype::F32, &[len]);
        group.all_reduce(&tensor)?;
        Ok(())
    });
    assert!(mismatch.iter().any(|outcome| {
        let error = outcome.as_ref().expect_err("refused");
        error.contains("all_reduce of 4 f32") && error.contains("all_reduce of 5 f32")
    }));

    let late = processes(&world_of(2), Duration::from_millis(300), |rank| {
        let group = rank.communicator("tp", &[0, 1]);
        if rank.rank() == 1 {
            thread::sleep(Duration::from_millis(900));
        }
        group.barrier()?;
        Ok(())
    });
    let error = late[0].as_ref().expect_err("rank 1 is late");
    assert!(
        error.contains("for ranks [1], which did not come"),
        "{error}"
    );

    let left = processes(&world_of(2), PATIENCE, |rank| {
        let group = rank.communicator("tp", &[0, 1]);
        if rank.rank() == 0 {
            group.barrier()?;
        }
        Ok(())
    });
    let error = left[0].as_ref().expect_err("rank 1 left");
    assert!(
        error.contains("ranks [1], which have finished without it"),
        "{error}"
    );
}

#[test]
fn ranks_that_never_come_are_named_with_the_address() {
    let mut all = world_of(4);
    let port = all[0].port;
    let short = Duration::from_millis(300);
    let alone = processes(&all[2..3], short, |_| Ok(()));
    let error = alone[0].as_ref().expect_err("there is no rank 0");
    assert!(
        error.starts_with(&format!("rendezvous at 127.0.0.1:{port}: rank 2 waited "))
            && error.contains(" s for rank 0")
            && error.ends_with("where it failed before that, its own output says why"),
        "{error}"
    );
    all.remove(3);
    all.remove(1);
    let some = processes(&all, short, |_| Ok(()));
    for outcome in &some {
        let error = outcome.as_ref().expect_err("two are missing");
        assert!(
            error.contains("127.0.0.1")
                && error.ends_with(
                    "for ranks [1, 3] of 4, which did not come; where one failed before that, its own \
                     output says why"
                ),
            "{error}"
        );
    }
}

#[test]
fn a_port_in_use_is_said_with_what_chooses_another() {
    let holder = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = holder.local_addr().expect("bound").port();
    let outcome = processes(&[Launched::here(0, 2, port)], PATIENCE, |_| Ok(()));
    assert_eq!(
        outcome[0],
        Err(format!(
            "rendezvous at 127.0.0.1:{port}: the port is in use by another program: choose a free one \
             with MASTER_PORT or MOEFOLD_PORT, the same for all ranks"
        ))
    );
}

#[test]
fn ranks_started_for_other_worlds_end_the_run_at_once() {
    let begun = Instant::now();
    let port = port();
    let sizes = [Launched::here(0, 2, port), Launched::here(1, 3, port)];
    for outcome in processes(&sizes, PATIENCE, |_| Ok(())) {
        let error = outcome.expect_err("they do not fit");
        assert!(
            error.contains("was started as one of 3 ranks, rank 0 as one of 2"),
            "{error}"
        );
    }
    let port = self::port();
    let twice = [
        Launched::here(0, 3, port),
        Launched::here(1, 3, port),
        Launched::here(1, 3, port),
    ];
    for outcome in processes(&twice, PATIENCE, |_| Ok(())) {
        let error = outcome.expect_err("two are the same");
        assert!(error.contains("rank 1 came twice"), "{error}");
    }
    assert!(begun.elapsed() < PATIENCE);
}

#[test]
fn strangers_are_turned_away_and_named_if_somebody_is_missing() {
    let all = world_of(2);
    let port = all[0].port;
    let says = |text: &'static [u8]| {
        move || {
            let mut last = None;
            for _ in 0..200 {
                if let Ok(mut stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
                    stream.write_all(text).expect("sends");
                    let mut reply = Vec::new();
                    let _ = stream.read_to_end(&mut reply);
                    last = Some(reply);
                    break;
                }
                thread::sleep(Duration::from_millis(5));
            }
            last.expect("rank 0 listens")
        }
    };
    thread::scope(|scope| {
        let stranger = scope.spawn(says(b"GET / HTTP/1.1\r\n\r\n"));
        let outcome = processes(&all[..1], Duration::from_millis(800), |_| Ok(()));
        assert_eq!(
            stranger.join().expect("answers"),
            b"",
            "nothing is said to strangers"
        );
        let error = outcome[0].as_ref().expect_err("rank 1 is missing");
        assert!(
            error.contains("for ranks [1] of 2") && error.contains("it is not moefold"),
            "{error}"
        );
    });
    // A rank of another job is told so; the right one still gets in.
    let all = world_of(2);
    let mut other = all[1].clone();
    other.job = "another".to_owned();
    thread::scope(|scope| {
        let lost = scope.spawn(|| processes(&[other], PATIENCE, |_| Ok(())));
        let first = scope.spawn(|| processes(&all[..1], PATIENCE, |_| Ok(())));
        let lost = lost.join().expect("ends");
        let error = lost[0].as_ref().expect_err("it is of another job");
        assert!(
            error.contains("job \"another\"") && error.contains("\"a job\""),
            "{error}"
        );
        assert_eq!(processes(&all[1..], PATIENCE, |_| Ok(())), [Ok(())]);
        assert_eq!(first.join().expect("ends"), [Ok(())]);
    });
}

#[test]
fn a_connection_that_breaks_is_the_failure_of_its_rank() {
    let all = world_of(2);
    thread::scope(|scope| {
        let first = scope.spawn(|| {
            processes(&all[..1], PATIENCE, |rank| {
                rank.communicator("world", &[0, 1]).barrier()?;
                Ok(())
            })
        });
        let (connection, _pulse) = connect(&all[1], &meeting()).expect("it is welcomed");
        connection.shutdown(Shutdown::Both).expect("open until now");
        let outcome = first.join().expect("ends");
        let error = outcome[0].as_ref().expect_err("rank 1 is gone");
        assert!(
            error.contains("because rank 1 failed: its process ended without a word"),
            "{error}"
        );
    });
    // And the other way round: rank 0's process ends.
    let all = world_of(2);
    thread::scope(|scope| {
        let second = scope.spawn(|| {
            processes(&all[1..], PATIENCE, |rank| {
                rank.communicator("world", &[0, 1]).barrier()?;
                Ok(())
            })
        });
        let listener = listen(&all[0]).expect("a port");
        let [beats, mut connection] = come_to(&listener, &all[0]);
        wire::write(&mut connection, &Welcome::Come, &[]).expect("it is there");
        drop((beats, connection, listener));
        let outcome = second.join().expect("ends");
        let error = outcome[0].as_ref().expect_err("rank 0 is gone");
        assert!(
            error.contains("because rank 0 failed: the connection to it broke"),
            "{error}"
        );
    });
}

#[test]
fn what_is_no_request_ends_the_connection_and_not_the_process() {
    let all = world_of(2);
    thread::scope(|scope| {
        let first = scope.spawn(|| {
            processes(&all[..1], PATIENCE, |rank| {
                rank.communicator("world", &[0, 1]).barrier()?;
                Ok(())
            })
        });
        let (mut connection, _pulse) = connect(&all[1], &meeting()).expect("it is welcomed");
        wire::write(&mut connection, &"what?", &[]).expect("it is sent");
        let outcome = first.join().expect("ends");
        let error = outcome[0].as_ref().expect_err("rank 1 makes no sense");
        assert!(
            error.contains("because rank 1 failed: the connection"),
            "{error}"
        );
    });
}

#[test]
fn a_rank_0_that_falls_silent_is_not_waited_for_without_end() {
    let all = world_of(2);
    let deadline = Duration::from_millis(200);
    thread::scope(|scope| {
        let second = scope.spawn(|| {
            let begun = Instant::now();
            let outcome = processes(&all[1..], deadline, |rank| {
                rank.communicator("world", &[0, 1]).barrier()?;
                Ok(())
            });
            (outcome, begun.elapsed())
        });
        let listener = listen(&all[0]).expect("a port");
        let [beats, mut connection] = come_to(&listener, &all[0]);
        wire::write(&mut connection, &Welcome::Come, &[]).expect("it is there");
        // Open until rank 1 has ended.
        let (outcome, took) = second.join().expect("ends");
        let error = outcome[0].as_ref().expect_err("rank 0 says nothing");
        assert!(
            error.contains("rank 0 failed: the connection to it broke (it has been silent"),
            "{error}"
        );
        assert!(took < 2 * (deadline + GREETING), "waited once: {took:?}");
        drop((beats, connection, listener));
    });
}

#[test]
fn a_rank_that_was_let_in_tries_no_other_rank_0() {
    let all = world_of(2);
    thread::scope(|scope| {
        let second = scope.spawn(|| processes(&all[1..], PATIENCE, |_| Ok(())));
        let listener = listen(&all[0]).expect("a port");
        let [beats, connection] = come_to(&listener, &all[0]);
        let begun = Instant::now();
        drop((beats, connection, listener));
        let outcome = second.join().expect("ends");
        let error = outcome[0].as_ref().expect_err("rank 0 is gone");
        assert!(
            error.contains("the connection to rank 0 broke before all were there"),
            "{error}"
        );
        assert!(begun.elapsed() < PATIENCE / 2);
    });
}

#[test]
fn golden_what_has_an_address_is_listened_for_there_alone() {
    let at = |host: &str, local_ranks: u32| -> Vec<String> {
        let mut launched = Launched::here(0, 4, 7000);
        (launched.host, launched.local_ranks) = (host.to_owned(), local_ranks);
        let addresses = addresses(&launched).into_iter();
        addresses.map(|address| address.to_string()).collect()
    };
    assert_eq!(at("10.0.0.7", 2), ["10.0.0.7:7000"]);
    assert_eq!(at("::1", 2), ["[::1]:7000"]);
    assert!(
        at("localhost", 2)
            .iter()
            .all(|at| ["127.0.0.1:7000", "[::1]:7000"].contains(&&**at))
    );
    assert_eq!(at("no-such-node.invalid", 2), ["[::]:7000", "0.0.0.0:7000"]);
}

#[test]
fn a_rank_that_fails_before_it_comes_ends_the_run_for_those_who_wait() {
    let all = world_of(3);
    let begun = Instant::now();
    let outcomes = thread::scope(|scope| {
        let waiting = scope.spawn(|| processes(&all[..2], PATIENCE, |_| Ok(())));
        decline(&all[2], "data: no such file");
        waiting.join().expect("ends")
    });
    for outcome in outcomes {
        let error = outcome.expect_err("rank 2 does not come");
        let said = "rank 2 failed before it could take part: data: no such file";
        assert!(error.ends_with(said), "{error}");
    }
    assert!(begun.elapsed() < PATIENCE / 2);

    let begun = Instant::now();
    decline(&world_of(2)[1], "nobody listens");
    assert!(begun.elapsed() < DECLINING + GREETING);
}

#[test]
fn whoever_came_knows_why_there_is_no_run_before_rank_0_ends() {
    let mut all = world_of(3);
    all.pop();
    let mailbox = Arc::new(Mailbox::new(3, PATIENCE));
    thread::scope(|scope| {
        let second = scope.spawn(|| processes(&all[1..], PATIENCE, |_| Ok(())));
        let server = Server::start(&all[0]).expect("a port");
        server
            .wait(
                &mailbox,
                &Meeting {
                    deadline: Duration::from_millis(500),
                    ..meeting()
                },
            )
            .expect_err("rank 2 is missing");
        assert!(server.shared.lock().open.is_empty(), "all were answered");
        let outcome = second.join().expect("ends");
        let error = outcome[0].as_ref().expect_err("rank 2 is missing");
        assert!(error.contains("for ranks [2] of 3"), "{error}");
    });
}

/// Rank 0 may have much to read before it comes to meet the others.
#[test]
fn a_rank_that_fails_while_rank_0_is_busy_is_heard() {
    let all = world_of(2);
    let world = World::process(all[0].clone()).deadline(PATIENCE);
    let world = world.listen().expect("a port");
    decline(&all[1], "data: no such file");
    let outcome = world.run(|_| Ok(()));
    let error = outcome.expect_err("rank 1 does not come").to_string();
    let said = "rank 1 failed before it could take part: data: no such file";
    assert!(error.ends_with(said), "{error}");
}

#[test]
fn ranks_that_wait_for_a_rank_0_that_fails_are_told_at_once() {
    let all = world_of(2);
    let world = World::process(all[0].clone()).listen().expect("a port");
    let begun = Instant::now();
    thread::scope(|scope| {
        let second = scope.spawn(|| processes(&all[1..], PATIENCE, |_| Ok(())));
        while !world.is_awaited() {
            thread::sleep(Duration::from_millis(1));
        }
        drop(world);
        let outcome = second.join().expect("ends");
        let error = outcome[0].as_ref().expect_err("there is no rank 0");
        assert!(
            error.contains("rank 0 failed before all had come"),
            "{error}"
        );
    });
    assert!(begun.elapsed() < PATIENCE / 2);
}

/// What a stranger hears of rank 0 by saying `said`, and the connection.
fn hear(port: u16, said: &[u8], expected: usize) -> (TcpStream, Vec<u8>) {
    let begun = Instant::now();
    let mut stream = loop {
        match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
            Ok(stream) => break stream,
            Err(error) => assert!(begun.elapsed() < PATIENCE, "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    };
    stream.write_all(said).expect("sends");
    let mut heard = vec![0; expected];
    stream.read_exact(&mut heard).expect("rank 0 answers");
    (stream, heard)
}

#[test]
fn who_does_not_know_the_secret_learns_nothing_and_ends_nothing() {
    let all = world_of(2);
    thread::scope(|scope| {
        let run = |rank: usize| processes(&all[rank..=rank], PATIENCE, barrier);
        let first = scope.spawn(move || run(0));
        // All but the secret is right, and what rank 0 said to another is repeated.
        let said = [&MAGIC[..], &[7; PROOF]].concat();
        let expected = MAGIC.len() + 2 * PROOF;
        let (_other, overheard) = hear(all[0].port, &said, expected);
        let (mut stream, heard) = hear(all[0].port, &said, expected);
        assert_eq!(heard[..MAGIC.len()], MAGIC);
        assert_ne!(heard, overheard, "nothing is said twice");
        let hello = Hello {
            failed: Some("no matter".to_owned()),
            ..all[1].hello()
        };
        let hello = serde_json::to_string(&hello).expect("plain data");
        let (proof, _) = overheard[MAGIC.len() + PROOF..]
            .split_first_chunk()
            .expect("a proof");
        let proven = Proven {
            hello,
            proof: *proof,
        };
        wire::write(&mut stream, &proven, &[]).expect("sends");
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert_eq!(rest, b"", "it is shown the door without a word");
        assert_eq!(run(1), [Ok(())]);
        assert_eq!(first.join().expect("ends"), [Ok(())]);
    });
}

fn barrier(rank: &RankContext) -> Result<(), Error> {
    rank.communicator("world", &[0, 1]).barrier()?;
    Ok(())
}

#[test]
fn a_rank_says_nothing_of_its_run_to_another_rank_0() {
    let all = world_of(2);
    let mut other = all[0].clone();
    other.secret = Secret::of("the secret of another run");
    thread::scope(|scope| {
        let begun = Instant::now();
        let lost = scope.spawn(|| processes(&all[1..], PATIENCE, barrier));
        let listener = listen(&other).expect("a port");
        let (mut connection, _) = listener.accept().expect("rank 1 comes");
        let found = greeting(&mut connection, &other.secret).expect_err("it goes again");
        assert!(found.to_string().contains("was to prove"), "{found}");
        let lost = lost.join().expect("ends");
        let error = lost[0].as_ref().expect_err("it is not its rank 0");
        assert!(
            error.contains("does not know the secret") && error.contains("MOEFOLD_SECRET"),
            "{error}"
        );
        assert!(begun.elapsed() < PATIENCE / 2);
    });
}

/// A rank 0 that stalls makes others give up a connection that it reads afterwards.
#[test]
fn a_process_that_comes_again_takes_its_own_place() {
    let all = &world_of(3);
    thread::scope(|scope| {
        let world = World::process(all[0].clone()).deadline(PATIENCE);
        let world = world.listen().expect("a port");
        let mut given_up = try_connect(&all[1]).expect("it listens");
        meet(&mut given_up).expect("it answers");
        drop(given_up);
        // It came, and its process knows nothing of that any more.
        let stale = try_connect(&all[1]).expect("it listens");
        let mut other = stale.try_clone().expect("a handle");
        scope.spawn(move || {
            let _ = introduce(&mut other, &all[1].secret, &all[1].hello());
            welcome(&mut other, PATIENCE);
        });
        while !world.is_awaited() {
            thread::sleep(Duration::from_millis(1));
        }
        let barrier = |rank: &RankContext| {
            rank.communicator("world", &[0, 1, 2]).barrier()?;
            Ok(())
        };
        let again = scope.spawn(move || processes(&all[1..2], PATIENCE, barrier));
        // The second of one process ends the first, however long the run is in coming.
        assert_eq!((&stale).read(&mut [0]).unwrap_or(0), 0);
        let last = scope.spawn(move || processes(&all[2..], PATIENCE, barrier));
        world.run(barrier).expect("all have come");
        assert_eq!(again.join().expect("ends"), [Ok(())]);
        assert_eq!(last.join().expect("ends"), [Ok(())]);
    });
}

#[test]
fn idle_connections_keep_nobody_out() {
    let all = world_of(2);
    let world = World::process(all[0].clone())
        .deadline(PATIENCE)
        .listen()
        .expect("a port");
    let mut idle: Vec<TcpStream> = (0..2 * (UNKNOWN + 2))
        .map(|_| TcpStream::connect((Ipv4Addr::LOCALHOST, all[0].port)).expect("it listens"))
        .collect();
    thread::scope(|scope| {
        let second = scope.spawn(|| processes(&all[1..], PATIENCE, barrier));
        world.run(barrier).expect("both have come");
        assert_eq!(second.join().expect("ends"), [Ok(())]);
    });
    let begun = Instant::now();
    assert_eq!(
        idle[0].read(&mut [0]).unwrap_or(0),
        0,
        "the oldest was closed"
    );
    assert!(begun.elapsed() < GREETING / 2);
}

#[test]
fn ranks_that_would_train_otherwise_are_told_in_what() {
    let terms = |lr: &str| {
        Terms::from([
            ("lr".to_owned(), lr.to_owned()),
            ("plan".to_owned(), "a".to_owned()),
        ])
    };
    let all = world_of(2);
    let outcomes: Vec<String> = thread::scope(|scope| {
        let run = |(launched, lr): (&Launched, &'static str)| {
            let world = World::process(launched.clone())
                .deadline(PATIENCE)
                .agreeing(terms(lr));
            scope.spawn(move || world.run(barrier))
        };
        let running: Vec<_> = all.iter().zip(["0.1", "0.01"]).map(run).collect();
        let ended = running
            .into_iter()
            .map(|thread| thread.join().expect("ends"));
        ended
            .map(|outcome| outcome.expect_err("they differ").to_string())
            .collect()
    });
    for error in outcomes {
        assert!(
            error.contains(
                "rank 1 would train otherwise than rank 0: lr is 0.01 there and 0.1 here: "
            ),
            "{error}"
        );
    }
}

#[test]
fn a_request_for_another_member_or_out_of_turn_ends_the_run_at_once() {
    let key = |name: &str, ranks: &[u32]| serde_json::json!({"Name": {"name": name, "ranks": ranks, "instance": 0}});
    let call = serde_json::json!({"what": "gather_words", "element": "u64", "size": 0, "root": 0});
    let post = |member: usize| {
        let post = serde_json::json!({"element": "u64", "bytes": 0, "rows": [], "collects": true});
        serde_json::json!({"Post": {"group": 0, "sequence": 0, "member": member, "call": call, "post": post}})
    };
    let collect =
        serde_json::json!({"Collect": {"group": 0, "sequence": 3, "member": 1, "call": call}});
    let group = || key("world", &[0, 1]);
    for requests in [
        vec![group(), post(99)],
        vec![group(), post(0)],
        vec![group(), post(1), post(1)],
        vec![group(), collect],
        vec![key("world", &[0, 1, 99])],
        vec![key("world", &[1, 1])],
        vec![key("world", &[0])],
        vec![key("wor\x1b[2Jld", &[0, 1])],
    ] {
        let all = world_of(2);
        let begun = Instant::now();
        thread::scope(|scope| {
            let first = scope.spawn(|| {
                processes(&all[..1], PATIENCE, |rank| {
                    let tensor = Device::cpu(1).zeros(TensorClass::Activations, Dtype::F32, &[4]);
                    rank.communicator("others", &[0, 1]).all_reduce(&tensor)?;
                    Ok(())
                })
            });
            let (mut connection, pulse) = connect(&all[1], &meeting()).expect("it is welcomed");
            for request in &requests {
                wire::write(&mut connection, request, &[]).expect("it is sent");
                let _ = wire::read::<serde_json::Value>(&mut connection);
            }
            // Rank 0 stays a little for who has not left.
            drop(pulse);
            let outcome = first.join().expect("ends");
            let error = outcome[0].as_ref().expect_err("rank 1 makes no sense");
            assert!(
                error.contains(
                    "because rank 1 failed: the connection to it broke (it sent what is no request)"
                ),
                "{requests:?}: {error}"
            );
        });
        assert!(begun.elapsed() < PATIENCE / 2);
    }
}

/// Says how long a header and its body are, and the header.
fn announce(connection: &mut TcpStream, request: &serde_json::Value, body: u64) {
    let header = serde_json::to_vec(request).expect("plain data");
    let lengths = [header.len() as u64, body].map(u64::to_le_bytes).concat();
    let sent = connection.write_all(&[lengths, header].concat());
    sent.expect("it is sent");
}

/// Nothing but headers is sent, so a rank 0 that waited for a body would wait for its deadline.
#[test]
fn a_body_that_nobody_asked_for_ends_the_run_by_its_header_alone() {
    use serde_json::json;
    const LIMIT: u64 = 1 << 20;
    let group = json!({"Name": {"name": "world", "ranks": [0, 1], "instance": 0}});
    let call = json!({"what": "gather_words", "element": "u64", "size": 0, "root": 0});
    let post = |sequence: u64, bytes: u64| {
        let post = json!({"element": "u64", "bytes": bytes, "rows": [], "collects": true});
        json!({"Post": {"group": 0, "sequence": sequence, "member": 1, "call": call, "post": post}})
    };
    let gigabytes = 3 << 30;
    // Each takes 512 bytes and 64 for each member of its group.
    let many: Vec<_> = (0..LIMIT / 640).map(|i| (post(i, 0), 0)).collect();
    let cases = [
        (
            vec![(json!("Failure"), gigabytes)],
            "a body of 3221225472 bytes, and 0 were expected",
        ),
        (
            vec![(group.clone(), 0), (post(0, 8), gigabytes)],
            "a body of 3221225472 bytes, and 8 were expected",
        ),
        (
            vec![(group.clone(), 0), (post(0, gigabytes), gigabytes)],
            "it posted 3221225472 bytes: with 0 posts before them 3221226112 bytes would be on their way, and a \
             rank of this run has at most 1048576",
        ),
        (
            [vec![(group, 0)], many, vec![(post(LIMIT, 0), 0)]].concat(),
            "it posted 0 bytes: with 1638 posts before them 1048960 bytes would be on their way",
        ),
    ];
    for (requests, expected) in cases {
        let all = world_of(2);
        let begun = Instant::now();
        thread::scope(|scope| {
            let first = scope.spawn(|| {
                let world = World::process(all[0].clone()).deadline(PATIENCE);
                world.on_the_way(LIMIT).run(|rank| {
                    let tensor = Device::cpu(1).zeros(TensorClass::Activations, Dtype::F32, &[4]);
                    rank.communicator("others", &[0, 1]).all_reduce(&tensor)?;
                    Ok(())
                })
            });
            let (mut connection, pulse) = connect(&all[1], &meeting()).expect("it is welcomed");
            for (request, body) in &requests {
                announce(&mut connection, request, *body);
                let _ = wire::read::<serde_json::Value>(&mut connection);
            }
            drop(pulse);
            let error = first
                .join()
                .expect("ends")
                .expect_err("rank 1 says too much")
                .to_string();
            let broke = "because rank 1 failed: the connection to it broke (it ";
            assert!(error.contains(broke) && error.contains(expected), "{error}");
        });
        assert!(begun.elapsed() < PATIENCE / 2);
    }
}

#[test]
fn what_was_collected_is_on_its_way_no_more() {
    let all = world_of(2);
    thread::scope(|scope| {
        let run = |rank: usize| {
            let world = World::process(all[rank].clone()).deadline(PATIENCE);
            // One sum of a thousand numbers, and that of the step after.
            world.on_the_way(10_000).run(|rank| {
                let tensor = Device::cpu(1).zeros(TensorClass::Activations, Dtype::F32, &[1000]);
                let world = rank.communicator("world", &[0, 1]);
                for _ in 0..20 {
                    world.all_reduce(&tensor)?;
                }
                Ok(())
            })
        };
        let second = scope.spawn(move || run(1));
        run(0).expect("it keeps within");
        second.join().expect("ends").expect("it keeps within");
    });
}

/// Where hostile inputs of a greeting are.
const GREETINGS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../tests/hostile/corpus/greeting"
);

#[test]
fn golden_what_hostile_greetings_begin_with_is_let_in() {
    let read = |name: &str| std::fs::read(format!("{GREETINGS}/{name}")).expect("it is there");
    let hello = read("hello.json");
    assert_eq!(greeted(&hello), Ok(()));
    let text = String::from_utf8(hello).expect("UTF-8");
    assert!(read("whole") == recorded(&text), "it is of another version");
    assert_eq!(greeted(&recorded(&text)), Ok(()));
    let mut other = recorded(&text);
    // Of the first number, which the proof is over.
    other[MAGIC.len()] ^= 1;
    let refused = greeted(&other).expect_err("it proves nothing");
    assert!(refused.contains("does not know the secret"), "{refused}");
    let twice = text.replace("\"rank\":1", "\"rank\":2");
    let refused = greeted(twice.as_bytes()).expect_err("there are two");
    assert!(refused.contains("rank 2 came twice"), "{refused}");
}

#[test]
fn who_hangs_is_noticed_by_its_pulse_and_who_computes_is_not() {
    let patience = Duration::from_millis(400);
    let heart = |launched: &Launched| {
        World::process(launched.clone())
            .deadline(PATIENCE)
            .heartbeat(patience)
    };
    // One that computes for long is waited for.
    let all = &world_of(2);
    thread::scope(|scope| {
        let slow = scope.spawn(|| {
            heart(&all[1]).run(|rank| {
                thread::sleep(3 * patience);
                barrier(rank)
            })
        });
        heart(&all[0]).run(barrier).expect("rank 1 comes late");
        slow.join().expect("ends").expect("rank 0 waits");
    });
    // One whose process hangs is not, here a rank 1 that says nothing more.
    let all = &world_of(2);
    let begun = Instant::now();
    thread::scope(|scope| {
        let first = scope.spawn(|| heart(&all[0]).run(barrier));
        let mut hung = [true, false].map(|pulse| {
            let mut connection = loop {
                match try_connect(&all[1]) {
                    Ok(connection) => break connection,
                    Err(_) => thread::sleep(PAUSE),
                }
            };
            let hello = Hello {
                pulse,
                ..all[1].hello()
            };
            let said = introduce(&mut connection, &all[1].secret, &hello);
            said.expect("it listens").expect("it is rank 0");
            connection
        });
        assert!(matches!(welcome(&mut hung[1], PATIENCE), Welcome::Come));
        let error = first.join().expect("ends").expect_err("rank 1 hangs");
        assert_eq!(error.blame(), Blame::Silent(1));
        let error = error.to_string();
        assert!(
            error.contains("because rank 1 failed: it has been silent for 0.4 s"),
            "{error}"
        );
        // Its connections are still open.
        drop(hung);
    });
    assert!(begun.elapsed() < GOODBYE, "it was waited for");
    // Nor is rank 0.
    let all = &world_of(2);
    thread::scope(|scope| {
        let second = scope.spawn(|| heart(&all[1]).run(barrier));
        let listener = listen(&all[0]).expect("a port");
        let [_beats, mut connection] = come_to(&listener, &all[0]);
        wire::write(&mut connection, &Welcome::Come, &[]).expect("it is there");
        let error = second.join().expect("ends").expect_err("rank 0 hangs");
        assert_eq!(error.blame(), Blame::Silent(0));
        let error = error.to_string();
        assert!(
            error.contains(
                "because rank 0 failed: the connection to it broke (it has been silent for 0.4 s"
            ),
            "{error}"
        );
    });
    assert!(begun.elapsed() < PATIENCE);
}
