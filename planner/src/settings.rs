//! [`Settings`] of Megatron-LM: plans as flags and environment, and flags and environment as what a plan says.
//!
//! One table has every flag once ([`table`]); [`write()`] and [`read`](reading::read) go by it. Flags that say one thing of a plan
//! together are a [`Facet`]. What settings say is a [`Job`]; two settings are the same where the jobs that they are
//! come out the same. Text goes in and comes out, no file but the one that is named is read, and nothing is priced here.

mod arithmetic;
mod branches;
mod file;
mod job;
mod model;
mod onto;
mod pattern;
pub mod reading;
mod rules;
mod said;
mod script;
mod shell;
mod stages;
pub mod table;
mod text;
mod version;
mod words;
mod write;
mod writer;
mod yaml;

pub use file::{parse, read as read_file};
pub use job::Job;
pub use model::same_model;
pub use onto::{Change, changes, onto};
pub use reading::Reading;
pub use rules::{Target, broken, cuts_sequences, has_hybridep};
pub use said::Problem;
pub use script::{Form, Heading, text as text_of};
pub use table::Facet;
pub use text::{Setting, Settings, SettingsFileError, Value, flag};
pub use version::Version;
pub use write::{Rest, note_on_stack, write};
pub use writer::{Refusal, Written};

#[cfg(test)]
mod tests;
