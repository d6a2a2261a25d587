//! Unmodified Burn modules: packing them makes their linear layers, and nothing else, run packed.
mod by_hand;

use burn::{
    module::{Module, ModuleVisitor, Param},
    nn::{
        BiLstmConfig, Embedding, EmbeddingConfig, Linear, LinearConfig, PaddingConfig2d, SwiGlu, SwiGluConfig,
        attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask},
        conv::{Conv2d, Conv2dConfig},
        gru::GruConfig,
        lstm::LstmConfig,
        pool::{MaxPool2d, MaxPool2dConfig},
        transformer::{
            TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder, TransformerEncoderConfig,
            TransformerEncoderInput, TransformerEncoderLayer,
        },
    },
    tensor::{Bool, Int, Tensor, activation, backend::Backend},
};
use burn_nvfp4::{Outcome, PackLinears, Precision, packed_weight};
use by_hand::{B, bits, tensor};

fn pack<M: Module<B>>(model: M) -> M {
    PackLinears::default().precision(Precision::W4A4).pack(model).unwrap().0
}

fn relative_error<const D: usize>(y: &Tensor<B, D>, expected: &Tensor<B, D>) -> f32 {
    let size = |t: Tensor<B, D>| t.powf_scalar(2.0).mean().sqrt().into_scalar();
    size(y.clone() - expected.clone()) / size(expected.clone())
}

/// Packing changed the output, by no more than NVFP4 does.
fn assert_quantized<const D: usize>(y: &Tensor<B, D>, dense: &Tensor<B, D>) {
    let error = relative_error(y, dense);
    assert!(error > 1e-3 && error < 0.35, "relative error {error}");
}

/// Attention as Burn writes it, from float operations, around linear layers computed by hand.
fn attention(mha: &MultiHeadAttention<B>, x: Tensor<B, 3>, mask: Option<Tensor<B, 3, Bool>>) -> Tensor<B, 3> {
    let [batch, seq, d_model] = x.dims();
    let heads = |t: Tensor<B, 3>| t.reshape([batch, seq, mha.n_heads, mha.d_k]).swap_dims(1, 2);
    let query = heads(by_hand::linear(&mha.query, x.clone()));
    let key = heads(by_hand::linear(&mha.key, x.clone()));
    let value = heads(by_hand::linear(&mha.value, x));
    let mut scores = query.matmul(key.transpose()).div_scalar((mha.d_k as f32).sqrt());
    if let Some(mask) = mask {
        scores = scores.mask_fill(mask.reshape([batch, 1, seq, seq]), mha.min_float);
    }
    let context = activation::softmax(scores, 3).matmul(value);
    by_hand::linear(&mha.output, context.swap_dims(1, 2).reshape([batch, seq, d_model]))
}

fn encoder_layer(layer: &TransformerEncoderLayer<B>, x: Tensor<B, 3>) -> Tensor<B, 3> {
    let x = layer.norm_1.forward(x.clone() + attention(&layer.mha, x, None));
    let inner = activation::gelu(by_hand::linear(&layer.pwff.linear_inner, x.clone()));
    layer
        .norm_2
        .forward(x + by_hand::linear(&layer.pwff.linear_outer, inner))
}

#[test]
fn attention_scores_and_softmax_stay_dense() {
    let mha = MultiHeadAttentionConfig::new(64, 4)
        .with_dropout(0.0)
        .init::<B>(&Default::default());
    let x = tensor::<B, 3>(1, [2, 6, 64]);
    let dense = mha.forward(MhaInput::self_attn(x.clone())).context;
    let packed = pack(mha);
    let y = packed.forward(MhaInput::self_attn(x.clone())).context;
    assert_eq!(
        bits(&y),
        bits(&attention(&packed, x.clone(), None)),
        "only the four linears are quantized"
    );
    assert_quantized(&y, &dense);

    let mask = generate_autoregressive_mask::<B>(2, 6, &Default::default());
    let y = packed
        .forward(MhaInput::self_attn(x.clone()).mask_attn(mask.clone()))
        .context;
    assert_eq!(bits(&y), bits(&attention(&packed, x, Some(mask))));
}

#[test]
fn a_transformer_encoder_runs_its_six_linears_a_layer_packed() {
    let config = TransformerEncoderConfig::new(64, 128, 4, 2).with_dropout(0.0);
    let encoder: TransformerEncoder<B> = config.init(&Default::default());
    let x = tensor::<B, 3>(2, [2, 5, 64]);
    let dense = encoder.forward(TransformerEncoderInput::new(x.clone()));
    let (packed, audit) = PackLinears::default().precision(Precision::W4A4).pack(encoder).unwrap();
    assert_eq!((audit.packed(), audit.layers.len()), (12, 12));
    let y = packed.forward(TransformerEncoderInput::new(x.clone()));
    let expected = packed.layers.iter().fold(x.clone(), |x, layer| encoder_layer(layer, x));
    assert_eq!(bits(&y), bits(&expected));
    assert_quantized(&y, &dense);
    // Decoding one position at a time, with Burn's own cache, sees the same linears.
    let mut cache = packed.new_autoregressive_cache();
    let mask = generate_autoregressive_mask::<B>(2, 5, &Default::default());
    let whole = packed.forward(TransformerEncoderInput::new(x.clone()).mask_attn(mask));
    for position in 0..5 {
        let seen = x.clone().slice([0..2, 0..position + 1]);
        let mask = generate_autoregressive_mask::<B>(2, position + 1, &Default::default());
        let input = TransformerEncoderInput::new(seen).mask_attn(mask);
        let step = packed.forward_autoregressive_inference(input, &mut cache);
        let step = step.slice([0..2, position..position + 1]);
        let scored = whole.clone().slice([0..2, position..position + 1]);
        assert!(relative_error(&step, &scored) < 0.05, "position {position}");
    }
}

