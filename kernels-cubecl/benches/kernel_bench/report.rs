//! A table, a JSON file and a roofline plot.
use crate::ceilings::Ceilings;
use plotters::prelude::*;
use serde_json::{Value, json};
use std::path::Path;

/// One timed kernel.
pub struct Line {
    pub kernel: String,
    pub tokens: usize,
    /// Rows of the weight; 0 where there is none.
    pub rows: usize,
    pub k: usize,
    pub us: f64,
    /// Fewest bytes that must move.
    pub bytes: f64,
    /// Operations of the matmul.
    pub flops: f64,
}

pub struct Report {
    ceilings: Ceilings,
    peers: Option<Value>,
    lines: Vec<Line>,
}

impl Report {
    pub fn new(ceilings: Ceilings, peers: Option<Value>) -> Self {
        let Ceilings { copy, mma, launch } = ceilings;
        println!(
            "copy {:.2} TB/s, f16 mma.sync {:.0} TFLOP/s, empty launch {launch:.2} us",
            copy / 1e12,
            mma / 1e12
        );
        Self {
            ceilings,
            peers,
            lines: Vec::new(),
        }
    }

    pub fn push(&mut self, line: Line) {
        self.lines.push(line);
    }

    /// Microseconds of a peer on the same shape. FP8 below 16 rows is padded to 16.
    fn peer(&self, kind: &str, line: &Line) -> Option<f64> {
        let peers = self.peers.as_ref()?[kind].as_array()?;
        let tokens = if kind == "fp8" {
            line.tokens.max(16)
        } else {
            line.tokens
        };
        let same = |p: &&Value| {
            [("tokens", tokens), ("rows", line.rows), ("k", line.k)]
                .iter()
                .all(|(key, n)| p[key].as_u64() == Some(*n as u64))
        };
        peers.iter().find(same)?["us"].as_f64()
    }

    pub fn print(&self) {
        println!("| kernel | shape | us | TB/s | of copy | TFLOP/s | of MMA | cuBLAS BF16 | cuBLASLt FP8 |");
        println!("|---|---|---|---|---|---|---|---|---|");
        for line in &self.lines {
            let shape = match line.rows {
                0 => format!("{} x {}", line.tokens, line.k),
                rows => format!("{} x {rows} x {}", line.tokens, line.k),
            };
            let ratio = |kind| {
                let matmul = line.rows > 0 && !line.kernel.starts_with("grouped");
                let us = matmul.then(|| self.peer(kind, line)).flatten();
                us.map_or(String::new(), |us| format!("{us:.1} us, {:.2} x", us / line.us))
            };
            let (bandwidth, rate) = (line.bytes / line.us * 1e6, line.flops / line.us * 1e6);
            println!(
                "| {} | {shape} | {:.2} | {:.2} | {:.0} % | {:.1} | {:.0} % | {} | {} |",
                line.kernel,
                line.us,
                bandwidth / 1e12,
                100.0 * bandwidth / self.ceilings.copy,
                rate / 1e12,
                100.0 * rate / self.ceilings.mma,
                ratio("bf16"),
                ratio("fp8"),
            );
        }
    }

    pub fn write(&self, directory: &Path) {
        let show = |e: &dyn std::fmt::Display| panic!("{}: {e}", directory.display());
        std::fs::create_dir_all(directory).unwrap_or_else(|e| show(&e));
        let lines: Vec<Value> = self
            .lines
            .iter()
            .map(|l| {
                json!({
                    "kernel": l.kernel, "tokens": l.tokens, "rows": l.rows, "k": l.k, "us": l.us, "bytes": l.bytes,
                    "flops": l.flops, "of_copy": l.bytes / l.us * 1e6 / self.ceilings.copy,
                    "of_mma": l.flops / l.us * 1e6 / self.ceilings.mma,
                })
            })
            .collect();
        let Ceilings { copy, mma, launch } = self.ceilings;
        let all = json!({
            "copy_bytes_per_s": copy, "mma_flops": mma, "launch_us": launch, "kernels": lines, "peers": self.peers,
        });
        std::fs::write(directory.join("kernels.json"), format!("{all:#}\n")).unwrap_or_else(|e| show(&e));
        self.roofline(&directory.join("roofline.svg"))
            .unwrap_or_else(|e| show(&*e));
    }

    /// Matmuls over their arithmetic intensity, under the measured ceilings.
    fn roofline(&self, path: &Path) -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::new(path, (900, 560)).into_drawing_area();
        root.fill(&WHITE)?;
        let (left, right) = (1.0, 10_000.0f64);
        let mut chart = ChartBuilder::on(&root)
            .caption("Roofline, ceilings measured in the same run", ("sans-serif", 18))
            .margin(14)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d((left..right).log_scale(), (1.0..1000.0f64).log_scale())?;
        chart
            .configure_mesh()
            .x_desc("FLOP per byte")
            .y_desc("TFLOP/s")
            .draw()?;
        let Ceilings { copy, mma, .. } = self.ceilings;
        let roof = |x: f64| (x * copy / 1e12).min(mma / 1e12);
        let xs = (0..=200).map(|i| left * (right / left).powf(f64::from(i) / 200.0));
        chart.draw_series(LineSeries::new(xs.map(|x| (x, roof(x))), &BLACK))?;
        for (style, name, residual) in [(&BLUE, "plain", false), (&RED, "with the residual pass", true)] {
            let points = self
                .lines
                .iter()
                .filter(|l| l.flops > 0.0 && !l.kernel.starts_with("quantize") && l.kernel.contains("RAC") == residual);
            let dots = points.map(|l| Circle::new((l.flops / l.bytes, l.flops / l.us / 1e6), 4, style.filled()));
            chart
                .draw_series(dots)?
                .label(name)
                .legend(move |(x, y)| Circle::new((x + 8, y), 4, style.filled()));
        }
        chart.configure_series_labels().border_style(BLACK).draw()?;
        root.present()?;
        Ok(())
    }
}
