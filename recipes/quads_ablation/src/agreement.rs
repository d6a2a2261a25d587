//! Whether a run repeats results that are kept: the short run in the continuous integration against the committed one.
use crate::results::{Results, Seed, Series, Side};

/// What may differ between machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tolerance {
    /// Of a share of right answers, absolute.
    pub share: f64,
    /// Of a mean gap, relative to the kept one.
    pub gap: f64,
    /// Gaps that are smaller on both sides are rounding, and are not compared.
    pub rounding: f64,
}

/// What differs by more, in words; nothing where the run repeats the kept results. Curves, times and machines are not compared.
pub fn disagreements(kept: &Results, found: &Results, tolerance: &Tolerance) -> Vec<String> {
    let mut all = Vec::new();
    let names = |results: &Results| {
        results
            .series
            .iter()
            .map(|series| series.name.clone())
            .collect::<Vec<_>>()
    };
    if names(kept) != names(found) {
        all.push(format!("series {:?}, where {:?} are kept", names(found), names(kept)));
        return all;
    }
    for (kept, found) in kept.series.iter().zip(&found.series) {
        all.extend(of_series(kept, found, tolerance));
    }
    all
}

/// A number that is none is near to another such alone.
fn near(one: f64, other: f64, distance: f64) -> bool {
    (one - other).abs() <= distance || (one.is_nan() && other.is_nan())
}

fn of_series(kept: &Series, found: &Series, tolerance: &Tolerance) -> Vec<String> {
    let runs = |series: &Series| -> Vec<(u64, String)> {
        let of_seed = |seed: &Seed| {
            let number = seed.seed;
            seed.arms
                .iter()
                .map(move |arm| (number, arm.arm.clone()))
                .collect::<Vec<_>>()
        };
        series.seeds.iter().flat_map(of_seed).collect()
    };
    let name = &kept.name;
    let mut all = Vec::new();
    if kept.settings != found.settings {
        all.push(format!("{name}: other settings than those of the kept results"));
    }
    if runs(kept) != runs(found) {
        all.push(format!(
            "{name}: seeds and arms {:?}, where {:?} are kept",
            runs(found),
            runs(kept)
        ));
        return all;
    }
    for (kept, found) in kept.seeds.iter().zip(&found.seeds) {
        let place = format!("{name}, seed {}", kept.seed);
        for (kept, found) in kept.arms.iter().zip(&found.arms) {
            for (when, kept_at, found_at) in [("start", &kept.start, &found.start), ("end", &kept.end, &found.end)] {
                for side in Side::ALL {
                    let [was, is] = [kept_at, found_at].map(|evaluation| evaluation.side(side).share());
                    if !near(was, is, tolerance.share) {
                        let side = side.name();
                        all.push(format!(
                            "{place}, arm {}: {when}, {side}: {is:.4}, kept {was:.4}",
                            kept.arm
                        ));
                    }
                }
            }
            if kept.collapse.is_some() != found.collapse.is_some() {
                all.push(format!(
                    "{place}, arm {}: collapse {:?}, kept {:?}",
                    kept.arm, found.collapse, kept.collapse
                ));
            }
        }
        for gap in &kept.gaps {
            let Some(is) = found.gap(&gap.arm).map(|gap| gap.mean) else {
                all.push(format!("{place}: no gap of arm {}", gap.arm));
                continue;
            };
            let small = gap.mean.abs() <= tolerance.rounding && is.abs() <= tolerance.rounding;
            if !small && !near(gap.mean, is, tolerance.gap * gap.mean.abs()) {
                all.push(format!(
                    "{place}, arm {}: mean gap {is:.4e}, kept {:.4e}",
                    gap.arm, gap.mean
                ));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    const TOLERANCE: Tolerance = Tolerance {
        share: 0.02,
        gap: 0.02,
        rounding: 1e-5,
    };

    #[test]
    fn the_same_agrees_and_each_difference_is_named() {
        let kept = Results {
            series: vec![synthetic::series("quick", &synthetic::ARMS, [2, 6, 100])],
            ..synthetic::results()
        };
        assert!(disagreements(&kept, &kept, &TOLERANCE).is_empty());
        let read = Results::from_json(&kept.to_json()).unwrap();
        assert!(
            disagreements(&read, &kept, &TOLERANCE).is_empty(),
            "digits of the file do not matter"
        );
        let differing = |change: fn(&mut Series), expected: &str| {
            let mut found = kept.clone();
            change(&mut found.series[0]);
            let all = disagreements(&kept, &found, &TOLERANCE).join("\n");
            assert!(all.contains(expected), "{all}\nwithout {expected}");
        };
        differing(
            |series| series.name = "calm".into(),
            "series [\"calm\"], where [\"quick\"] are kept",
        );
        differing(|series| series.settings.clear(), "quick: other settings");
        differing(|series| series.seeds[0].arms.truncate(3), "quick: seeds and arms");
        differing(
            |series| series.seeds[1].arms[4].end.high.0.fill(false),
            "quick, seed 2, arm E: end, high: 0.0000, kept",
        );
        differing(
            |series| series.seeds[0].gaps[1].mean *= 1.03,
            "quick, seed 1, arm B: mean gap",
        );
        differing(
            |series| series.seeds[0].gaps[1].mean = f64::NAN,
            "quick, seed 1, arm B: mean gap NaN",
        );
        differing(
            |series| series.seeds[0].gaps.truncate(1),
            "quick, seed 1: no gap of arm B",
        );
        differing(
            |series| series.seeds[0].gaps[0].mean = 1e-3,
            "quick, seed 1, arm A: mean gap",
        );
        differing(
            |series| series.seeds[1].arms[1].collapse = None,
            "quick, seed 2, arm B: collapse None",
        );
        // Within what machines may differ.
        let mut found = kept.clone();
        found.series[0].seeds[0].gaps[1].mean *= 1.01;
        found.series[0].seeds[0].gaps[0].mean *= 9.0;
        found.series[0].seeds[0].arms[0].wall_s = 1.0;
        assert!(disagreements(&kept, &found, &TOLERANCE).is_empty());
    }
}
