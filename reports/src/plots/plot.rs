//! [`Plot`]: what every module of plots draws.

use crate::draw::scene::Scene;

/// One picture and what to look at in it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plot {
    /// File name without its ending.
    pub(crate) stem: String,
    /// What to look at, one or two sentences.
    pub(crate) caption: String,
    /// The picture.
    pub(crate) scene: Scene,
}
