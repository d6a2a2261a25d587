//! Times every kernel on the CUDA device and compares it with ceilings measured in the same run.
//!
//! ```text
//! python3 kernels-cubecl/benches/peers.py > peers.json      # cuBLAS BF16 and cuBLASLt FP8, timed alike
//! cargo bench -p kernels-cubecl --features cuda --bench kernel_bench -- --peers peers.json --out DIRECTORY
//! ```
//!
//! `--only` with one of quantization, decode, tiled, grouped, experts, fp8 times that part. Prints a table; writes `kernels.json` and `roofline.svg` to the directory. Matmuls on GPUs without FP4 tensor cores are
//! emulated: operands are decoded to 16 bits in registers.
mod ceilings;
mod report;
mod timing;
mod workload;

use kernels_cubecl::device;
use report::Report;
use std::path::PathBuf;

type Part = fn(&timing::Timer, &mut Report);

fn main() {
    let (mut out, mut peers, mut only) = (None, None, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--out" => out = arguments.next().map(PathBuf::from),
            "--peers" => peers = arguments.next().map(PathBuf::from),
            "--only" => only = arguments.next(),
            // Cargo passes this to every benchmark.
            "--bench" => {}
            other => panic!("unknown argument {other}; there are --out DIRECTORY, --peers FILE and --only PART"),
        }
    }
    let client = match device::cuda(0) {
        Ok(client) => client,
        Err(error) => return eprintln!("SKIPPED: {error}"),
    };
    let peers = peers.map(|path| {
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    });
    let timer = timing::Timer::new(&client);
    let ceilings = ceilings::measure(&timer);
    let mut report = Report::new(ceilings, peers);
    let parts: [(&str, Part); 6] = [
        ("quantization", workload::quantization),
        ("decode", workload::decode),
        ("tiled", workload::tiled),
        ("grouped", workload::grouped),
        ("experts", workload::experts),
        ("fp8", workload::fp8),
    ];
    for (_, part) in parts
        .iter()
        .filter(|(name, _)| only.as_ref().is_none_or(|only| only == name))
    {
        part(&timer, &mut report);
    }
    report.print();
    if let Some(out) = out {
        report.write(&out);
    }
}
