//! [`Secret`]: what the ranks of one run know and nobody else, and proofs of knowing it.
//!
//! A connection begins with a number of each end that nobody has said before. Who knows the secret hashes both
//! under it (BLAKE3's keyed hash) and shows the hash: rank 0 first, so that a rank says nothing of its run to
//! whoever else holds the port, then the rank, over what it says of itself as well. Nothing that was heard
//! proves anything on another connection. What follows is neither hidden nor sealed: the network between ranks
//! is trusted as far as that of NCCL is.

use std::fmt;

use rand::TryRngCore as _;
use rand::rngs::OsRng;

/// The shortest secret, in bytes: shorter ones can be tried out.
pub(super) const SHORTEST: usize = 16;

/// Bytes of a [`Nonce`] and of a proof.
pub(super) const PROOF: usize = 32;

/// A number that is said once.
pub(super) type Nonce = [u8; PROOF];

/// What the ranks of one run share.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Secret([u8; PROOF]);

/// Who proves it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Side {
    /// Rank 0, which was called.
    First,
    /// A rank that called.
    Other,
}

impl Secret {
    /// The secret in these words.
    pub(super) fn of(words: &str) -> Self {
        Self(blake3::derive_key("moefold rendezvous", words.as_bytes()))
    }

    /// The proof of one side for a connection with these nonces, of the caller and of rank 0, over what it says.
    pub(super) fn proof(&self, side: Side, nonces: &[Nonce; 2], said: &str) -> blake3::Hash {
        let side: &[u8] = match side {
            Side::First => b"first",
            Side::Other => b"other",
        };
        // All before the last part has a length of its own.
        blake3::keyed_hash(
            &self.0,
            &[side, &nonces[0], &nonces[1], said.as_bytes()].concat(),
        )
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// A number that nobody can foresee.
pub(super) fn nonce() -> Nonce {
    let mut nonce = [0; PROOF];
    OsRng
        .try_fill_bytes(&mut nonce)
        .expect("the system gives random numbers");
    nonce
}

/// Words of a new secret.
pub fn new_secret() -> String {
    blake3::Hash::from_bytes(nonce()).to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_a_proof_holds_for_one_secret_side_connection_and_saying() {
        let (secret, nonces) = (Secret::of("a long enough secret"), [nonce(), nonce()]);
        let proof = secret.proof(Side::Other, &nonces, "rank 1");
        assert_eq!(proof, secret.proof(Side::Other, &nonces, "rank 1"));
        let others = [
            Secret::of("another secret").proof(Side::Other, &nonces, "rank 1"),
            secret.proof(Side::First, &nonces, "rank 1"),
            secret.proof(Side::Other, &[nonces[1], nonces[0]], "rank 1"),
            secret.proof(Side::Other, &[nonces[0], nonce()], "rank 1"),
            secret.proof(Side::Other, &nonces, "rank 2"),
        ];
        for other in others {
            assert_ne!(proof, other);
        }
        assert_eq!(format!("{secret:?}"), "Secret");
        assert_ne!(new_secret(), new_secret());
        assert!(new_secret().len() >= SHORTEST);
    }
}
