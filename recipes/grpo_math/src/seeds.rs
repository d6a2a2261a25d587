//! Randomness by purpose: every use has a stream of its own, found from the run's seed, its name and its step, so that a
//! resumed run draws what it would have drawn, and a change in one place moves nothing elsewhere.
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// The stream of a purpose at a step.
pub fn stream(seed: u64, purpose: &str, step: u64) -> ChaCha8Rng {
    let mut key = [0u8; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&step.to_le_bytes());
    for (i, byte) in purpose.bytes().enumerate() {
        // Names are longer than what is left of the key: fold them, so that every letter counts.
        let place = 16 + i % 16;
        key[place] = key[place].wrapping_mul(31).wrapping_add(byte);
    }
    ChaCha8Rng::from_seed(key)
}

/// One number of that stream, for what takes a seed.
pub fn seed(seed: u64, purpose: &str, step: u64) -> u64 {
    stream(seed, purpose, step).next_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn purposes_steps_and_seeds_differ() {
        let mut drawn: Vec<u64> = Vec::new();
        for purpose in [
            "rollout",
            "minibatches",
            "warmup problems",
            "training problems",
            "held-out problems",
        ] {
            for step in 0..3 {
                drawn.extend((0..3).map(|run| seed(run, purpose, step)));
            }
        }
        assert_eq!(seed(1, "rollout", 2), seed(1, "rollout", 2));
        let count = drawn.len();
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn.len(), count);
    }
}
