//! What is said of NVIDIA's GPUs in more than one place: how they are called, and which driver can do
//! what.

/// First driver that puts what was on one GPU onto another (CUDA 13.0, `gpuPairs`).
pub const REMAP_DRIVER: u64 = 580;

/// First driver that copies GPU memory from and to elsewhere than the processes (CUDA 13.4, custom
/// storage).
pub const STORAGE_DRIVER: u64 = 615;

/// Before the digits of a whole GPU; `MIG-` is before those of a part of one.
const PREFIX: &str = "GPU-";

/// Digits of a UUID between its dashes.
const GROUPS: [usize; 5] = [8, 4, 4, 4, 12];

/// Writes the UUID of a GPU as NVIDIA's tools do: `GPU-5a17…`, in lowercase, with dashes.
pub fn uuid(bytes: [u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(bytes));
    let (mut text, mut rest) = (PREFIX.to_owned(), &*digits);
    for (number, length) in GROUPS.into_iter().enumerate() {
        let (group, after) = rest.split_at_checked(length).unwrap_or((rest, ""));
        if number > 0 {
            text.push('-');
        }
        text.push_str(group);
        rest = after;
    }
    text
}

/// Reads the UUID of a GPU, wherever its dashes are; `None` when it is none.
pub fn uuid_bytes(text: &str) -> Option<[u8; 16]> {
    let digits = text.strip_prefix(PREFIX)?.replace('-', "");
    let is_long_enough = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = is_long_enough.then(|| u128::from_str_radix(&digits, 16).ok())?;
    number.map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_sixteen_bytes_in_the_order_they_are_written() {
        let text = "GPU-00112233-4455-6677-8899-aabbccddeeff";
        let bytes = uuid_bytes(text).unwrap();
        assert_eq!((bytes[0], bytes[1], bytes[15]), (0x00, 0x11, 0xff));
        assert_eq!(uuid(bytes), text);
        assert_eq!(uuid_bytes("GPU-00112233445566778899AABBCCDDEEFF"), Some(bytes));
        for wrong in [
            "",
            "GPU-",
            "GPU-00112233",
            "GPU-+0112233-4455-6677-8899-aabbccddeeff",
            "MIG-00112233-4455-6677-8899-aabbccddeeff",
        ] {
            assert_eq!(uuid_bytes(wrong), None, "{wrong}");
        }
    }
}
