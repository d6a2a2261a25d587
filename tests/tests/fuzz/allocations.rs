//! How much memory a thread holds at most.
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

/// Runs `work`, and gives the bytes that this thread held at most beyond what it held before.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    PEAK.set(LIVE.get());
    let before = LIVE.get();
    let value = work();
    (value, (PEAK.get() - before).max(0) as usize)
}

/// Runs `work` without a trace in [`peak_of`].
pub fn uncounted<T>(work: impl FnOnce() -> T) -> T {
    let peak = PEAK.get();
    let value = work();
    PEAK.set(peak);
    value
}

fn count(bytes: isize) {
    // A thread that is ending has no counters any more.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
    });
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[test]
fn what_is_held_and_given_back_is_counted() {
    let (_, peak) = peak_of(|| {
        drop(std::hint::black_box(vec![0u8; 1 << 20]));
        uncounted(|| drop(std::hint::black_box(vec![1u8; 1 << 22])));
        std::hint::black_box(vec![1u8; 1 << 10])
    });
    assert!((1 << 20..(1 << 20) + 1000).contains(&peak), "{peak}");
}
