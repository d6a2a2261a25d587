//! Problems with a verifiable answer, and their rewards.
