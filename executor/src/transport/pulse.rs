//! Pulses: how ranks that are processes notice that another hangs, as where its process is stopped, its machine
//! or the network gone without a word.
//!
//! A rank has a second connection to rank 0, on which it says a byte now and then and is answered with one. Where
//! rank 0 hears nothing for the patience of a heartbeat, the rank has failed; where a rank is not answered, rank 0
//! has. Who was stopped itself meanwhile blames nobody. That a rank computes for long is no silence: the pulse is a
//! thread of its own. One that hangs in its work is what deadlines of collectives are for.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use super::mailbox::Mailbox;

/// How long a rank may be silent where nobody says otherwise.
pub(super) const HEARTBEAT: Duration = Duration::from_mins(1);

/// What is said.
const BEAT: [u8; 1] = [1];

/// The end of a rank other than 0. It ends with what holds it.
#[derive(Debug)]
pub(super) struct Pulse {
    /// Its own connection, and that of the calls, which its thread holds too: closed by whoever ends first.
    connections: [TcpStream; 2],
    silence: Arc<OnceLock<String>>,
}

impl Pulse {
    /// Begins to say that this rank lives; where rank 0 is silent for `patience`, ends the connection of its `calls`.
    pub(super) fn start(
        connection: TcpStream,
        calls: TcpStream,
        patience: Duration,
    ) -> io::Result<Self> {
        let silence = Arc::<OnceLock<String>>::default();
        let connections = [connection.try_clone()?, calls.try_clone()?];
        let (mut here, said) = (connection, Arc::clone(&silence));
        let beat = move || {
            // Before the first beat there is no pause: with it, it is `patience` after the last answer.
            let mut wait = patience;
            while here.write_all(&BEAT).is_ok() {
                match next(&mut here, wait) {
                    Ok(true) => {
                        thread::sleep(patience / 4);
                        wait = patience * 3 / 4;
                    }
                    Ok(false) => {
                        said.get_or_init(|| silent(patience));
                        let _ = calls.shutdown(Shutdown::Both);
                        return;
                    }
                    // Its calls say why.
                    Err(_) => return,
                }
            }
        };
        thread::Builder::new()
            .name("pulse".to_owned())
            .spawn(beat)?;
        Ok(Self {
            connections,
            silence,
        })
    }

    /// Why rank 0 was given up, if it was.
    pub(super) fn silence(&self) -> Option<&str> {
        self.silence.get().map(String::as_str)
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        for connection in &self.connections {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }
}

/// Rank 0's end: answers until the rank ends, or is silent for `patience`, which is its failure.
pub(super) fn watch(mut connection: TcpStream, rank: u32, mailbox: &Mailbox, patience: Duration) {
    loop {
        match next(&mut connection, patience) {
            Ok(true) if connection.write_all(&BEAT).is_ok() => {}
            Ok(false) => return mailbox.give_up(rank, silent(patience)),
            _ => return,
        }
    }
}

fn silent(patience: Duration) -> String {
    format!(
        "it has been silent for {:.1} s (its process or machine hangs, or the network between)",
        patience.as_secs_f64()
    )
}

/// Whether the other end says something within `patience`; an error where it ended.
fn next(connection: &mut TcpStream, patience: Duration) -> io::Result<bool> {
    connection.set_read_timeout(Some(patience))?;
    loop {
        let begun = Instant::now();
        match connection.read_exact(&mut [0; BEAT.len()]) {
            Ok(()) => return Ok(true),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    // Much later than asked for: this process was stopped too.
                    if begun.elapsed() < patience + patience / 2 {
                        return Ok(false);
                    }
                }
                _ => return Err(error),
            },
        }
    }
}
