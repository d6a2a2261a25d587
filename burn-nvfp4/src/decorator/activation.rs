//! Activation functions, all B's own.
use burn_backend::{Scalar, ops::ActivationOps};

use crate::{Nvfp4, Nvfp4Backend, Nvfp4Tensor};

delegate! {
    impl ActivationOps {}
    fn leaky_relu(tensor: Float, negative_slope: Scalar) -> Float;
    fn relu(tensor: Float) -> Float;
    fn relu_backward(output: Float, grad: Float) -> Float;
    fn gelu(tensor: Float) -> Float;
    fn prelu(tensor: Float, alpha: Float) -> Float;
    fn gelu_backward(x: Float, grad: Float) -> Float;
    fn sigmoid(tensor: Float) -> Float;
    fn sigmoid_backward(output: Float, grad: Float) -> Float;
    fn hard_sigmoid(tensor: Float, alpha: Scalar, beta: Scalar) -> Float;
    fn log_sigmoid(tensor: Float) -> Float;
    fn softmax(tensor: Float, dim: usize) -> Float;
    fn log_softmax(tensor: Float, dim: usize) -> Float;
    fn softmin(tensor: Float, dim: usize) -> Float;
    fn log_sigmoid_backward(x: Float, grad: Float) -> Float;
}
