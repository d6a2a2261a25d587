//! Time of one launch out of a queue that is already full.
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::server::Handle;
use std::time::{Duration, Instant};

pub type Client = ComputeClient<CudaRuntime>;

/// Launches of the longer and of the shorter queue.
const LONG: usize = 250;
const SHORT: usize = 50;

pub struct Timer {
    pub client: Client,
    cell: Handle,
    /// Seconds that one turn of the spin kernel takes.
    turn: f64,
}

impl Timer {
    pub fn new(client: &Client) -> Self {
        let client = client.clone();
        let cell = client.create_from_slice(u32::as_bytes(&[1, 2, 3, 4]));
        let mut timer = Self {
            client,
            cell,
            turn: 1e-8,
        };
        timer.spin_for(1e-3);
        timer.sync();
        let start = Instant::now();
        timer.spin(4_000_000);
        timer.sync();
        timer.turn = start.elapsed().as_secs_f64() / 4e6;
        timer
    }

    pub fn sync(&self) {
        self.client.flush().expect("launches are valid");
        cubecl::future::block_on(self.client.sync()).expect("kernels ran");
    }

    fn spin_for(&self, seconds: f64) {
        self.spin((seconds / self.turn) as u32);
    }

    fn spin(&self, turns: u32) {
        // SAFETY: one unit, one cell.
        unsafe {
            let cell = ArrayArg::from_raw_parts(self.cell.clone(), 4);
            spin::launch_unchecked::<CudaRuntime>(
                &self.client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(1),
                cell,
                turns,
            );
        }
    }

    /// Microseconds of a call: `(t(250) − t(50)) / 200`, both queued behind a kernel that spins for as long as the host
    /// takes to enqueue them; the median of seven. `call` gets a running number, to rotate its operands by.
    pub fn microseconds(&self, mut call: impl FnMut(usize)) -> f64 {
        let mut number = 0;
        let mut run = |count: usize, spin: f64| {
            self.sync();
            let start = Instant::now();
            self.spin_for(spin);
            for _ in 0..count {
                call(number);
                number += 1;
            }
            self.sync();
            start.elapsed()
        };
        // Compiles the kernels, then shows how long the host takes.
        run(SHORT, 0.0);
        let host = run(LONG, 0.0).as_secs_f64();
        let spin = 1.5 * host + 1e-3;
        let mut differences: Vec<Duration> = (0..7)
            .map(|_| {
                let short = run(SHORT, spin);
                run(LONG, spin).saturating_sub(short)
            })
            .collect();
        differences.sort();
        differences[3].as_secs_f64() * 1e6 / (LONG - SHORT) as f64
    }
}

/// Keeps the device busy while the host fills the queue.
#[cube(launch_unchecked)]
fn spin(cell: &mut Array<u32>, turns: u32) {
    let mut state = cell[0];
    for _ in 0..turns {
        state = state * 1_664_525u32 + 1_013_904_223u32;
    }
    cell[0] = state;
}
