//! Log-probabilities of given tokens, in chunks.
