//! Trainer weights to rollout weights.
