//! Every kernel against the host, on the device of the feature that the tests are built with: `vulkan`, or `cuda`.
//!
//! Without a device the tests say so and pass; with `QUADS_REQUIRE_DEVICE=1` they fail instead. The binary needs no file
//! beside itself: carry it to a machine with a GPU and run it there.
#![cfg(any(feature = "vulkan", feature = "cuda"))]
mod bias;
mod cached_attention;
mod dense;
mod fp8;
mod golden;
mod grouped;
mod layers;
mod matmul;
mod pack;
mod quantize;
mod routing;

use cubecl::prelude::*;
use cubecl::server::Handle;
use kernels_cubecl::device::{self, Element, Matrix};

#[cfg(feature = "cuda")]
pub type R = cubecl::cuda::CudaRuntime;
#[cfg(not(feature = "cuda"))]
pub type R = cubecl::wgpu::WgpuRuntime;
pub type Client = ComputeClient<R>;

/// The device, or none with a loud line.
pub fn client() -> Option<Client> {
    #[cfg(feature = "cuda")]
    let client = device::cuda(0);
    #[cfg(not(feature = "cuda"))]
    let client = device::vulkan();
    match client {
        Ok(client) => Some(client),
        Err(error) if std::env::var("QUADS_REQUIRE_DEVICE").is_ok_and(|v| v == "1") => panic!("{error}"),
        Err(error) => {
            eprintln!("SKIPPED, NOTHING WAS TESTED: {error}");
            None
        }
    }
}

/// A fixed sequence of floats.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn bits(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u32
    }

    /// In [0, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1 << 24) as f32
    }

    pub fn normal(&mut self) -> f32 {
        let (a, b) = (self.uniform().max(1e-7), self.uniform());
        (-2.0 * a.ln()).sqrt() * (std::f32::consts::TAU * b).cos()
    }

    /// `[rows, k]`, a few channels large, as activations are.
    pub fn activations(&mut self, rows: usize, k: usize) -> Vec<f32> {
        let gain: Vec<f32> = (0..k)
            .map(|_| if self.bits().is_multiple_of(50) { 40.0 } else { 1.0 })
            .collect();
        (0..rows * k).map(|i| self.normal() * gain[i % k]).collect()
    }

    pub fn weights(&mut self, rows: usize, k: usize) -> Vec<f32> {
        (0..rows * k).map(|_| self.normal() * 0.02).collect()
    }
}

/// Rounds values to what the element type holds.
pub fn round_to(element: Element, values: &[f32]) -> Vec<f32> {
    values
        .iter()
        .map(|v| match element {
            Element::F32 => *v,
            Element::F16 => half::f16::from_f32(*v).to_f32(),
            Element::BF16 => half::bf16::from_f32(*v).to_f32(),
        })
        .collect()
}

/// Bytes of values in an element type.
pub fn to_bytes(element: Element, values: &[f32]) -> Vec<u8> {
    match element {
        Element::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Element::F16 => values
            .iter()
            .flat_map(|v| half::f16::from_f32(*v).to_le_bytes())
            .collect(),
        Element::BF16 => values
            .iter()
            .flat_map(|v| half::bf16::from_f32(*v).to_le_bytes())
            .collect(),
    }
}

/// A row-major matrix on the device.
pub fn upload(client: &Client, element: Element, values: &[f32], rows: usize, columns: usize) -> Matrix {
    let mut bytes = to_bytes(element, values);
    bytes.resize(bytes.len().next_multiple_of(16).max(16), 0);
    Matrix::contiguous(client.create_from_slice(&bytes), element, rows, columns)
}

/// Whole numbers on the device; an empty buffer gets some words, since some runtimes have none.
pub fn upload_i32(client: &Client, values: &[i32]) -> Handle {
    let mut words = values.to_vec();
    words.resize(words.len().max(4), 0);
    client.create_from_slice(i32::as_bytes(&words))
}

/// The values of a matrix.
pub fn download(client: &Client, y: &Matrix) -> Vec<f32> {
    let bytes = client.read_one(y.handle.clone()).unwrap();
    let bytes = &bytes[..y.rows * y.columns * y.element.size()];
    match y.element {
        Element::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        Element::F16 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|b| half::f16::from_le_bytes(*b).to_f32())
            .collect(),
        Element::BF16 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|b| half::bf16::from_le_bytes(*b).to_f32())
            .collect(),
    }
}
