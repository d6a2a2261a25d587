//! Times every kernel on the CUDA device and compares it with ceilings measured in the same run.
//!
//! ```text
//! python3 kernels-cubecl/benches/peers.py > peers.json      # cuBLAS BF16 and cuBLASLt FP8, timed alike
//! cargo bench -p kernels-cubecl --features cuda --bench kernel_bench -- --peers peers.json --out DIRECTORY
//! ```
//!
//! Prints a table; writes `kernels.json` and `roofline.svg` to the directory. Matmuls on GPUs without FP4 tensor cores are
//! emulated: operands are decoded to 16 bits in registers.
mod ceilings;
mod report;
mod timing;
mod workload;

use kernels_cubecl::device;
use report::Report;
use std::path::PathBuf;

fn main() {
    let (mut out, mut peers) = (None, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--out" => out = arguments.next().map(PathBuf::from),
            "--peers" => peers = arguments.next().map(PathBuf::from),
            // Cargo passes this to every benchmark.
            "--bench" => {}
            other => panic!("unknown argument {other}; there are --out DIRECTORY and --peers FILE"),
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
    workload::quantization(&timer, &mut report);
    workload::decode(&timer, &mut report);
    workload::tiled(&timer, &mut report);
    workload::grouped(&timer, &mut report);
    workload::fp8(&timer, &mut report);
    report.print();
    if let Some(out) = out {
        report.write(&out);
    }
}
