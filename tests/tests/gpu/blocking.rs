//! Forward passes enqueue work and return: they do so while the device is held by somebody else.
use crate::support::{Stack, activations, counts, data, float, on, read, settings};
use burn_nvfp4::{Nvfp4, Nvfp4Tensor, WeightFormat};
use burn_quads::backend::QuadsBackend;
use std::{
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::Duration,
};

/// Whether `work` returns while the device is occupied. Gives its result, once the device is free again.
fn returns_meanwhile<B: Stack, T: Send>(work: impl FnOnce() -> T + Send) -> (bool, T) {
    let (release, released) = channel::<()>();
    let (occupied, is_occupied) = channel::<()>();
    let (finished, is_finished) = channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            B::occupy_device(move || {
                occupied.send(()).unwrap();
                // At most so long, should the test fail.
                let _ = released.recv_timeout(Duration::from_secs(120));
            });
        });
        is_occupied.recv().unwrap();
        let worker = scope.spawn(move || {
            let result = work();
            B::enqueue_all();
            finished.send(()).unwrap();
            result
        });
        let returned = is_finished.recv_timeout(Duration::from_secs(60)) != Err(RecvTimeoutError::Timeout);
        release.send(()).unwrap();
        (returned, worker.join().unwrap())
    })
}

pub fn nothing_waits_for_the_device<B: Stack>() {
    let x = activations(1, [12, 64]);
    let stack = data(2, [4, 64, 10]);
    let (x, w, group) = (float::<B>(&x), float::<B>(&stack), counts::<B>(&[3, 0, 8, 1]));
    let single = float::<B>(&data(3, [64, 24]));
    let grad = float::<B>(&data(4, [12, 10]));
    let weights: Vec<_> = settings(64)
        .into_iter()
        .map(|(format, activation)| {
            let single = on::<B>(&data(3, [64, 24]), format, &activation);
            (single, on::<B>(&stack, format, &activation), activation)
        })
        .collect();
    let all = || {
        let mut results = Vec::new();
        for (single, stack, activation) in &weights {
            results.push(B::packed_linear(x.clone(), single));
            results.push(B::packed_grouped_linear(x.clone(), stack, group.clone()));
            results.push(B::fake_quantize_activations(x.clone(), activation));
            results.push(B::unpack_weight(stack));
        }
        for format in [WeightFormat::Nvfp4, WeightFormat::Fp8] {
            results.push(B::fake_quantize_weight(w.clone(), format, None));
            results.push(B::fake_quantize_weight(single.clone(), format, None));
        }
        results.push(B::grouped_linear(x.clone(), w.clone(), group.clone()));
        results.push(B::grouped_linear_weight_backward(
            x.clone(),
            grad.clone(),
            group.clone(),
        ));
        let wrapped = Nvfp4Tensor::Dense(w.clone());
        let dx = Nvfp4::<B>::grouped_linear_x_backward(Nvfp4Tensor::Dense(grad.clone()), wrapped, group.clone());
        results.push(dx.dense());
        results
    };
    // Kernels are compiled, and the device asked how it divides, once: not what is tested.
    let expected: Vec<_> = all().iter().map(read::<B>).collect();
    let (returned, results) = returns_meanwhile::<B, _>(all);
    assert!(returned, "an operation waited for the device");
    let results: Vec<_> = results.iter().map(read::<B>).collect();
    assert_eq!(results, expected);
    // The method finds what does wait.
    let (returned, _) = returns_meanwhile::<B, _>(|| {
        let data = data(5, [64, 24]);
        B::with_floats(&float::<B>(&data), |values| values.len())
    });
    assert!(!returned, "reading back must wait for the device");
}
