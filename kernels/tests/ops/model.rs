//! The emulator does what the tables of the hardware say.

use moefold_emulator::at_hand;
use moefold_kernels::cuda::Architecture;
use moefold_kernels::cuda::model::{Words, cases};
use moefold_kernels::{Dtype, catch};

#[test]
fn the_emulator_does_what_the_tables_say() {
    for architecture in [Architecture::SM80, Architecture::SM90] {
        let device = moefold_emulator::device(architecture, Dtype::Bf16, 1);
        let Some(device) = at_hand(device) else {
            return;
        };
        for case in cases(architecture) {
            let words = catch(|| case.run(&device));
            let Words { got, want } = words.unwrap_or_else(|e| panic!("{}: {e}", case.name));
            assert_eq!(got.len(), want.len(), "{}", case.name);
            let wrong = got.iter().zip(&want).position(|(got, want)| got != want);
            if let Some(at) = wrong {
                let (got, want) = (got[at], want[at]);
                panic!("{}: word {at} is {got:#x}, expected {want:#x}", case.name);
            }
        }
    }
}
