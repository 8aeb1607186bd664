use std::io;

use super::is_vfork;

/// Flags of a clone3(2) with and without `CLONE_VFORK`, by where they lie.
fn flags(address: u64) -> io::Result<u64> {
    match address {
        0x7000 => Ok(0x4100),
        0x8000 => Ok(0x003d_0f00),
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}

#[test]
fn what_waits_for_a_child_is_told_from_what_does_not() {
    let (clone, clone3) = (libc::SYS_clone, libc::SYS_clone3);
    let calls = [
        (format!("{clone} 0x4111 0x0 0x0 0x0 0x0 0x0 0x7ffe 0x7f00"), true),
        (format!("{clone} 0x1200011 0x0 0x0 0x7f 0x0 0x0 0x7ffe 0x7f00"), false),
        (format!("{clone3} 0x7000 0x58 0x0 0x0 0x0 0x0 0x7ffe 0x7f00"), true),
        (format!("{clone3} 0x8000 0x58 0x0 0x0 0x0 0x0 0x7ffe 0x7f00"), false),
        (format!("{clone3} 0x9000 0x58 0x0 0x0 0x0 0x0 0x7ffe 0x7f00"), false),
        (format!("{} 0x0 0x0 0x0 0x0 0x0 0x0 0x7ffe 0x7f00", libc::SYS_wait4), false),
        #[cfg(target_arch = "x86_64")]
        (format!("{} 0x55a8 0x7ffc 0x7ffd 0x0 0x0 0x0 0x7ffe 0x7f00", libc::SYS_vfork), true),
        ("-1 0x7ffe 0x7f00".to_owned(), false),
        ("running".to_owned(), false),
        (String::new(), false),
    ];
    for (call, waits) in calls {
        assert_eq!(is_vfork(&call, flags), waits, "{call}");
    }
}
