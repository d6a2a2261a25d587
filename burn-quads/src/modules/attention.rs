//! Grouped-query attention with rotary positions and QK-norm.
