//! What layouts of a search share is what each would have by itself.

use super::*;
use crate::layout::Layout;
use crate::rules::{Rules, Variants};
use crate::search::judged::candidates;
use crate::search::questions::question;
use crate::search::shape::{Shapes, shape_key};
use crate::search::watch::unwatched;
use crate::search::{Asked, shapes};

/// Of so many layouts one is looked at.
const EVERY: usize = 101;

/// A model with a depth of multi-token prediction, whose head has a copy of the embedding in a pipeline, and one with a head that is
/// tied to it.
#[test]
fn law_shapes_that_layouts_share_are_those_of_each() {
    let depths = presets::load("glm-4.5-air").expect("a preset");
    let mut tied = presets::load("mixtral-8x7b").expect("a preset");
    tied.tied_embeddings = true;
    assert!(!depths.mtp.is_empty(), "has depths");
    for model in [depths, tied] {
        let (_, cluster, options) = on_h100("mixtral-8x7b", 64);
        let costs = &Costs::for_cluster(&cluster, &[]);
        let rules = &Rules::of(&model, &options);
        let asked = Asked::new(&model, &cluster, 64, &options, costs, &Declared);
        let question = question(&asked, rules).expect("legal");
        let questions = std::slice::from_ref(&question);
        let layouts = candidates(questions, (64, Variants::Few), rules, &unwatched);
        let mut layouts = layouts.expect("unwatched").layouts;
        layouts.sort_by_key(Layout::pp);
        let shared = shapes(&layouts, questions);
        let (mut parted, mut looked_at) = (0, 0);
        for layout in layouts.iter().step_by(EVERY) {
            let key = shape_key(&question, layout);
            let (shared, own) = (shared[&key][0].first(&question), Shapes::new(layout));
            for (shared, own) in shared.iter().zip(own.first(&question)) {
                assert_eq!(format!("{:?}", shared.kinds), format!("{:?}", own.kinds));
                let ends = [
                    (&shared.embedding, &own.embedding),
                    (&shared.head, &own.head),
                ];
                for (shared, own) in ends {
                    assert_eq!(format!("{shared:?}"), format!("{own:?}"), "{layout:?}");
                }
            }
            parted += u32::from(layout.places().parts_ends());
            looked_at += 1;
        }
        assert!(0 < parted && parted < looked_at, "{parted} of {looked_at}");
    }
}
