//! Rotary position embedding, rotate-half form.
