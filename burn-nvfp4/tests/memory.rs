//! What packed weights cost in memory, counted at the allocator: no dense copy of a weight lives between calls.
use burn::{
    backend::Flex,
    module::Module,
    nn::{
        LinearConfig,
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    tensor::{Distribution, Tensor},
};
use burn_nvfp4::{Nvfp4, PackLinears, Precision, Rac};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering::SeqCst},
};

type B = Nvfp4<Flex>;

/// Counts live bytes and their peak.
struct Counting;
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands every call to the system's allocator, and counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), SeqCst) + layout.size();
        PEAK.fetch_max(live, SeqCst);
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), SeqCst);
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs `f`; gives its result, the bytes that stay with it, and the most that were live meanwhile.
fn measured<T>(f: impl FnOnce() -> T) -> (T, usize, usize) {
    let before = LIVE.load(SeqCst);
    PEAK.store(before, SeqCst);
    let result = f();
    (
        result,
        LIVE.load(SeqCst).saturating_sub(before),
        PEAK.load(SeqCst) - before,
    )
}

/// One test: the counters belong to the whole process.
#[test]
fn a_packed_model_holds_its_packed_bytes_and_nothing_dense() {
    let device = Default::default();
    let (d_in, d_out) = (1024, 2048);
    let (dense_bytes, packed_bytes) = (4 * d_in * d_out, d_in * d_out / 2 + d_in * d_out / 16 + 4);
    let slack = 64 * 1024;
    for precision in [Precision::W4A16, Precision::W4A4, Precision::W4A4Rac(Rac::default())] {
        let pack = || {
            let layer = LinearConfig::new(d_in, d_out).with_bias(false).init::<B>(&device);
            PackLinears::default()
                .precision(precision.clone())
                .pack(layer)
                .unwrap()
                .0
        };
        drop(pack()); // Threads and tables that stay.
        let (layer, held, _) = measured(pack);
        assert!(
            held < packed_bytes + slack,
            "{precision}: packed layer holds {held} bytes, expected {packed_bytes}"
        );

        let x = Tensor::<B, 2>::random([16, d_in], Distribution::Default, &device);
        drop(layer.forward(x.clone()));
        let (y, held, peak) = measured(|| layer.forward(x.clone()));
        let y_bytes = 4 * 16 * d_out;
        assert!(
            held < y_bytes + slack,
            "{precision}: {held} bytes stay after a call that returns {y_bytes}"
        );
        let scratch = peak - y_bytes;
        assert!(
            scratch < dense_bytes / 4,
            "{precision}: {scratch} bytes of scratch; a dense weight has {dense_bytes}"
        );
        drop(y);

        // Even an operation that decodes the weight gives the dense copy back.
        let (sum, held, _) = measured(|| layer.weight.val().sum().into_scalar());
        assert!(
            sum.is_finite() && held < slack,
            "{precision}: {held} bytes stay after a sum"
        );
        let copies = measured(|| (layer.clone(), layer.weight.val(), layer.weight.val().transpose()));
        assert!(
            copies.1 < slack,
            "clones and views share the storage, {} bytes",
            copies.1
        );
    }

    let encoder = || -> TransformerEncoder<B> {
        let config = TransformerEncoderConfig::new(256, 1024, 4, 2).with_dropout(0.0);
        PackLinears::default()
            .precision(Precision::W4A4)
            .pack(config.init(&device))
            .unwrap()
            .0
    };
    drop(encoder());
    let (model, held, _) = measured(encoder);
    let weights = 2 * (4 * 256 * 256 + 2 * 256 * 1024);
    let others = 4 * (model.num_params() - weights);
    assert!(
        held < weights * 9 / 16 + others + 2 * slack,
        "{held} bytes in a packed encoder of {weights} weights"
    );
    let x = Tensor::<B, 3>::random([2, 8, 256], Distribution::Default, &device);
    drop(model.forward(TransformerEncoderInput::new(x.clone())));
    let (_, held, _) = measured(|| model.forward(TransformerEncoderInput::new(x)));
    assert!(held < slack, "{held} bytes stay after a forward pass");
}
