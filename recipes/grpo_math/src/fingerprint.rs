//! A short name for many bytes: what decides a run's course, and what a file of a checkpoint held.
use std::fmt;

/// FNV-1a, 64 bits: finds mistakes, and what disks and interrupted copies do; not what an adversary would.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(u64);

impl Default for Fingerprint {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fingerprint {
    /// Of these bytes alone.
    pub fn of(bytes: &[u8]) -> Self {
        let mut fingerprint = Self::default();
        fingerprint.add(bytes);
        fingerprint
    }

    /// Adds bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// Sixteen hexadecimal digits.
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}