#[derive(Module, Debug)]
struct Cnn<B: Backend> {
    conv: Conv2d<B>,
    pool: MaxPool2d,
    head: Linear<B>,
}

impl<B: Backend> Cnn<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            conv: Conv2dConfig::new([1, 4], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            head: LinearConfig::new(64, 10).init(device),
        }
    }
    fn features(&self, x: Tensor<B, 4>) -> Tensor<B, 2> {
        self.pool.forward(activation::relu(self.conv.forward(x))).flatten(1, 3)
    }
    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 2> {
        self.head.forward(self.features(x))
    }
}

#[test]
fn a_cnn_keeps_its_convolutions_and_runs_its_head_packed() {
    let cnn = Cnn::<B>::new(&Default::default());
    let x = tensor::<B, 4>(3, [3, 1, 8, 8]);
    let dense = (cnn.features(x.clone()), cnn.forward(x.clone()));
    let packed = pack(cnn);
    assert!(packed_weight(&packed.conv.weight.val()).is_none());
    assert_eq!(
        bits(&packed.features(x.clone())),
        bits(&dense.0),
        "all but the head is as it was"
    );
    let y = packed.forward(x.clone());
    assert_eq!(bits(&y), bits(&by_hand::linear(&packed.head, packed.features(x))));
    assert_quantized(&y, &dense.1);
}

/// Counts the packed parameters of a module.
#[derive(Default)]
struct Packed(Vec<usize>);
impl ModuleVisitor<B> for Packed {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.extend(packed_weight(&param.val()).map(|_| D));
    }
}
fn packed_params<M: Module<B>>(model: &M) -> usize {
    let mut packed = Packed::default();
    model.visit(&mut packed);
    assert!(packed.0.iter().all(|rank| *rank == 2));
    packed.0.len()
}

#[test]
fn recurrent_layers_run_their_gates_packed() {
    let device = Default::default();
    let x = tensor::<B, 3>(4, [2, 5, 32]);

    let lstm = LstmConfig::new(32, 48, true).init::<B>(&device);
    let dense = lstm.forward(x.clone(), None).0;
    let lstm = pack(lstm);
    assert_eq!(packed_params(&lstm), 8);
    assert_quantized(&lstm.forward(x.clone(), None).0, &dense);

    let lstm = BiLstmConfig::new(32, 48, true).init::<B>(&device);
    let dense = lstm.forward(x.clone(), None).0;
    let lstm = pack(lstm);
    assert_eq!(packed_params(&lstm), 16);
    assert_quantized(&lstm.forward(x.clone(), None).0, &dense);

    let gru = GruConfig::new(32, 48, true).init::<B>(&device);
    let dense = gru.forward(x.clone(), None);
    let gru = pack(gru);
    assert_eq!(packed_params(&gru), 6);
    assert_quantized(&gru.forward(x, None), &dense);
}

#[test]
fn swiglu_and_a_decoder_run_packed() {
    let device = Default::default();
    let x = tensor::<B, 3>(5, [2, 5, 32]);
    let swiglu: SwiGlu<B> = SwiGluConfig::new(32, 64).init(&device);
    let dense = swiglu.forward(x.clone());
    let swiglu = pack(swiglu);
    assert_eq!(packed_params(&swiglu), 2);
    assert_quantized(&swiglu.forward(x.clone()), &dense);

    let decoder = TransformerDecoderConfig::new(32, 64, 4, 2)
        .with_dropout(0.0)
        .init::<B>(&device);
    let memory = tensor::<B, 3>(6, [2, 7, 32]);
    let dense = decoder.forward(TransformerDecoderInput::new(x.clone(), memory.clone()));
    let decoder = pack(decoder);
    assert_eq!(packed_params(&decoder), 2 * 10);
    assert_quantized(&decoder.forward(TransformerDecoderInput::new(x, memory)), &dense);
}

#[derive(Module, Debug)]
struct Tagger<B: Backend> {
    embedding: Embedding<B>,
    output: Option<Linear<B>>,
}

#[test]
fn embeddings_stay_dense_and_optional_layers_are_found() {
    let device = Default::default();
    let model = Tagger::<B> {
        embedding: EmbeddingConfig::new(20, 32).init(&device),
        output: Some(LinearConfig::new(32, 20).init(&device)),
    };
    let (model, audit) = PackLinears::default().precision(Precision::W4A4).pack(model).unwrap();
    assert!(packed_weight(&model.embedding.weight.val()).is_none());
    assert_eq!(
        audit.layer("output").map(|layer| layer.outcome.clone()),
        Some(Outcome::Packed(Precision::W4A4))
    );
    let ids = Tensor::<B, 2, Int>::from_ints([[1, 2, 3]], &device);
    let h = model.embedding.forward(ids);
    let output = model.output.as_ref().unwrap();
    assert_eq!(bits(&output.forward(h.clone())), bits(&by_hand::linear(output, h)));
}

#[test]
fn modules_without_linears_are_left_alone() {
    let conv = Conv2dConfig::new([16, 16], [3, 3]).init::<B>(&Default::default());
    let before = bits(&conv.weight.val());
    let (conv, audit) = PackLinears::default().pack(conv).unwrap();
    assert_eq!(bits(&conv.weight.val()), before);
    assert!(audit.layers.is_empty());
}
