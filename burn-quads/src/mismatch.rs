//! How far trainer and rollout differ.
