//! Operations of one's own on `Fusion`: what runs on the inner backend is put off until the stream runs, like Burn's own
//! operations, and waits for nothing.
use burn_backend::{
    DType, Shape,
    tensor::{FloatTensor, IntTensor},
};
use burn_fusion::{
    FusionBackend, FusionTensor,
    stream::{Operation, OperationStreams},
};
use burn_ir::{BackendIr, CustomOpIr, HandleContainer, OperationIr, TensorIr};
use core::{fmt, marker::PhantomData};

type Runtime<B> = <B as FusionBackend>::FusionRuntime;
type Handles<B> = HandleContainer<<B as BackendIr>::Handle>;

/// A deferred operation when it runs: its inputs, one after the other in the order of [`defer`], and where its results go.
pub struct Call<'a, B: FusionBackend> {
    inputs: core::slice::Iter<'a, TensorIr>,
    outputs: core::slice::Iter<'a, TensorIr>,
    handles: &'a mut Handles<B>,
}

impl<B: FusionBackend> Call<'_, B> {
    fn input(&mut self) -> TensorIr {
        self.inputs
            .next()
            .expect("an input for each that was registered")
            .clone()
    }

    /// The next input, of floats.
    ///
    /// # Panics
    /// When there is none left.
    pub fn float(&mut self) -> FloatTensor<B> {
        let tensor = self.input();
        self.handles.get_float_tensor::<B>(&tensor)
    }

    /// The next input, of whole numbers.
    ///
    /// # Panics
    /// When there is none left.
    pub fn int(&mut self) -> IntTensor<B> {
        let tensor = self.input();
        self.handles.get_int_tensor::<B>(&tensor)
    }

    fn output(&mut self) -> &TensorIr {
        self.outputs.next().expect("a result for each that was registered")
    }

    /// Gives the next result. Its shape and type must be the registered ones.
    ///
    /// # Panics
    /// When all results have been given.
    pub fn give_float(&mut self, tensor: FloatTensor<B>) {
        let id = self.output().id;
        self.handles.register_float_tensor::<B>(&id, tensor);
    }

    /// As [`Self::give_float`], of whole numbers.
    ///
    /// # Panics
    /// When all results have been given.
    pub fn give_int(&mut self, tensor: IntTensor<B>) {
        let id = self.output().id;
        self.handles.register_int_tensor::<B>(&id, tensor);
    }
}

struct Deferred<B, F> {
    operation: CustomOpIr,
    run: F,
    backend: PhantomData<B>,
}

impl<B, F> fmt::Debug for Deferred<B, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.operation.id)
    }
}

impl<B, F> Operation<Runtime<B>> for Deferred<B, F>
where
    B: FusionBackend,
    F: Fn(&mut Call<'_, B>) + Send + Sync,
{
    fn execute(&self, handles: &mut Handles<B>) {
        (self.run)(&mut Call {
            inputs: self.operation.inputs.iter(),
            outputs: self.operation.outputs.iter(),
            handles,
        });
    }
}

/// Registers `run` on the stream of its inputs; gives the tensors that it will fill, one for each of `outputs`.
///
/// `run` is called on the device's thread: check shapes before, where a panic names its caller.
///
/// # Panics
/// When `inputs` is empty: the stream is that of the first.
pub fn defer<B: FusionBackend>(
    name: &'static str,
    inputs: Vec<FusionTensor<Runtime<B>>>,
    outputs: impl IntoIterator<Item = (Shape, DType)>,
    run: impl Fn(&mut Call<'_, B>) + Send + Sync + 'static,
) -> Vec<FusionTensor<Runtime<B>>> {
    let client = inputs[0].client.clone();
    let streams = OperationStreams::with_inputs(inputs.iter());
    let outputs: Vec<_> = outputs
        .into_iter()
        .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype))
        .collect();
    let inputs: Vec<_> = inputs.into_iter().map(FusionTensor::into_ir).collect();
    let operation = CustomOpIr::new(name, &inputs, &outputs);
    let deferred = Deferred::<B, _> {
        operation: operation.clone(),
        run,
        backend: PhantomData,
    };
    client.register(streams, OperationIr::Custom(operation), deferred)
}
