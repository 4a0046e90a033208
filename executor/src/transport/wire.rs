//! Frames on a connection between processes: a header in JSON, then numbers as they lie in memory.
//!
//! A connection begins with [`MAGIC`], which names the protocol and its version; whoever says anything
//! else is a stranger. Lengths come first. That of a header is limited; a body is read once its header was,
//! by whoever knows how long it may be. Memory is taken as bytes arrive, not as they are announced. Numbers
//! travel little-endian, as all machines that GPUs are in store them.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::mailbox::Payload;
use super::words::printable;

/// What a connection begins with. The last number is the version of the protocol.
pub(super) const MAGIC: [u8; 12] = *b"moefold\n\0\0\0\x05";

/// The longest header: names and ranks of groups, messages.
const HEADER_LIMIT: u64 = 1 << 20;

/// Writes a frame, and sends it.
pub(super) fn write(
    to: &mut impl Write,
    header: &impl Serialize,
    body: &[&Payload],
) -> io::Result<()> {
    let header = serde_json::to_vec(header)?;
    let length: u64 = body.iter().map(|payload| bytes(payload).len() as u64).sum();
    if header.len() as u64 > HEADER_LIMIT {
        let (found, what) = (header.len(), "too long for the header of a message");
        return Err(io::Error::other(format!("{found} bytes are {what}")));
    }
    to.write_all(&(header.len() as u64).to_le_bytes())?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(&header)?;
    for payload in body {
        to.write_all(bytes(payload))?;
    }
    to.flush()
}

/// Reads the header of a frame, and how many bytes of a body it announces.
pub(super) fn head<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<(T, u64)> {
    let mut lengths = [[0; 8]; 2];
    for length in &mut lengths {
        from.read_exact(length)?;
    }
    let [header, announced] = lengths.map(u64::from_le_bytes);
    if header > HEADER_LIMIT {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a header of {header} bytes is none of moefold's"),
        ));
    }
    let header = body(from, header)?;
    let header = serde_json::from_slice(&header).map_err(|error| {
        // It repeats what it does not know.
        io::Error::new(io::ErrorKind::InvalidData, printable(&error.to_string()))
    })?;
    Ok((header, announced))
}

/// Reads a frame that has no body.
pub(super) fn read<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<T> {
    let (header, announced) = head(from)?;
    expect(announced, 0)?;
    Ok(header)
}

/// Refuses a body that is not as long as its header says.
pub(super) fn expect(announced: u64, expected: u64) -> io::Result<()> {
    if announced == expected {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidData,
        format!("it announced a body of {announced} bytes, and {expected} were expected"),
    ))
}

/// Reads a body.
pub(super) fn body(from: &mut impl Read, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if from.take(length).read_to_end(&mut bytes)? as u64 == length {
        return Ok(bytes);
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

/// The numbers as bytes.
pub(super) fn bytes(payload: &Payload) -> &[u8] {
    match payload {
        Payload::F32(numbers) => bytemuck::cast_slice(numbers),
        Payload::I32(numbers) => bytemuck::cast_slice(numbers),
        Payload::U64(numbers) => bytemuck::cast_slice(numbers),
        Payload::Offer(_) | Payload::Event(_) => panic!("memory of a GPU stays in its process"),
    }
}

/// The type of the numbers, as headers say it.
pub(super) fn element(payload: &Payload) -> &'static str {
    match payload {
        Payload::F32(_) => "f32",
        Payload::I32(_) => "i32",
        Payload::U64(_) => "u64",
        Payload::Offer(_) | Payload::Event(_) => panic!("memory of a GPU stays in its process"),
    }
}

/// The numbers of a type out of bytes; none where that is no type, or they are cut off.
pub(super) fn payload(element: &str, bytes: &[u8]) -> Option<Payload> {
    let width = if element == "u64" { 8 } else { 4 };
    if !bytes.len().is_multiple_of(width) {
        return None;
    }
    match element {
        "f32" => Some(Payload::F32(numbers(bytes).into())),
        "i32" => Some(Payload::I32(numbers(bytes))),
        "u64" => Some(Payload::U64(numbers(bytes))),
        _ => None,
    }
}

/// Copied: received bytes lie at any address.
fn numbers<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    let mut numbers = vec![T::zeroed(); bytes.len() / size_of::<T>()];
    bytemuck::cast_slice_mut(&mut numbers).copy_from_slice(bytes);
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_a_frame_is_read_as_it_was_written() {
        let posts = [
            Payload::F32(vec![1.5, f32::NAN].into()),
            Payload::U64(vec![u64::MAX]),
            Payload::I32(vec![-7, 0, 9]),
        ];
        let mut sent = Vec::new();
        write(&mut sent, &("header", 3), &posts.each_ref()).expect("memory takes all");
        let whole = |mut sent: &[u8]| {
            let (header, announced) = head::<(String, u32)>(&mut sent)?;
            Ok::<_, io::Error>((header, body(&mut sent, announced)?))
        };
        let (header, bytes) = whole(&sent).expect("whole");
        assert_eq!(header, ("header".to_owned(), 3));
        let Some(Payload::F32(floats)) = payload("f32", &bytes[..8]) else {
            panic!("floats came");
        };
        assert!(floats[0] == 1.5 && floats[1].is_nan());
        assert_eq!(payload("u64", &bytes[8..16]), Some(posts[1].clone()));
        assert_eq!(payload("i32", &bytes[16..]), Some(posts[2].clone()));
        assert_eq!(payload("i32", &bytes[..3]), None);
        assert_eq!(payload("f64", &bytes[..8]), None);
        for length in 0..sent.len() {
            assert!(
                whole(&sent[..length]).is_err(),
                "cut off after {length} bytes"
            );
        }
    }
    #[test]
    fn what_is_no_header_is_named_without_what_steers_a_terminal() {
        let mut sent = Vec::new();
        let header = serde_json::json!({"\x1b[2J": 0});
        write(&mut sent, &header, &[]).expect("memory takes all");
        let refused = read::<Result<u32, u32>>(&mut &sent[..]);
        let refused = refused.expect_err("no header").to_string();
        assert!(refused.contains("\\u{1b}[2J"), "{refused}");
        assert!(!refused.contains(char::is_control), "{refused:?}");
    }
    #[test]
    fn what_is_announced_too_long_is_refused_before_memory_is_taken() {
        let refused = |lengths: [u64; 2], expected: &str| {
            let mut sent = lengths.map(u64::to_le_bytes).concat();
            sent.extend(b"null");
            let error = read::<()>(&mut &*sent).expect_err("too long").to_string();
            assert!(error.contains(expected), "{error}");
        };
        refused([HEADER_LIMIT + 1, 0], "a header of 1048577 bytes");
        refused(
            [u64::MAX, u64::MAX],
            "a header of 18446744073709551615 bytes",
        );
        refused([4, 1001], "a body of 1001 bytes, and 0 were expected");
    }
}
