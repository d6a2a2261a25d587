//! `Nvfp4<B>` as a Burn backend: every operation of B, on tensors that may hold a packed weight.
//!
//! Most operations only unwrap their arguments and wrap their results. `delegate!` writes those from the list of
//! Burn's signatures; what knows about packed weights is written out above each list. `tests/delegation.rs` compares
//! the lists with Burn's sources, so that an upgrade cannot leave an operation on its default without notice.

/// Implements an operation trait: items written out first, then signatures to hand to B.
///
/// `Float`, `Int`, `Bool` and `Device` stand for the backend's types; all other types are passed as they are.
macro_rules! delegate {
    (impl $trait:ident { $($own:tt)* } $( fn $name:ident ( $($args:tt)* ) $( -> $ret:tt )? ; )*) => {
        impl<B: Nvfp4Backend> $trait<Self> for Nvfp4<B> {
            $($own)*
            $( delegate! { @fn $name [] [] ($($args)*,) $($ret)? } )*
        }
    };
    // Arguments, one at a time: `[parameters so far] [call so far] (rest)`.
    (@fn $n:ident [$($s:tt)*] [$($c:tt)*] ($a:ident : Float, $($r:tt)*) $t:tt) => {
        delegate! { @fn $n [$($s)* $a: Nvfp4Tensor<B>,] [$($c)* $a.dense(),] ($($r)*) $t } };
    (@fn $n:ident [$($s:tt)*] [$($c:tt)*] ($a:ident : Vec<Float>, $($r:tt)*) $t:tt) => {
        delegate! { @fn $n [$($s)* $a: Vec<Nvfp4Tensor<B>>,]
            [$($c)* $a.into_iter().map(Nvfp4Tensor::dense).collect(),] ($($r)*) $t } };
    (@fn $n:ident [$($s:tt)*] [$($c:tt)*] ($a:ident : Option<Float>, $($r:tt)*) $t:tt) => {
        delegate! { @fn $n [$($s)* $a: Option<Nvfp4Tensor<B>>,] [$($c)* $a.map(Nvfp4Tensor::dense),] ($($r)*) $t } };
    (@fn $n:ident [$($s:tt)*] [$($c:tt)*] ($a:ident : Int, $($r:tt)*) $t:tt) => {
        delegate! { @fn $n [$($s)* $a: IntTensor<B>,] [$($c)* $a,] ($($r)*) $t } };
    (@fn $n:ident [$($s:tt)*] [$($c:tt)*] ($a:ident : &Int, $($r:tt)*) $t:tt) => {
        delegate! { @fn $n [$($s)* $a: &IntTensor<B>,] [$($c)* $a,] ($($r)*) $t } };
    (@fn $n:ident [$($s:tt)*] [$($c:tt)*] ($a:ident : Vec<Int>, $($r:tt)*) $t:tt) => {
        delegate! { @fn $n [$($s)* $a: Vec<IntTensor<B>>,] [$($c)* $a,] ($($r)*) $t } };
    (@fn $n:ident [$($s:tt)*] [$($c:tt)*] ($a:ident : Bool, $($r:tt)*) $t:tt) => {
        delegate! { @fn $n [$($s)* $a: BoolTensor<B>,] [$($c)* $a,] ($($r)*) $t } };
    (@fn $n:ident [$($s:tt)*] [$($c:tt)*] ($a:ident : &Bool, $($r:tt)*) $t:tt) => {
        delegate! { @fn $n [$($s)* $a: &BoolTensor<B>,] [$($c)* $a,] ($($r)*) $t } };
    (@fn $n:ident [$($s:tt)*] [$($c:tt)*] ($a:ident : Vec<Bool>, $($r:tt)*) $t:tt) => {
        delegate! { @fn $n [$($s)* $a: Vec<BoolTensor<B>>,] [$($c)* $a,] ($($r)*) $t } };
    (@fn $n:ident [$($s:tt)*] [$($c:tt)*] ($a:ident : Option<Bool>, $($r:tt)*) $t:tt) => {
        delegate! { @fn $n [$($s)* $a: Option<BoolTensor<B>>,] [$($c)* $a,] ($($r)*) $t } };
    (@fn $n:ident [$($s:tt)*] [$($c:tt)*] ($a:ident : &Device, $($r:tt)*) $t:tt) => {
        delegate! { @fn $n [$($s)* $a: &Device<Self>,] [$($c)* $a,] ($($r)*) $t } };
    (@fn $n:ident [$($s:tt)*] [$($c:tt)*] ($a:ident : $ty:ty, $($r:tt)*) $t:tt) => {
        delegate! { @fn $n [$($s)* $a: $ty,] [$($c)* $a,] ($($r)*) $t } };
    (@fn $n:ident [$($s:tt)*] [$($c:tt)*] ($(,)?) $t:tt) => {
        fn $n($($s)*) -> delegate!(@ty $t) { delegate!(@wrap $t (B::$n($($c)*))) } };
    // Results.
    (@ty Float) => { Nvfp4Tensor<B> };
    (@ty Int) => { IntTensor<B> };
    (@ty Bool) => { BoolTensor<B> };
    (@ty Device) => { Device<Self> };
    (@ty ($a:tt, $b:tt)) => { (delegate!(@ty $a), delegate!(@ty $b)) };
    (@ty $t:ty) => { $t };
    (@wrap Float $e:tt) => { Nvfp4Tensor::Dense($e) };
    (@wrap ($a:tt, $b:tt) $e:tt) => {{ let (a, b) = $e; (delegate!(@wrap $a a), delegate!(@wrap $b b)) }};
    (@wrap $t:tt $e:tt) => { $e };
}

mod activation;
mod backend;
mod bool;
mod float;
mod int;
mod module;
mod quantized;
mod transaction;

pub use quantized::Nvfp4QTensor;
