//! The arms of the comparison: which precision learns, which one samples, and what else differs. Everything that is not
//! in this table is the same for all of them.

/// One arm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arm {
    /// What it is called in tables: `A`, `E+`, …
    pub letter: &'static str,
    /// The same as the name of a folder.
    pub folder: &'static str,
    /// `trainer.precision`
    pub trainer: &'static str,
    /// `rollout.precision`
    pub rollout: &'static str,
    /// Further settings of `grpo_math`.
    pub settings: &'static [(&'static str, &'static str)],
    /// What it shows, in a sentence.
    pub about: &'static str,
}

/// The paper's rule: one fixed half of the channels of each layer.
const HALF: &[(&str, &str)] = &[
    ("rac.selection", "calibrated"),
    ("rac.granularity", "channel"),
    ("rac.fraction", "0.5"),
];

/// All arms, in the order of every table.
pub const ARMS: [Arm; 11] = [
    Arm {
        letter: "A",
        folder: "A",
        trainer: "high",
        rollout: "high",
        settings: &[],
        about: "full precision on both sides: the floor of the gap",
    },
    Arm {
        letter: "B",
        folder: "B",
        trainer: "high",
        rollout: "w4a4",
        settings: &[],
        about: "naive: a full-precision trainer fed by 4-bit rollouts",
    },
    Arm {
        letter: "C",
        folder: "C",
        trainer: "high",
        rollout: "fp8",
        settings: &[],
        about: "FP8 rollouts, the paper's baseline",
    },
    Arm {
        letter: "D",
        folder: "D",
        trainer: "w4a16",
        rollout: "w4a4",
        settings: &[],
        about: "asymmetric QAT without compensation",
    },
    Arm {
        letter: "E",
        folder: "E",
        trainer: "w4a16",
        rollout: "w4a4_rac",
        settings: HALF,
        about: "QUADS as published: asymmetric QAT, half of the channels compensated",
    },
    Arm {
        letter: "E+",
        folder: "E_plus",
        trainer: "w4a16",
        rollout: "w4a4_rac",
        settings: &[("rac.selection", "all")],
        about: "QUADS with every channel compensated, which stacked decoding affords",
    },
    Arm {
        letter: "F",
        folder: "F",
        trainer: "w4a4",
        rollout: "w4a4",
        settings: &[("trainer.backward", "unquantized")],
        about: "symmetric QAT, its backward pass on unquantized activations and weights",
    },
    Arm {
        letter: "F'",
        folder: "F_prime",
        trainer: "w4a4",
        rollout: "w4a4",
        settings: &[("trainer.backward", "quantized")],
        about: "symmetric QAT, its backward pass on what the forward pass saw: the strongest symmetric baseline",
    },
    Arm {
        letter: "G",
        folder: "G",
        trainer: "high",
        rollout: "w4a4",
        settings: &[("grpo.correction", "tis")],
        about: "naive with truncated importance sampling (C = 2): correction instead of alignment",
    },
    Arm {
        letter: "H",
        folder: "H",
        trainer: "high",
        rollout: "w4a4_rac",
        settings: HALF,
        about: "compensation without QAT",
    },
    Arm {
        letter: "I",
        folder: "I",
        trainer: "high",
        rollout: "w4a4",
        settings: &[("rollout.routing_replay", "true")],
        about: "naive with routing replay: isolates the router",
    },
];

impl Arm {
    /// The arm of a letter; `e+` and `F_prime` do too.
    pub fn find(name: &str) -> Option<&'static Self> {
        let named = |arm: &&Self| arm.letter.eq_ignore_ascii_case(name) || arm.folder.eq_ignore_ascii_case(name);
        ARMS.iter().find(named)
    }

    /// All letters, for error messages.
    pub fn letters() -> String {
        ARMS.map(|arm| arm.letter).join(", ")
    }

    /// Its settings, precisions included.
    pub fn settings(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let precisions = [("trainer.precision", self.trainer), ("rollout.precision", self.rollout)];
        precisions.into_iter().chain(self.settings.iter().copied())
    }

    /// Its place in the table.
    pub fn index(&self) -> usize {
        let place = ARMS.iter().position(|arm| arm.letter == self.letter);
        place.expect("an arm of the table")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn letters_and_folders_are_different_and_safe_in_paths() {
        let folders: BTreeSet<_> = ARMS.iter().map(|arm| arm.folder.to_lowercase()).collect();
        assert_eq!(folders.len(), ARMS.len());
        for arm in &ARMS {
            assert!(arm.folder.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'));
            assert_eq!(Arm::find(arm.letter), Some(arm));
            assert_eq!(Arm::find(&arm.folder.to_lowercase()), Some(arm));
        }
        assert_eq!(Arm::find("Z"), None);
    }
}
