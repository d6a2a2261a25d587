//! Which layers `PackLinears` packs, what it says about them, and what it refuses.
mod by_hand;

use burn::{
    module::Module,
    nn::{Embedding, EmbeddingConfig, Linear, LinearConfig},
    tensor::{Tensor, backend::Backend},
};
use burn_nvfp4::{Activation, Outcome, PackError, PackLinears, Precision, Rac, Selection, packed_weight};
use by_hand::{B, bits, tensor, values};
use std::panic::{AssertUnwindSafe, catch_unwind};

#[derive(Module, Debug)]
struct Attention<B: Backend> {
    query: Linear<B>,
    key: Linear<B>,
    output: Linear<B>,
}

#[derive(Module, Debug)]
struct Model<B: Backend> {
    embedding: Embedding<B>,
    layers: Vec<Attention<B>>,
    output: Linear<B>,
}

impl<B: Backend> Model<B> {
    fn new(width: usize) -> Self {
        let device = Default::default();
        let linear = |out| LinearConfig::new(width, out).init(&device);
        let attention = || Attention {
            query: linear(width),
            key: linear(width),
            output: linear(width),
        };
        // Initialized: clones of a parameter that nobody has read yet differ.
        Self {
            embedding: EmbeddingConfig::new(100, width).init(&device),
            layers: vec![attention(), attention()],
            output: linear(100),
        }
        .no_grad()
    }
}

fn is_packed(layer: &Linear<B>) -> bool {
    packed_weight(&layer.weight.val()).is_some()
}

#[test]
fn exceptions_are_exact_paths() {
    let packer = PackLinears::default()
        .precision(Precision::W4A4)
        .except(["output", "layers.1.query"]);
    let (model, audit) = packer.pack(Model::<B>::new(32)).unwrap();
    assert!(!is_packed(&model.output) && !is_packed(&model.layers[1].query));
    assert!(
        is_packed(&model.layers[0].output),
        "`output` excepts the layer of that path, not every `output`"
    );
    assert!(is_packed(&model.layers[0].query) && is_packed(&model.layers[1].output));
    let paths: Vec<&str> = audit.layers.iter().map(|layer| layer.path.as_str()).collect();
    let expected = [
        "layers.0.query",
        "layers.0.key",
        "layers.0.output",
        "layers.1.query",
        "layers.1.key",
        "layers.1.output",
        "output",
    ];
    assert_eq!(paths, expected);
    assert_eq!(
        audit.layer("output").unwrap().outcome,
        Outcome::Left("excepted".to_string())
    );
    assert_eq!(
        audit.layer("layers.0.key").unwrap().outcome,
        Outcome::Packed(Precision::W4A4)
    );
    assert_eq!(audit.likely_head().unwrap().path, "output");
    assert_eq!((audit.bytes_before(), audit.packed()), (4 * 32 * (6 * 32 + 100), 5));
    assert_eq!(audit.bytes_after(), 5 * (32 * 32 * 9 / 16 + 4) + 4 * 32 * (32 + 100));
}

#[test]
fn the_audit_prints_a_table() {
    let packer = PackLinears::default().precision(Precision::W4A4).except(["output"]);
    let audit = packer.pack(Model::<B>::new(32)).unwrap().1;
    let table = audit.to_string();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 9);
    let head = "output                [32, 100]  dense      12.8 KB  12.8 KB  excepted; widest output: a likely head";
    let expected = [
        (0, "layer                 shape      precision   before    after"),
        (1, "layers.0.query        [32, 32]   w4a4        4096 B    580 B"),
        (7, head),
        (8, "6 of 7 layers packed                        37.4 KB  16.3 KB"),
    ];
    for (at, line) in expected {
        assert_eq!(lines[at], line);
    }
}

#[test]
fn a_path_that_names_no_layer_is_an_error_with_near_ones() {
    let error = |paths: &[&str]| {
        let packer = PackLinears::default().except(paths.iter().copied());
        packer.pack(Model::<B>::new(32)).unwrap_err().to_string()
    };
    let message = error(&["outptu"]);
    assert_eq!(
        message,
        "PackLinears::except: the model has no linear layer `outptu`; did you mean `output`?"
    );
    let message = error(&["layers.1"]);
    for layer in ["layers.1.query", "layers.1.key", "layers.1.output"] {
        assert!(message.contains(layer), "a module that is no linear layer: {message}");
    }
    assert!(error(&["query"]).contains("`layers.0.query`"), "{}", error(&["query"]));
    assert!(error(&["output.weight"]).contains("`output`"));
    assert_eq!(
        error(&["entirely different"]),
        "PackLinears::except: the model has no linear layer `entirely different`"
    );
    let error = PackLinears::default()
        .share(["layers.0.query", "layers.0.kez"])
        .pack(Model::<B>::new(32))
        .unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("PackLinears::share: the model has no linear layer `layers.0.kez`"),
        "{error}"
    );
}

