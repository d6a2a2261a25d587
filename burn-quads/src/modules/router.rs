//! The router: f32 softmax over all experts, then top-k.
