//! Models of Burn, unmodified.
use crate::support::{Stack, assert_close, data, tensor, values};
use burn::{
    backend::Flex,
    module::Module,
    nn::{
        Initializer,
        attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig},
    },
    tensor::{Tensor, backend::Backend},
};
use burn_nvfp4::{Nvfp4, PackLinears, PackableBackend, Precision, packed_weight};

fn attention<B: Backend>() -> MultiHeadAttention<B> {
    struct Fill(u32);
    impl<B: Backend> burn::module::ModuleMapper<B> for Fill {
        fn map_float<const D: usize>(
            &mut self,
            param: burn::module::Param<Tensor<B, D>>,
        ) -> burn::module::Param<Tensor<B, D>> {
            self.0 += 1;
            param.map(|tensor_| tensor::<B, D>(&data(self.0, tensor_.dims())) * 0.2)
        }
    }
    MultiHeadAttentionConfig::new(48, 4)
        .with_dropout(0.0)
        .with_initializer(Initializer::Zeros)
        .init::<B>(&Default::default())
        .map(&mut Fill(40))
}

fn forward<B: PackableBackend>(precision: &Precision) -> Vec<f32> {
    let layer = attention::<B>();
    let (layer, audit) = PackLinears::default().precision(precision.clone()).pack(layer).unwrap();
    assert_eq!(audit.packed(), 4);
    assert!(packed_weight(&B::to_nvfp4(layer.query.weight.val())).is_some());
    let x = tensor::<B, 3>(&data(60, [2, 7, 48]));
    values(layer.forward(MhaInput::self_attn(x)).context)
}

pub fn an_unmodified_attention_layer_runs_packed<B: Stack>() {
    for precision in ["w4a16", "w4a4", "w4a4_rac", "fp8"] {
        let precision: Precision = precision.parse().unwrap();
        let (a, b) = (forward::<Nvfp4<B>>(&precision), forward::<Nvfp4<Flex>>(&precision));
        // A last-bit difference upstream can flip a code: a quarter of a step of an activation.
        let difference: f32 = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).sum::<f32>() / a.len() as f32;
        assert!(difference < 2e-3, "{precision}: mean difference {difference}");
        if precision == Precision::W4A16 {
            assert_close(
                &a,
                &b,
                if std::any::type_name::<B>().contains("Cuda") {
                    4e-3
                } else {
                    1e-5
                },
                "w4a16",
            );
        }
    }
}
