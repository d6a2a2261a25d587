//! Checkpoints of the model as safetensors.
