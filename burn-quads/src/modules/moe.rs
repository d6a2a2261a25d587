//! The mixture-of-experts language model.
