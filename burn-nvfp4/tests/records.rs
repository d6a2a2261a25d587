//! Packed models in Burn's records.
mod by_hand;

use burn::backend::{Autodiff, Flex};
use burn::{
    module::{AutodiffModule, Module},
    nn::{Linear, LinearConfig, LinearLayout},
    record::{
        BinBytesRecorder, BinFileRecorder, BinGzFileRecorder, FileRecorder, FullPrecisionSettings,
        HalfPrecisionSettings, NamedMpkBytesRecorder, NamedMpkFileRecorder, NamedMpkGzFileRecorder, PrecisionSettings,
        PrettyJsonFileRecorder, Recorder,
    },
    tensor::{DType, Tensor, TensorData, backend::Backend},
};
use burn_nvfp4::{
    Nvfp4, PackLinears, PackedWeight, Precision, Rac, ResidualMask, Selection, WeightFormat, pack, packed_weight,
};
use by_hand::{B, bits, tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};

#[derive(Module, Debug)]
struct Net<B: Backend> {
    hidden: Linear<B>,
    output: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new() -> Self {
        let device = Default::default();
        // Burn initializes parameters when they are read, and clones of one that was not differ: `no_grad` reads all.
        Self {
            hidden: LinearConfig::new(128, 256).init(&device),
            output: LinearConfig::new(256, 20).init(&device),
        }
        .no_grad()
    }
    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.output.forward(self.hidden.forward(x))
    }
}

fn calibrated() -> Precision {
    Precision::W4A4Rac(Rac {
        selection: Selection::Calibrated,
        ..Default::default()
    })
}
fn mask(d_in: usize) -> ResidualMask {
    ResidualMask::from_channels(&(0..d_in).map(|c| c % 3 == 0).collect::<Vec<_>>())
}
fn packed(precision: Precision) -> Net<B> {
    let packer = PackLinears::default().precision(precision).except(["output"]);
    packer.residual_mask("hidden", mask(128)).pack(Net::new()).unwrap().0
}
fn weight(net: &Net<B>) -> PackedWeight<Flex> {
    packed_weight(&net.hidden.weight.val()).expect("the layer is packed")
}
fn assert_same(a: &PackedWeight<Flex>, b: &PackedWeight<Flex>) {
    assert_eq!(
        (
            a.format(),
            a.shape(),
            a.activation(),
            a.codes(),
            a.block_scales(),
            a.outer_scales()
        ),
        (
            b.format(),
            b.shape(),
            b.activation(),
            b.codes(),
            b.block_scales(),
            b.outer_scales()
        )
    );
}

