//! What is allocated: the cache once, and nothing dense of a packed weight. Alone in their binary, and one after the other,
//! because they count the allocations of the whole process.
use burn::{
    backend::Flex,
    tensor::{Distribution, Tensor},
};
use burn_nvfp4::{Nvfp4, Precision, Rac};
use burn_quads::{
    QuadsExpertsConfig,
    modules::{moe_config::QuadsMoeConfig, router::Routing},
    rollout::{RolloutEngine, SamplingParams},
    sync::pack_model,
};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

/// Remembers the largest block asked for, and how many bytes are alive.
struct Watch;

static LARGEST: AtomicUsize = AtomicUsize::new(0);
static ALIVE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Watch {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Relaxed);
        ALIVE.fetch_add(layout.size(), Relaxed);
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        ALIVE.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static WATCH: Watch = Watch;

/// One after the other in one thread: a thread frees what it keeps when it ends.
#[test]
fn nothing_more_is_allocated_than_has_to_be() {
    packed_experts_have_no_dense_copy_during_a_call_or_after_it();
    sampling_allocates_nothing_of_the_size_of_the_cache();
}

fn packed_experts_have_no_dense_copy_during_a_call_or_after_it() {
    let device = Default::default();
    let (experts, d_model, d_ff) = (8, 256, 128);
    let expert_bytes = 3 * d_model * d_ff * 4;
    let routing = Routing::<Nvfp4<Flex>> {
        expert_ids: Tensor::from_data([[0, 1], [2, 7], [5, 3]], &device),
        weights: Tensor::from_data([[0.5, 0.5], [0.9, 0.1], [0.3, 0.7]], &device),
        logits: Tensor::zeros([3, experts], &device),
    };
    let x = Tensor::random([3, d_model], Distribution::Default, &device);
    for precision in [
        Precision::W4A16,
        Precision::W4A4,
        Precision::W4A4Rac(Rac::default()),
        Precision::Fp8,
    ] {
        let layer = || {
            let layer = QuadsExpertsConfig::new(experts, d_model, d_ff).init::<Nvfp4<Flex>>(&device);
            layer.pack(&precision).unwrap()
        };
        // The first calls make what outlives calls: threads and their buffers.
        for _ in 0..3 {
            layer().forward(x.clone(), &routing);
        }
        let before = ALIVE.load(Relaxed);
        let layer = layer();
        let held = ALIVE.load(Relaxed) - before;
        let bits = if precision == Precision::Fp8 { 8.2 } else { 4.6 };
        let packed = (experts * expert_bytes) as f64 * bits / 32.0;
        assert!(
            (held as f64) < 1.15 * packed + 65536.0,
            "{precision}: {held} bytes for {packed}"
        );

        LARGEST.store(0, Relaxed);
        let before = ALIVE.load(Relaxed);
        layer.forward(x.clone(), &routing);
        let largest = LARGEST.load(Relaxed);
        assert!(
            largest < expert_bytes / 4,
            "{precision}: a block of {largest} bytes was allocated"
        );
        // Threads may keep a buffer that they make at their first use.
        let held = ALIVE.load(Relaxed).saturating_sub(before);
        assert!(
            held < expert_bytes / 4,
            "{precision}: {held} bytes are held after a call"
        );
    }
}

fn sampling_allocates_nothing_of_the_size_of_the_cache() {
    let device = Default::default();
    let config = QuadsMoeConfig::new(32, 64, 2, 4, 2, 16, 4, 2, 64).with_precision(Precision::W4A4);
    let model = config.init_seeded::<Nvfp4<Flex>>(1, &device);
    let (model, _) = pack_model(model, &Precision::W4A4, None).unwrap();
    // 32 slots · 2 heads · 1024 tokens · 16 channels · 4 bytes.
    let half_a_layer = 32 * 2 * 1024 * 16 * 4;
    let mut engine = RolloutEngine::new(32, 1024).unwrap();
    let prompts: Vec<Vec<u32>> = (0..80).map(|i| vec![i % 32, 1, 2, 3]).collect();
    let params = SamplingParams {
        temperature: 1.0,
        max_new_tokens: 20,
        eos_token_ids: vec![0],
        seed: 1,
        record_routing: false,
    };

    let before = ALIVE.load(Relaxed);
    engine.generate(&model, &prompts, &params).unwrap();
    let held = ALIVE.load(Relaxed) - before;
    assert!(
        LARGEST.load(Relaxed) >= half_a_layer,
        "the cache was made in the first call"
    );
    assert!(
        held >= 4 * half_a_layer && held < 5 * half_a_layer,
        "{held} bytes are held between calls"
    );

    LARGEST.store(0, Relaxed);
    let before = ALIVE.load(Relaxed);
    engine.generate(&model, &prompts, &params).unwrap();
    let largest = LARGEST.load(Relaxed);
    assert!(largest < half_a_layer / 4, "a block of {largest} bytes was allocated");
    let left = ALIVE.load(Relaxed).abs_diff(before);
    assert!(left < 1 << 16, "{left} bytes more are held after the second call");
}
