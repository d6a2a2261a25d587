//! When work is split over threads. Results never depend on it.
use super::dispatch::{Kernel, dispatch};
use rayon::prelude::*;

/// Multiply-adds below which waking a second thread costs more than it saves (some twenty microseconds).
const WORTH_A_THREAD: usize = 1 << 20;

/// Into how many pieces work of so many multiply-adds is split.
pub(super) fn pieces(multiply_adds: usize) -> usize {
    match multiply_adds / WORTH_A_THREAD {
        0 | 1 => 1, // without asking: that would start the thread pool
        pieces => pieces.min(rayon::current_num_threads()),
    }
}

/// Runs kernels: on all threads when the work is worth several pieces, else one after the other.
pub(super) fn run<K: Kernel<Output = ()> + Send>(pieces: usize, kernels: impl Iterator<Item = K>) {
    if pieces <= 1 {
        kernels.for_each(dispatch);
    } else {
        kernels.collect::<Vec<K>>().into_par_iter().for_each(dispatch);
    }
}