#[test]
fn a_sharing_group_has_one_outer_scale() {
    let mut model = Model::<B>::new(32);
    model.layers[0].key.weight = model.layers[0].key.weight.clone().map(|w| w * 3.0);
    let amax = |layer: &Linear<B>| values(&layer.weight.val().abs().max())[0];
    let (query, key) = (amax(&model.layers[0].query), amax(&model.layers[0].key));
    assert!(key > query);
    let packer = PackLinears::default()
        .precision(Precision::W4A16)
        .share(["layers.0.query", "layers.0.key"])
        .share(["layers.1.key", "layers.1.query"]);
    let (packed, _) = packer.pack(model.clone()).unwrap();
    let scale = |layer: &Linear<B>| packed_weight(&layer.weight.val()).unwrap().outer_scales();
    assert_eq!(scale(&packed.layers[0].query), [1.0 / (2688.0 / key)]);
    assert_eq!(scale(&packed.layers[0].key), [1.0 / (2688.0 / key)]);
    assert_eq!(scale(&packed.layers[1].query), scale(&packed.layers[1].key));
    assert_eq!(
        scale(&packed.layers[0].output),
        [1.0 / (2688.0 / amax(&model.layers[0].output))]
    );

    // Burn's two passes do the same.
    let mut packer = PackLinears::default()
        .precision(Precision::W4A16)
        .share(["layers.0.query", "layers.0.key"]);
    model.visit(&mut packer);
    let mapped = model.map(&mut packer);
    assert_eq!(scale(&mapped.layers[0].query), scale(&packed.layers[0].query));
    packer.finish().unwrap();
}

#[test]
fn contradictory_groups_are_refused() {
    let error = |packer: PackLinears| packer.pack(Model::<B>::new(32)).unwrap_err().to_string();
    let twice = PackLinears::default()
        .share(["output", "layers.0.key"])
        .share(["layers.0.key", "layers.1.key"]);
    assert_eq!(error(twice), "PackLinears::share: layer `layers.0.key` is named twice");
    let excepted = PackLinears::default()
        .share(["layers.0.query", "layers.0.key"])
        .except(["layers.0.key"]);
    assert_eq!(
        error(excepted),
        "PackLinears::share: layer `layers.0.key` is excepted, so it has no scale to share"
    );
}

#[test]
fn d_in_that_blocks_do_not_cover_is_an_error_unless_left() {
    let error = PackLinears::default().pack(Model::<B>::new(20)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "layer `layers.0.query`: d_in = 20 is not a multiple of 16, the NVFP4 block"
    );
    let (model, audit) = PackLinears::default()
        .leave_unpackable()
        .pack(Model::<B>::new(20))
        .unwrap();
    assert!(!is_packed(&model.output));
    let reason = "d_in = 20 is not a multiple of 16, the NVFP4 block".to_string();
    assert_eq!((audit.packed(), &audit.layers[6].outcome), (0, &Outcome::Left(reason)));
    assert_eq!(audit.bytes_before(), audit.bytes_after());
    // FP8 has no blocks.
    assert_eq!(
        PackLinears::default()
            .precision(Precision::Fp8)
            .pack(Model::<B>::new(20))
            .unwrap()
            .1
            .packed(),
        7
    );
}

#[test]
fn a_weight_that_is_not_finite_is_an_error_that_names_it() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut model = Model::<B>::new(32);
        let value = Tensor::full([1, 1], bad, &Default::default());
        model.layers[1].key.weight = model.layers[1]
            .key
            .weight
            .clone()
            .map(|w| w.slice_assign([5..6, 7..8], value.clone()));
        let expected =
            format!("layer `layers.1.key`: non-finite value {bad} at [0, 5, 7] ([group, d_in, d_out]) of the weight");
        assert_eq!(
            PackLinears::default().pack(model.clone()).unwrap_err().to_string(),
            expected
        );
        // In a group it is still that layer's error.
        let packer = PackLinears::default().share(["layers.1.query", "layers.1.key"]);
        let error = packer.pack(model).unwrap_err().to_string();
        assert!(error.contains("`layers.1.key`: non-finite"), "{error}");
    }
}

#[test]
fn calibrated_compensation_asks_for_masks() {
    let precision = Precision::W4A4Rac(Rac {
        selection: Selection::Calibrated,
        ..Default::default()
    });
    let error = PackLinears::default()
        .precision(precision)
        .pack(Model::<B>::new(32))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "layer `layers.0.query`: calibrated residual compensation needs a residual mask, and none was given"
    );
}

