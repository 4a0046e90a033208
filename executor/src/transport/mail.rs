//! [`Mail`]: what carries posts between ranks, the mailbox of this process or that of another.

use std::fmt;
use std::sync::Arc;

use super::TransportError;
use super::mailbox::{Call, Collected, Failure, Group, GroupKey, Mailbox, Post};

/// Name of a message to rank 0 among the calls on mailboxes.
pub(super) const TO_FIRST: &str = "to rank 0";

/// A mailbox, wherever it is. See [`Mailbox`] for what the calls do.
pub(super) trait Mail: fmt::Debug {
    fn group(&self, key: &GroupKey) -> Arc<Group>;
    fn post(
        &self,
        group: &Group,
        sequence: u64,
        member: usize,
        post: Post,
    ) -> Result<(), TransportError>;
    fn collect(
        &self,
        group: &Group,
        sequence: u64,
        member: usize,
        call: &Call,
    ) -> Result<Collected, TransportError>;
    fn poison(&self, rank: u32, message: String);
    fn leave(&self, rank: u32);
    /// The failure that ended the world, if any; asked now and then by who waits for a device.
    fn failure(&self) -> Option<Failure>;
    /// The mailbox itself, where it is in this process, for ranks that share a GPU.
    fn shared(&self) -> &Mailbox;
}

impl Mail for Arc<Mailbox> {
    fn group(&self, key: &GroupKey) -> Arc<Group> {
        Mailbox::group(self, key)
    }

    fn post(
        &self,
        group: &Group,
        sequence: u64,
        member: usize,
        post: Post,
    ) -> Result<(), TransportError> {
        Mailbox::post(self, group, sequence, member, post)
    }

    fn collect(
        &self,
        group: &Group,
        sequence: u64,
        member: usize,
        call: &Call,
    ) -> Result<Collected, TransportError> {
        Mailbox::collect(self, group, sequence, member, call)
    }

    fn poison(&self, rank: u32, message: String) {
        Mailbox::poison(self, rank, message);
    }

    fn leave(&self, rank: u32) {
        Mailbox::leave(self, rank);
    }

    fn failure(&self) -> Option<Failure> {
        Mailbox::failure(self).cloned()
    }

    fn shared(&self) -> &Mailbox {
        self
    }
}
