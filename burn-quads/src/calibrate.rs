//! Calibration of residual masks.
