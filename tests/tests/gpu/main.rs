//! Burn's GPU backends under `Nvfp4`, with Fusion and without, against Flex.
//!
//! Runs on the backends of the features that it is built with: `vulkan`, `cuda`, or both. Without a device the tests say so
//! and pass; with `QUADS_REQUIRE_DEVICE=1` they fail instead. The binary needs no file beside itself: carry it to a machine
//! with a GPU and run it there.
#![recursion_limit = "256"]
mod blocking;
mod grouped;
mod linear;
mod modules;
mod packing;
mod quads;
mod support;
mod training;

/// The tests of one backend.
macro_rules! tests {
    ($name:ident, $stack:ty, [$($module:ident :: $test:ident),* $(,)?]) => {
        mod $name {
            use super::support::Stack as _;
            $(
                #[test]
                fn $test() {
                    if <$stack>::is_available() {
                        let _turn = super::support::turn(stringify!($module));
                        super::$module::$test::<$stack>();
                    }
                }
            )*
        }
    };
}

/// All tests on all backends.
macro_rules! all_tests {
    ($($tests:tt)*) => {
        #[cfg(feature = "vulkan")]
        tests!(vulkan, burn::backend::Vulkan, [$($tests)*]);
        #[cfg(feature = "vulkan")]
        tests!(vulkan_without_fusion, crate::support::PlainVulkan, [$($tests)*]);
        #[cfg(feature = "cuda")]
        tests!(cuda, burn::backend::Cuda, [$($tests)*]);
        #[cfg(feature = "cuda")]
        tests!(cuda_without_fusion, crate::support::PlainCuda, [$($tests)*]);
    };
}

all_tests! {
    packing::a_packed_weight_has_the_bytes_of_flex,
    packing::weights_share_an_outer_scale_by_their_amax,
    packing::what_cannot_be_packed_is_refused_with_the_words_of_flex,
    packing::records_are_those_of_flex_in_both_directions,
    packing::decoded_values_have_the_bits_of_flex,
    packing::fake_quantized_weights_have_the_bits_of_flex,
    packing::fake_quantized_activations_have_the_bits_of_flex,
    packing::a_weight_that_is_not_finite_becomes_nan,
    linear::every_precision_is_within_the_bound_of_the_exact_product,
    linear::input_of_one_to_four_dimensions_with_and_without_bias,
    linear::half_precision_comes_out_as_it_went_in,
    linear::another_mask_takes_the_place_of_the_one_in_use,
    linear::strided_and_offset_input,
    linear::zero_rows_give_zero_rows,
    linear::a_row_depends_on_no_other_row,
    linear::a_row_with_nan_or_infinity_is_nan_and_alone,
    linear::an_outer_scale_may_divide,
    linear::a_transposed_weight_multiplies_with_its_values,
    linear::input_of_another_width_is_refused_with_both_shapes,
    grouped::packed_groups_are_separate_products,
    grouped::dense_groups_are_separate_products,
    grouped::gradients_of_groups_are_those_of_flex,
    grouped::a_stack_multiplies_group_by_group,
    modules::an_unmodified_attention_layer_runs_packed,
    blocking::nothing_waits_for_the_device,
    training::a_linear_layer_trains_as_on_flex,
    quads::rows_are_sorted_by_expert_as_on_flex,
    quads::rows_are_permuted_by_expert_as_on_flex,
    quads::the_experts_of_largest_logits_are_those_of_flex,
    quads::the_operations_of_a_layer_are_those_of_flex,
    quads::the_gradients_of_a_norm_are_those_of_flex,
    quads::log_probs_and_their_gradients_are_those_of_flex,
    quads::experts_and_their_gradients_are_those_of_flex,
    quads::a_model_and_its_gradients_are_those_of_flex,
    quads::sync_packs_what_the_trainer_multiplies_with,
    quads::a_rollout_is_that_of_flex,
}
