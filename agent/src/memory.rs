//! What the agent's own memory looks like to the node it works on.
#![cfg_attr(
    target_env = "gnu",
    expect(
        unsafe_code,
        reason = "how the C library keeps freed memory is said to it by functions of its own, called here alone"
    )
)]

/// Regions of memory that all threads share. The C library gives each thread its own, up to eight
/// for each core, and keeps in each what was freed there: after some operations 37 MiB that nobody
/// uses, of 75 MiB resident. With two of them 46 MiB were resident.
#[cfg(target_env = "gnu")]
const ARENAS_MAX: std::ffi::c_int = 2;

/// Pieces of this size and more come from the kernel, untouched, and go back when they are freed; by
/// itself the C library raises that with the largest that it has seen freed, up to 32 MiB. It is the
/// size of a chunk: whoever uses those again and again keeps them, and here they would lie around in
/// two regions, now and then 10 MiB of them. The 16 MiB into which FUSE's requests are read are hardly
/// touched, and would be cleared.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES_MIN: std::ffi::c_int = 4 << 20;

/// What may lie free at the end of a region before it is given back: two such pieces.
#[cfg(target_env = "gnu")]
const KEPT_BYTES_MAX: std::ffi::c_int = 2 * MAPPED_BYTES_MIN;

/// Has what one thread freed serve the others, and not lie around. To be called before there are any.
pub fn share() {
    #[cfg(target_env = "gnu")]
    for (what, value) in [
        (libc::M_ARENA_MAX, ARENAS_MAX),
        (libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN),
        (libc::M_TRIM_THRESHOLD, KEPT_BYTES_MAX),
    ] {
        // SAFETY: takes two numbers, and touches no memory that is ours (mallopt(3)).
        let _is_set = unsafe { libc::mallopt(what, value) };
    }
}

/// Gives memory that was freed back to the node. To be called when an operation has ended: the C
/// library would keep what the operation had needed for the next one, which may need it elsewhere.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes a number, and touches no memory that is in use (malloc_trim(3)).
    let _was_released = unsafe { libc::malloc_trim(0) };
}
