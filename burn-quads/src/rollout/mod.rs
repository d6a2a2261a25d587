//! Sampling from a packed model: continuous batching over a pre-allocated KV cache.
