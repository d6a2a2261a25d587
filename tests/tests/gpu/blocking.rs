//! Forward passes enqueue work and return: they do so while the device is held by somebody else.
use crate::support::{Stack, activations, bits, counts, data, float, on, read, settings};
use burn_backend::tensor::FloatTensor;
use burn_nvfp4::{Nvfp4, Nvfp4Tensor, WeightFormat};
use burn_quads::backend::QuadsBackend;
use std::{
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::Duration,
};

/// Whether `work` returns within `patience` while the device is occupied. Gives its result, once the device is free again.
fn returns_meanwhile<B: Stack, T: Send>(patience: Duration, work: impl FnOnce() -> T + Send) -> (bool, T) {
    let (release, released) = channel::<()>();
    let (occupied, is_occupied) = channel::<()>();
    let (finished, is_finished) = channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            B::occupy_device(move || {
                occupied.send(()).unwrap();
                // At most so long, should the test fail.
                let _ = released.recv_timeout(2 * patience);
            });
        });
        is_occupied.recv().unwrap();
        let worker = scope.spawn(move || {
            let result = work();
            B::enqueue_all();
            finished.send(()).unwrap();
            result
        });
        let returned = is_finished.recv_timeout(patience) != Err(RecvTimeoutError::Timeout);
        let _ = release.send(());
        (returned, worker.join().unwrap())
    })
}

pub fn nothing_waits_for_the_device<B: Stack>() {
    let x = activations(1, [12, 64]);
    let stack = data(2, [4, 64, 10]);
    let (x, w, group) = (float::<B>(&x), float::<B>(&stack), counts::<B>(&[3, 0, 8, 1]));
    let single = float::<B>(&data(3, [64, 24]));
    let grad = float::<B>(&data(4, [12, 10]));
    // One operation at a time: a full queue would wait as well.
    type Operation<'a, B> = Box<dyn Fn() -> FloatTensor<B> + Send + Sync + 'a>;
    let mut operations: Vec<(String, Operation<'_, B>)> = Vec::new();
    let mut add = |name: String, run: Operation<'static, B>| operations.push((name, run));
    for (format, activation) in settings(64) {
        let packed = on::<B>(&data(3, [64, 24]), format, &activation);
        let packed_stack = on::<B>(&stack, format, &activation);
        let setting = format!("{format}, {activation:?}");
        let (x1, weight) = (x.clone(), packed_stack.clone());
        add(
            format!("linear, {setting}"),
            Box::new(move || B::packed_linear(x1.clone(), &packed)),
        );
        let (x1, group) = (x.clone(), group.clone());
        add(
            format!("grouped linear, {setting}"),
            Box::new(move || B::packed_grouped_linear(x1.clone(), &packed_stack, group.clone())),
        );
        add(
            format!("unpack, {setting}"),
            Box::new(move || B::unpack_weight(&weight)),
        );
        let x1 = x.clone();
        add(
            format!("activations, {setting}"),
            Box::new(move || B::fake_quantize_activations(x1.clone(), &activation)),
        );
    }
    for format in [WeightFormat::Nvfp4, WeightFormat::Fp8] {
        for weight in [w.clone(), single.clone()] {
            add(
                format!("weights, {format}"),
                Box::new(move || B::fake_quantize_weight(weight.clone(), format, None)),
            );
        }
    }
    let (x1, w1, group1) = (x.clone(), w.clone(), group.clone());
    add(
        "dense groups".into(),
        Box::new(move || B::grouped_linear(x1.clone(), w1.clone(), group1.clone())),
    );
    let (grad1, group1) = (grad.clone(), group.clone());
    add(
        "gradient of grouped weights".into(),
        Box::new(move || B::grouped_linear_weight_backward(x.clone(), grad1.clone(), group1.clone())),
    );
    add(
        "gradient of grouped inputs".into(),
        Box::new(move || {
            let (grad, w) = (Nvfp4Tensor::Dense(grad.clone()), Nvfp4Tensor::Dense(w.clone()));
            Nvfp4::<B>::grouped_linear_x_backward(grad, w, group.clone()).dense()
        }),
    );
    for (name, operation) in &operations {
        // Kernels are compiled, and the device asked how it divides, once: not what is tested.
        let expected = read::<B>(&operation());
        let (returned, result) = returns_meanwhile::<B, _>(Duration::from_secs(20), operation);
        assert!(returned, "{name}: waited for the device");
        assert_eq!(bits(&read::<B>(&result)), bits(&expected), "{name}");
    }
    // The method finds what does wait.
    let tensor = float::<B>(&data(5, [64, 24]));
    let (returned, _) = returns_meanwhile::<B, _>(Duration::from_secs(2), || {
        B::with_floats(&tensor, |values| values.len())
    });
    assert!(!returned, "reading back must wait for the device");
}
