//! The NVFP4 backend for Burn.
