//! Batched reads: dense tensors go to B in one transaction, packed weights are read one by one.
use burn_backend::{
    ExecutionError,
    ops::{QTensorOps, TransactionOps, TransactionPrimitive, TransactionPrimitiveData},
};

use crate::{Nvfp4, Nvfp4Backend, Nvfp4QTensor, Nvfp4Tensor};

impl<B: Nvfp4Backend> TransactionOps<Self> for Nvfp4<B> {
    async fn tr_execute(transaction: TransactionPrimitive<Self>) -> Result<TransactionPrimitiveData, ExecutionError> {
        let mut inner = Vec::new();
        let mut lazy = Vec::new();
        for (at, tensor) in transaction.read_qfloats.into_iter().enumerate() {
            match tensor {
                Nvfp4QTensor::Inner(tensor) => inner.push(tensor),
                tensor => lazy.push((at, tensor)),
            }
        }
        let mut data = B::tr_execute(TransactionPrimitive::new(
            transaction.read_floats.into_iter().map(Nvfp4Tensor::dense).collect(),
            inner,
            transaction.read_ints,
            transaction.read_bools,
        ))
        .await?;
        // In rising order, so that each lands where it was registered.
        for (at, tensor) in lazy {
            data.read_qfloats.insert(at, Self::q_into_data(tensor).await?);
        }
        Ok(data)
    }
}
