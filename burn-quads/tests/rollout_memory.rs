//! The cache is allocated once: sampling neither reallocates nor copies it. Alone in its binary, because it counts the
//! allocations of the whole process.
use burn::backend::Flex;
use burn_nvfp4::{Nvfp4, Precision};
use burn_quads::{
    modules::moe_config::QuadsMoeConfig,
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

#[test]
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
