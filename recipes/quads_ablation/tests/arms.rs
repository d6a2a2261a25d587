//! The table of arms, read back from the settings that `grpo_math` makes of it.
use burn_nvfp4::{Precision, Rac};
use burn_quads::{Backward, grpo::CorrectionMode};
use grpo_math::config::Config;
use kernels_cubecl::{Granularity, Selection};
use quads_ablation::{
    arms::ARMS,
    gaps::of_arm,
    series::{DECLARED, Declaration},
};

fn rac(selection: Selection) -> Precision {
    Precision::W4A4Rac(Rac {
        selection,
        granularity: Granularity::Channel,
        fraction: 0.5,
    })
}

#[test]
fn every_arm_is_what_the_table_says() {
    use Precision::{Fp8, High, W4A4, W4A16};
    let (half, all) = (rac(Selection::Calibrated), rac(Selection::All));
    let table = [
        ("A", High, High),
        ("B", High, W4A4),
        ("C", High, Fp8),
        ("D", W4A16, W4A4),
        ("E", W4A16, half.clone()),
        ("E+", W4A16, all),
        ("F", W4A4, W4A4),
        ("F'", W4A4, W4A4),
        ("G", High, W4A4),
        ("H", High, half),
        ("I", High, W4A4),
    ];
    assert_eq!(ARMS.map(|arm| arm.letter), table.clone().map(|row| row.0));
    for (arm, (letter, trainer, rollout)) in ARMS.iter().zip(table) {
        let config = Config::load(None, &of_arm(&[], arm)).unwrap();
        assert_eq!(config.learner.precision, trainer, "{letter}");
        assert_eq!(config.rollout.precision, rollout, "{letter}");
        let backward = if letter == "F" {
            Backward::Unquantized
        } else {
            Backward::Quantized
        };
        assert_eq!(config.learner.backward, backward, "{letter}");
        let correction = config.learner.grpo.correction;
        let mode = if letter == "G" {
            CorrectionMode::Tis
        } else {
            CorrectionMode::None
        };
        assert_eq!(correction.mode, mode, "{letter}");
        if letter == "G" {
            assert_eq!(correction.bounds(), (0.0, 2.0));
        }
        assert_eq!(config.rollout.routing_replay, letter == "I", "{letter}");
        assert_eq!(config.learner.grpo.routing_replay, letter == "I", "{letter}");
    }
}

#[test]
fn arms_of_a_series_differ_in_the_table_alone() {
    let declaration = Declaration::read(DECLARED, false).unwrap();
    for series in &declaration.series {
        for arm in &series.arms {
            let mut layers = grpo_math::config::Layers::of_user(None, &of_arm(&series.assignments(), arm)).unwrap();
            let config = Config::read(&mut layers).unwrap();
            let plain = Config::load(None, &series.assignments()).unwrap();
            let of_arm: Vec<_> = arm.settings().map(|(key, _)| key).collect();
            let differing = config.toml.lines().zip(plain.toml.lines()).filter(|(a, b)| a != b);
            for (line, _) in differing {
                let name = line.split(' ').next().unwrap();
                assert!(
                    of_arm.iter().any(|key| key.ends_with(&format!(".{name}"))),
                    "{} {}: {line}",
                    series.name,
                    arm.letter
                );
            }
        }
    }
}

#[test]
fn the_declaration_is_what_the_comparison_asks_for() {
    let declaration = Declaration::read(DECLARED, false).unwrap();
    let series = |name: &str| declaration.series.iter().find(|series| series.name == name).unwrap();
    for series in declaration.series.iter().filter(|series| series.group() != "sweep") {
        assert!(series.seeds.len() >= 5, "{}", series.name);
        assert!(
            series.final_problems >= 1024 && series.gap_completions >= 512,
            "{}",
            series.name
        );
    }
    for name in ["calm", "stress", "hard", "outliers", "stale"] {
        assert_eq!(series(name).arms.len(), ARMS.len(), "{name}");
    }
    // There the ratio of arm G's correction would be 1.
    assert_eq!(series("rollout_old").arms.len(), ARMS.len() - 1);
    assert_eq!(declaration.series[0].name, "calm", "the plain series are shown first");
    assert_eq!(declaration.series[1].name, "stress");
    let config = |name: &str| Config::load(None, &series(name).assignments()).unwrap();
    for (name, rate, steps) in [("calm", 3e-4, 150), ("stress", 1e-3, 250)] {
        let learner = config(name).learner;
        assert_eq!(
            (learner.grpo.optimizer.schedule.learning_rate, learner.steps),
            (rate, steps)
        );
    }
    let hard = config("hard");
    assert!(hard.learner.grpo.minibatches >= 8);
    assert!((32..=128).contains(&hard.rollout.max_new_tokens));
    assert!(hard.model.shape().num_hidden_layers > config("calm").model.shape().num_hidden_layers);
    assert_eq!(series("hard").choice.as_ref().unwrap().arm.letter, "A");
    let widths = ["calm", "scaling-128", "scaling-256"].map(|name| config(name).model.shape().hidden_size);
    assert_eq!(widths, [64, 128, 256]);
}

#[test]
fn a_declaration_that_cannot_be_run_is_refused_by_name() {
    let common = "[common]\nseeds = [1]\nfinal_problems = 64\ngap_completions = 64\n[common.settings]\n";
    let quick = "[quick]\nname = \"quick\"\nabout = \"\"\nbase = \"one\"\n";
    let refused = |series: &str, expected: &str| {
        let text = format!("{common}[[series]]\nname = \"one\"\nabout = \"\"\n{series}\n{quick}");
        let error = format!("{:#}", Declaration::read(&text, false).unwrap_err());
        assert!(error.contains(expected), "{error}\nwithout {expected}");
    };
    refused(
        "settings = { \"grpo.step\" = 3 }",
        "the series one (series.toml): arm A: unknown setting grpo.step",
    );
    refused(
        "settings = { \"rollout.precision\" = \"fp8\" }",
        "rollout.precision is what the arms differ in",
    );
    refused(
        "settings = { \"run.seed\" = 3 }",
        "run.seed follows from seed, arm and --out",
    );
    refused("arms = [\"Z\"]", "arm Z: expected one of A, B, C");
    refused(
        "base = \"two\"",
        "base = \"two\": expected a series that comes before it",
    );
    refused("seeds = [1, 1]", "each is to be given once");
    refused("colour = 1", "unknown field `colour`");
    let choose = "[series.choose]\nkey = \"trainer.learning_rate\"\ngrid = [1e-3]\narm = \"A\"\nseeds = [1]";
    refused(
        choose,
        "] choose trainer.learning_rate: expected other seeds for the arms",
    );
}