/// Saved, loaded into a fresh model and into a packed one, saved again.
fn file_round_trip<R: FileRecorder<B>>(name: &str, recorder: R, precise: bool) {
    let folder = std::env::temp_dir().join(format!("burn-nvfp4-records-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let device = Default::default();
    for precision in [Precision::W4A16, Precision::W4A4, calibrated(), Precision::Fp8] {
        let net = packed(precision.clone());
        net.clone().save_file(folder.join("net"), &recorder).unwrap();
        let fresh = Net::<B>::new()
            .load_file(folder.join("net"), &recorder, &device)
            .unwrap();
        assert_same(&weight(&fresh), &weight(&net));
        assert!(packed_weight(&fresh.output.weight.val()).is_none());
        let x = tensor::<B, 2>(1, [3, 128]);
        if precise {
            assert_eq!(
                bits(&fresh.forward(x.clone())),
                bits(&net.forward(x)),
                "{name}, {precision}"
            );
        }
        let again = packed(Precision::W4A4)
            .load_file(folder.join("net"), &recorder, &device)
            .unwrap();
        assert_same(&weight(&again), &weight(&net));
        fresh.save_file(folder.join("second"), &recorder).unwrap();
        let second = Net::<B>::new()
            .load_file(folder.join("second"), &recorder, &device)
            .unwrap();
        assert_same(&weight(&second), &weight(&net));
    }
    std::fs::remove_dir_all(folder).unwrap();
}

fn all_recorders<S: PrecisionSettings + 'static>(name: &str, precise: bool) {
    file_round_trip(&format!("{name}-bin"), BinFileRecorder::<S>::new(), precise);
    file_round_trip(&format!("{name}-bin-gz"), BinGzFileRecorder::<S>::new(), precise);
    file_round_trip(&format!("{name}-mpk"), NamedMpkFileRecorder::<S>::new(), precise);
    file_round_trip(&format!("{name}-mpk-gz"), NamedMpkGzFileRecorder::<S>::new(), precise);
    file_round_trip(&format!("{name}-json"), PrettyJsonFileRecorder::<S>::new(), precise);
}

#[test]
fn every_file_recorder_keeps_packed_weights_packed_and_bit_equal() {
    all_recorders::<FullPrecisionSettings>("full", true);
    // The dense layer is rounded, the packed one is not.
    all_recorders::<HalfPrecisionSettings>("half", false);
}

#[test]
fn byte_recorders_too() {
    let device = Default::default();
    let net = packed(calibrated());
    let bin = BinBytesRecorder::<FullPrecisionSettings>::default();
    let bytes: Vec<u8> = Recorder::<B>::record(&bin, net.clone().into_record(), ()).unwrap();
    assert_same(
        &weight(&Net::<B>::new().load_record(bin.load(bytes, &device).unwrap())),
        &weight(&net),
    );
    let mpk = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
    let bytes: Vec<u8> = Recorder::<B>::record(&mpk, net.clone().into_record(), ()).unwrap();
    assert_same(
        &weight(&Net::<B>::new().load_record(mpk.load(bytes, &device).unwrap())),
        &weight(&net),
    );
}

#[test]
fn memory_and_file_take_four_and_a_half_bits_a_weight() {
    let (d_in, d_out) = (512, 384);
    let layer = LinearConfig::new(d_in, d_out)
        .with_bias(false)
        .init::<B>(&Default::default());
    let (layer, audit) = PackLinears::default().precision(Precision::W4A4).pack(layer).unwrap();
    let bits_a_weight = |bytes: usize| 8.0 * bytes as f64 / (d_in * d_out) as f64;
    let memory = packed_weight(&layer.weight.val()).unwrap().bytes();
    assert_eq!(memory, d_in * d_out / 2 + d_in * d_out / 16 + 4);
    assert_eq!((audit.bytes_before(), audit.bytes_after()), (4 * d_in * d_out, memory));
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let file: Vec<u8> = Recorder::<B>::record(&recorder, layer.clone().into_record(), ()).unwrap();
    assert!(bits_a_weight(file.len()) < 4.52, "{}", bits_a_weight(file.len()));
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
    let file: Vec<u8> = Recorder::<B>::record(&recorder, layer.into_record(), ()).unwrap();
    assert!(bits_a_weight(file.len()) < 4.52, "{}", bits_a_weight(file.len()));
}

#[test]
fn column_layout_and_stacks_come_back_as_they_were() {
    let device = Default::default();
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let config = LinearConfig::new(32, 48).with_layout(LinearLayout::Col);
    let layer = PackLinears::default()
        .precision(Precision::W4A4)
        .pack(config.init::<B>(&device))
        .unwrap()
        .0;
    let bytes: Vec<u8> = Recorder::<B>::record(&recorder, layer.clone().into_record(), ()).unwrap();
    let x = tensor::<B, 2>(2, [3, 32]);
    for start in [config.init::<B>(&device), layer.clone()] {
        let back = start.load_record(recorder.load(bytes.clone(), &device).unwrap());
        assert_eq!(back.weight.dims(), [32, 48]);
        assert_eq!(bits(&back.forward(x.clone())), bits(&layer.forward(x.clone())));
    }

    let stack = pack(tensor::<B, 3>(3, [3, 32, 10]), &Precision::W4A4, None, None).unwrap();
    let back = Tensor::<B, 3>::from_data(stack.clone().into_data(), &device);
    assert_same(&packed_weight(&back).unwrap(), &packed_weight(&stack).unwrap());
    let view = stack.unsqueeze::<4>().swap_dims(2, 3);
    let back = Tensor::<B, 4>::from_data(view.clone().into_data(), &device);
    assert_eq!(back.dims(), [1, 3, 10, 32]);
    assert_same(&packed_weight(&back).unwrap(), &packed_weight(&view).unwrap());
}

#[test]
fn mapping_again_makes_a_loaded_or_moved_model_whole() {
    let device = Default::default();
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let again = |net: Net<B>| {
        PackLinears::default()
            .precision(Precision::W4A4)
            .except(["output"])
            .pack(net)
            .unwrap()
            .0
    };
    let net = packed(Precision::W4A4);
    let bytes: Vec<u8> = Recorder::<B>::record(&recorder, net.clone().into_record(), ()).unwrap();
    // A fresh model holds what it loads as a quantized tensor, which `Autodiff` cannot use.
    let loaded = again(Net::<B>::new().load_record(recorder.load(bytes, &device).unwrap()));
    let frozen: Net<Autodiff<B>> = loaded.train();
    let x = tensor::<B, 2>(4, [3, 128]);
    assert_eq!(
        bits(&frozen.forward(Tensor::from_inner(x.clone()))),
        bits(&net.forward(x))
    );
    // `valid` forgets how parameters are saved.
    let moved = again(frozen.valid());
    let bytes: Vec<u8> = Recorder::<B>::record(&recorder, moved.into_record(), ()).unwrap();
    let back = Net::<B>::new().load_record(recorder.load(bytes, &device).unwrap());
    assert_same(&weight(&back), &weight(&net));
}

#[test]
fn a_dense_record_loads_into_a_packed_model_as_dense() {
    let device = Default::default();
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let dense = Net::<B>::new();
    let bytes: Vec<u8> = Recorder::<B>::record(&recorder, dense.clone().into_record(), ()).unwrap();
    let loaded = packed(Precision::W4A4).load_record(recorder.load(bytes, &device).unwrap());
    assert!(packed_weight(&loaded.hidden.weight.val()).is_none());
    assert_eq!(bits(&loaded.hidden.weight.val()), bits(&dense.hidden.weight.val()));
}

#[test]
fn values_and_record_data_are_different_things() {
    let net = packed(Precision::W4A4);
    let values = net.hidden.weight.val().into_data();
    assert_eq!((values.dtype, values.shape.to_vec()), (DType::F32, vec![128, 256]));
    let packed = pack(net.hidden.weight.val(), &Precision::W4A4, None, None).unwrap();
    let data = packed.clone().into_data();
    assert_eq!(
        (data.dtype, data.shape.to_vec()),
        (DType::QFloat(WeightFormat::Nvfp4.scheme()), vec![128, 256])
    );
    assert_eq!(packed.dequantize().into_data(), values);
}

/// The panic of loading these bytes.
fn load_error(data: TensorData) -> String {
    let panic = catch_unwind(AssertUnwindSafe(|| {
        Tensor::<Nvfp4<Flex>, 2>::from_data(data, &Default::default())
    }));
    let panic = panic.expect_err("damaged data must not load");
    panic.downcast_ref::<String>().expect("a message").clone()
}

#[test]
fn damaged_data_says_what_was_expected() {
    let weight = pack(tensor::<B, 2>(5, [32, 10]), &Precision::W4A4, None, None).unwrap();
    let good = weight.into_data();
    let changed = |at: usize, byte: u8| {
        let mut bytes = good.bytes.to_vec();
        bytes[at] = byte;
        TensorData::from_bytes_vec(bytes, good.shape.clone(), good.dtype)
    };
    let cut = |len: usize| {
        let bytes = good.bytes.iter().copied().chain([0; 8]).take(len).collect();
        TensorData::from_bytes_vec(bytes, good.shape.clone(), good.dtype)
    };
    let length = good.bytes.len();
    assert_eq!(length, 44 + 160 + 20 + 4);
    let error = load_error(cut(length - 1));
    assert!(
        error.contains("outer scales: expected 4 bytes at offset 224, but the data ends at 227"),
        "{error}"
    );
    let error = load_error(cut(100));
    assert!(
        error.contains("codes: expected 160 bytes at offset 44, but the data ends at 100"),
        "{error}"
    );
    assert!(
        load_error(cut(3)).contains("magic: expected 7 bytes"),
        "{}",
        load_error(cut(3))
    );
    assert!(load_error(cut(length + 2)).contains("expected 228 bytes, got 230"));
    assert!(load_error(changed(0, b'X')).contains("magic: expected"));
    assert!(load_error(changed(7, 9)).contains("version: expected 1, got 9"));
    assert!(load_error(changed(8, 1)).contains("scheme: expected that of fp8"));
    assert!(load_error(changed(11, 77)).contains("activation: expected 0 to 5, got 77"));
    assert!(load_error(changed(28, 17)).contains("d_in: expected a multiple of 16, got 17"));
    // A size that would ask for more memory than there is: refused before anything is allocated.
    assert!(
        load_error(changed(43, 0x7f)).contains("shape: expected an addressable size"),
        "{}",
        load_error(changed(43, 0x7f))
    );
    let transposed = TensorData::from_bytes_vec(good.bytes.to_vec(), [10, 32], good.dtype);
    assert!(load_error(transposed).contains("shape: expected [32, 10], from the header"));
    // No byte of the header can be changed without notice or a valid weight of the same shape.
    for at in 0..44 {
        for bit in 0..8 {
            let data = changed(at, good.bytes[at] ^ (1 << bit));
            if let Ok(weight) = catch_unwind(AssertUnwindSafe(|| {
                Tensor::<B, 2>::from_data(data, &Default::default())
            })) {
                assert_eq!(weight.dims(), [32, 10]);
                assert_eq!(weight.dequantize().to_data().shape.to_vec(), [32, 10]);
            }
        }
    }
}
