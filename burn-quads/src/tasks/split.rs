//! Which problems train, which stop the warm-up, and which are for evaluation alone.
use std::fmt;

/// A part of a task's problems. A problem belongs to one part for ever: the part is a hash of its canonical form, not
/// of the order in which problems were drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// Seen by the warm-up and by GRPO (six eighths).
    Train,
    /// Stops the warm-up (one eighth).
    Validation,
    /// Evaluation only (one eighth).
    HeldOut,
}

impl Split {
    /// The part of a problem of `task` with this canonical form.
    pub fn of(task: &str, canonical: &str) -> Self {
        // FNV-1a with a finalizer: fixed here, because the split of a problem must not change with a library's version.
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        for byte in task.bytes().chain([0]).chain(canonical.bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        hash ^= hash >> 32;
        hash = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        match hash >> 61 {
            0 => Split::HeldOut,
            1 => Split::Validation,
            _ => Split::Train,
        }
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Split::Train => "training",
            Split::Validation => "validation",
            Split::HeldOut => "held-out",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_split_of_a_problem_never_changes() {
        let splits: String = (0..24)
            .map(|i| match Split::of("addition", &format!("{i:03}+500")) {
                Split::Train => 't',
                Split::Validation => 'v',
                Split::HeldOut => 'h',
            })
            .collect();
        assert_eq!(splits, "tttvtvtvhtttttttthttttth");
    }

    #[test]
    fn one_eighth_each_is_validation_and_held_out() {
        let mut counts = [0usize; 3];
        for a in 0..200 {
            for b in 0..200 {
                counts[Split::of("addition", &format!("{a:03}+{b:03}")) as usize] += 1;
            }
        }
        for (count, expected) in counts.into_iter().zip([30_000usize, 5_000, 5_000]) {
            assert!(count.abs_diff(expected) < 300, "{counts:?}");
        }
    }
}
