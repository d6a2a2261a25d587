//! An unmodified `nn::Linear` on `Nvfp4<Cuda>` against the same layer on `Cuda`, host overhead included.
//!
//! ```text
//! cargo bench -p burn-nvfp4 --features cuda --bench linear_cuda [-- --out FILE]
//! ```
//!
//! `--size N` (4096) and `--rows N` (16) change the layer, `--launches N` (200) and `--repeats N` (9) the measurement.
//!
//! All contestants run in one process. One measurement is the host's time for so many forward passes on one input, one after
//! the other, and one wait for the device at the end, divided by their number: what a program sees. *Host* is the time
//! until the last pass was handed over, before that wait. Contestants take turns, in an order that rotates; the figures
//! are medians of the repeats. `--out` writes them as JSON.
//!
//! On GPUs without FP4 tensor cores the products are emulated: operands are decoded to 16 bits in registers.
use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    tensor::{DType, Distribution, Tensor, backend::Backend},
};
use burn_cubecl::CubeBackend;
use burn_fusion::Fusion;
use burn_nvfp4::{Nvfp4, Nvfp4Backend, PackLinears, Precision};
use kernels_cubecl::device;
use std::{collections::BTreeMap, path::PathBuf, time::Instant};

type Plain = CubeBackend<cubecl::cuda::CudaRuntime, f32, i32, u8>;
type Fused = Fusion<Plain>;

/// What is measured, from the command line.
struct Options {
    size: usize,
    rows: usize,
    launches: usize,
    repeats: usize,
    out: Option<PathBuf>,
}

impl Options {
    fn from_arguments() -> Self {
        let mut options = Self {
            size: 4096,
            rows: 16,
            launches: 200,
            repeats: 9,
            out: None,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().unwrap_or_else(|| panic!("{argument} takes a value"));
            let number = |text: String| -> usize {
                let number = text.parse().ok().filter(|n| *n > 0);
                number.unwrap_or_else(|| panic!("{argument} takes a number above 0, not {text}"))
            };
            match argument.as_str() {
                "--size" => options.size = number(value()),
                "--rows" => options.rows = number(value()),
                "--launches" => options.launches = number(value()),
                "--repeats" => options.repeats = number(value()),
                "--out" => options.out = Some(value().into()),
                // Cargo passes this to every benchmark.
                "--bench" => {}
                other => {
                    panic!("unknown argument {other}; there are --size, --rows, --launches, --repeats and --out")
                }
            }
        }
        options
    }
}

/// Microseconds of a forward pass.
#[derive(Clone, Copy)]
struct Sample {
    /// Handing it over.
    host: f64,
    /// All of it.
    total: f64,
}

/// A layer ready to run.
struct Contestant {
    name: String,
    dtype: DType,
    run: Box<dyn Fn(usize) -> Sample>,
}

/// A layer of Burn on B with a bias, its parameters in `dtype`.
fn linear<B: Backend>(size: usize, dtype: DType) -> Linear<B> {
    let layer = LinearConfig::new(size, size).init::<B>(&Default::default());
    Linear {
        weight: layer.weight.map(|weight| weight.cast(dtype)),
        bias: layer.bias.map(|bias| bias.map(|bias| bias.cast(dtype))),
    }
}

/// The layer as it is.
fn dense<B: Backend>(name: &str, options: &Options, dtype: DType) -> Contestant {
    contestant(name.into(), options, dtype, linear::<B>(options.size, dtype))
}

/// The layer, packed by [`PackLinears`].
fn packed<B: Nvfp4Backend>(name: &str, options: &Options, dtype: DType, precision: &str) -> Contestant {
    let precision: Precision = precision.parse().expect("a precision");
    let layer = linear::<Nvfp4<B>>(options.size, DType::F32);
    let layer = layer.map(&mut PackLinears::default().precision(precision.clone()));
    // The bias has the type of the activations, as it would in a model of that type.
    let layer = Linear {
        bias: layer.bias.map(|bias| bias.map(|bias| bias.cast(dtype))),
        ..layer
    };
    contestant(format!("{name}, {precision}"), options, dtype, layer)
}