#[test]
fn packing_again_changes_the_setting_and_keeps_the_codes() {
    let pack = |precision: Precision, model| PackLinears::default().precision(precision).pack(model);
    let (once, _) = pack(Precision::W4A4, Model::<B>::new(32)).unwrap();
    let (twice, audit) = pack(Precision::W4A16, once.clone()).unwrap();
    let [first, second] = [&once, &twice].map(|model| packed_weight(&model.output.weight.val()).unwrap());
    assert_eq!(
        (first.codes(), first.activation()),
        (second.codes(), &Activation::Nvfp4)
    );
    assert_eq!(*second.activation(), Activation::Full);
    assert_eq!((audit.packed(), audit.bytes_before()), (7, audit.bytes_after()));
    let error = pack(Precision::Fp8, twice).unwrap_err();
    assert_eq!(
        error.to_string(),
        "layer `layers.0.query`: the weight is already packed as nvfp4 and cannot become fp8; pack the dense model instead"
    );
}

#[test]
fn high_precision_packs_nothing() {
    let model = Model::<B>::new(32);
    let (left, audit) = PackLinears::default()
        .precision(Precision::High)
        .pack(model.clone())
        .unwrap();
    assert_eq!(audit.packed(), 0);
    assert_eq!(bits(&left.output.weight.val()), bits(&model.output.weight.val()));
}

#[test]
fn as_a_mapper_in_one_line() {
    let model = Model::<B>::new(32).map(&mut PackLinears::default().except(["output"]));
    assert!(is_packed(&model.layers[0].query) && !is_packed(&model.output));
    let mut packer = PackLinears::default();
    let model = Model::<B>::new(32).map(&mut packer);
    assert_eq!(packer.audit().packed(), 7);
    assert_eq!(packer.finish().unwrap().packed(), 7);
    // Mapped by something else afterwards, packed weights behave as floats.
    struct Double;
    impl burn::module::ModuleMapper<B> for Double {
        fn map_float<const D: usize>(
            &mut self,
            param: burn::module::Param<Tensor<B, D>>,
        ) -> burn::module::Param<Tensor<B, D>> {
            param.map(|tensor| tensor * 2.0)
        }
    }
    let before = values(&model.output.weight.val());
    let doubled = model.map(&mut Double);
    let expected: Vec<f32> = before.iter().map(|value| 2.0 * value).collect();
    assert_eq!(values(&doubled.output.weight.val()), expected);
}

fn panic_of<T>(f: impl FnOnce() -> T) -> String {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(_) => panic!("expected a panic"),
        Err(payload) => match payload.downcast_ref::<&str>() {
            Some(message) => message.to_string(),
            None => payload.downcast_ref::<String>().expect("a message").clone(),
        },
    }
}

#[test]
fn as_a_mapper_errors_are_panics_with_the_same_words() {
    let message = panic_of(|| Model::<B>::new(32).map(&mut PackLinears::default().except(["outptu"])));
    assert_eq!(
        message,
        "PackLinears::except: the model has no linear layer `outptu`; did you mean `output`?"
    );
    let message = panic_of(|| Model::<B>::new(20).map(&mut PackLinears::default()));
    assert_eq!(
        message,
        "layer `layers.0.query`: d_in = 20 is not a multiple of 16, the NVFP4 block"
    );
    let share = || PackLinears::default().share(["layers.0.query", "layers.0.key"]);
    let message = panic_of(|| Model::<B>::new(32).map(&mut share()));
    assert!(
        message.contains("use PackLinears::pack(model), or model.visit(&mut packer) before"),
        "{message}"
    );
    // Asked for, the error is a value.
    let mut packer = PackLinears::default().except(["outptu"]);
    let _ = Model::<B>::new(32).map(&mut packer);
    assert!(matches!(packer.finish(), Err(PackError::UnknownPath { .. })));
    // Never used, there is nothing to report.
    drop(PackLinears::default().except(["outptu"]));
}

#[test]
fn the_model_may_be_a_linear_layer_itself() {
    let layer = LinearConfig::new(32, 8).init::<B>(&Default::default());
    let (layer, audit) = PackLinears::default().precision(Precision::W4A4).pack(layer).unwrap();
    assert!(is_packed(&layer));
    assert!(audit.to_string().contains("(the model)"));
    let x = tensor::<B, 2>(1, [2, 32]);
    assert_eq!(bits(&layer.forward(x.clone())), bits(&by_hand::linear(&layer, x)));
    let left = PackLinears::default()
        .except([""])
        .pack(LinearConfig::new(32, 8).init::<B>(&Default::default()))
        .unwrap();
    assert!(!is_packed(&left.0));
}
