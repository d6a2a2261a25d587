//! What the device can do at most, measured: copying, 16-bit MMA, and launching.
use crate::timing::Timer;
use cubecl::cmma::MmaDefinition;
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use half::f16;

/// Measured ceilings.
#[derive(Clone, Copy, Debug)]
pub struct Ceilings {
    /// Bytes a second, read plus written, of a copy of 1 GiB.
    pub copy: f64,
    /// FLOP/s of `mma.sync` on f16 with f32 accumulation, operands in registers.
    pub mma: f64,
    /// Microseconds of an empty launch in a full queue.
    pub launch: f64,
}

const COPY_BYTES: usize = 1 << 30;
const MMA_TURNS: u32 = 2048;
const MMA_CUBES: u32 = 132 * 16;

pub fn measure(timer: &Timer) -> Ceilings {
    let client = &timer.client;
    let (from, to) = (client.empty(COPY_BYTES), client.empty(COPY_BYTES));
    // SAFETY (here and below): as many units as there are elements.
    let array = |handle: &cubecl::server::Handle, len| unsafe { ArrayArg::from_raw_parts(handle.clone(), len) };
    let copy = timer.microseconds(|_| unsafe {
        let cubes = CubeCount::Static((COPY_BYTES / 16 / 1024) as u32, 1, 1);
        copy::launch_unchecked::<CudaRuntime>(
            client,
            cubes,
            CubeDim::new_1d(256),
            array(&from, COPY_BYTES / 4),
            array(&to, COPY_BYTES / 4),
        );
    });
    let cell = client.empty(1 << 20);
    let mma = timer.microseconds(|_| unsafe {
        let cubes = CubeCount::Static(MMA_CUBES, 1, 1);
        mma::launch_unchecked::<CudaRuntime>(client, cubes, CubeDim::new_1d(128), array(&cell, 1 << 18), MMA_TURNS);
    });
    let launch = timer.microseconds(|_| unsafe {
        let cubes = CubeCount::Static(132, 1, 1);
        nothing::launch_unchecked::<CudaRuntime>(client, cubes, CubeDim::new_1d(256), array(&cell, 4));
    });
    let flops = f64::from(MMA_CUBES) * 4.0 * f64::from(MMA_TURNS) * 8.0 * 2.0 * 16.0 * 8.0 * 16.0;
    Ceilings {
        copy: 2.0 * COPY_BYTES as f64 / copy * 1e6,
        mma: flops / mma * 1e6,
        launch,
    }
}

/// Four independent 16-byte loads a unit.
#[cube(launch_unchecked)]
fn copy(from: &Array<Vector<u32, Const<4>>>, to: &mut Array<Vector<u32, Const<4>>>) {
    let at = CUBE_POS_X as usize * 1024 + UNIT_POS as usize;
    let mut held = Array::<Vector<u32, Const<4>>>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        held[i] = from[at + i * 256];
    }
    #[unroll]
    for i in 0..4usize {
        to[at + i * 256] = held[i];
    }
}

/// Eight chains of MMAs a warp.
#[cube(launch_unchecked)]
fn mma(cell: &mut Array<f32>, turns: u32) {
    let def = MmaDefinition::<f16, f16, f32>::new(16usize, 8usize, 16usize);
    let start = f16::cast_from(UNIT_POS) * f16::new(0.001);
    let mut left = Array::<Vector<f16, Const<2>>>::new(4usize);
    let mut right = Array::<Vector<f16, Const<2>>>::new(2usize);
    #[unroll]
    for i in 0..4usize {
        left[i] = Vector::new(start);
    }
    right[0] = Vector::new(start);
    right[1] = Vector::new(start);
    let mut sums = Sequence::<Array<Vector<f32, Const<2>>>>::new();
    #[unroll]
    for _ in 0..8usize {
        let mut sum = Array::<Vector<f32, Const<2>>>::new(2usize);
        sum[0] = Vector::zeroed();
        sum[1] = Vector::zeroed();
        sums.push(sum);
    }
    for _ in 0..turns {
        #[unroll]
        for i in 0..8usize {
            let sum = sums.index_mut(i);
            def.execute_inplace(&left, &right, sum);
        }
    }
    let mut total = 0.0f32;
    #[unroll]
    for i in 0..8usize {
        let sum = sums.index(i);
        let a = sum[0usize];
        let b = sum[1usize];
        total += a[0usize] + a[1usize] + b[0usize] + b[1usize];
    }
    cell[UNIT_POS as usize] = total;
}

#[cube(launch_unchecked)]
fn nothing(cell: &mut Array<u32>) {
    if ABSOLUTE_POS == 0xffff_ffffusize {
        cell[0] = 1;
    }
}