fn contestant<B: Backend>(name: String, options: &Options, dtype: DType, layer: Linear<B>) -> Contestant {
    let device = Default::default();
    let x = Tensor::<B, 2>::random([options.rows, options.size], Distribution::Normal(0.0, 1.0), &device);
    let x = x.cast(dtype);
    let run = move |passes: usize| {
        B::sync(&device).expect("the device answers");
        let start = Instant::now();
        let mut last = None;
        for _ in 0..passes {
            last = Some(layer.forward(x.clone()));
        }
        let host = start.elapsed();
        B::sync(&device).expect("the device answers");
        let total = start.elapsed();
        drop(last);
        let each = 1e6 / passes as f64;
        Sample {
            host: host.as_secs_f64() * each,
            total: total.as_secs_f64() * each,
        }
    };
    Contestant {
        name,
        dtype,
        run: Box::new(run),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let options = Options::from_arguments();
    if let Err(error) = device::cuda(0) {
        return eprintln!("SKIPPED: {error}");
    }
    let mut contestants = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        contestants.push(dense::<Fused>("Cuda", &options, dtype));
        contestants.push(dense::<Plain>("Cuda without Fusion", &options, dtype));
        for precision in ["w4a4", "w4a4_rac"] {
            contestants.push(packed::<Fused>("Nvfp4<Cuda>", &options, dtype, precision));
            contestants.push(packed::<Plain>(
                "Nvfp4<Cuda> without Fusion",
                &options,
                dtype,
                precision,
            ));
        }
    }
    for contestant in &contestants {
        // Compiles kernels and chooses among them.
        let start = Instant::now();
        (contestant.run)(20);
        let (name, dtype) = (&contestant.name, contestant.dtype);
        eprintln!("{name}, {dtype:?}: ready after {:.1} s", start.elapsed().as_secs_f64());
    }
    let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); contestants.len()];
    for repeat in 0..options.repeats {
        for turn in 0..contestants.len() {
            let at = (turn + repeat) % contestants.len();
            samples[at].push((contestants[at].run)(options.launches));
        }
    }

    let Options { size, rows, .. } = options;
    println!(
        "nn::Linear {size} x {size} with bias, {rows} rows; {} passes, median of {} repeats, microseconds a pass",
        options.launches, options.repeats
    );
    println!(
        "{:44} {:5} {:>8} {:>8} {:>12}",
        "backend", "type", "host", "total", "of Cuda bf16"
    );
    let times: Vec<Sample> = samples
        .iter()
        .map(|samples| Sample {
            host: median(samples.iter().map(|s| s.host).collect()),
            total: median(samples.iter().map(|s| s.total).collect()),
        })
        .collect();
    // The opponent: the faster of the two.
    let opponent = contestants
        .iter()
        .zip(&times)
        .filter(|(c, _)| c.dtype == DType::BF16 && c.name.starts_with("Cuda"))
        .map(|(_, time)| time.total)
        .fold(f64::INFINITY, f64::min);
    let mut rows_of_json = Vec::new();
    for (contestant, time) in contestants.iter().zip(&times) {
        let dtype = format!("{:?}", contestant.dtype).to_lowercase();
        let ratio = time.total / opponent;
        println!(
            "{:44} {dtype:5} {:8.1} {:8.1} {ratio:12.2}",
            contestant.name, time.host, time.total
        );
        rows_of_json.push(serde_json::json!({
            "backend": contestant.name,
            "dtype": dtype,
            "host_us": time.host,
            "total_us": time.total,
            "of_cuda_bf16": ratio,
        }));
    }
    if let Some(out) = options.out {
        let report = BTreeMap::from([
            ("size", serde_json::json!(size)),
            ("rows", serde_json::json!(rows)),
            ("passes", serde_json::json!(options.launches)),
            ("repeats", serde_json::json!(options.repeats)),
            ("results", serde_json::Value::Array(rows_of_json)),
        ]);
        let text = serde_json::to_string_pretty(&report).expect("JSON");
        std::fs::write(&out, text).unwrap_or_else(|error| panic!("{}: {error}", out.display()));
    }
}
