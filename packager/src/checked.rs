//! Streams that end with an error when their bytes are not what was promised.

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use kybernate_spec::{Descriptor, Hasher};

use crate::store::{BlobStream, StoreError, StoreErrorKind};

/// Passes `stream` on while it hashes it. After the last byte the digest is compared; bytes beyond
/// the size are never passed on.
pub(crate) fn checked(stream: BlobStream, descriptor: &Descriptor) -> BlobStream {
    let hasher = Hasher::new(descriptor.digest.algorithm());
    let descriptor = descriptor.clone();
    let state = (stream, descriptor, Some(hasher), 0_u64);
    stream::try_unfold(state, async |(mut stream, descriptor, hasher, passed)| {
        let Some(mut hasher) = hasher else { return Ok(None) };
        match stream.try_next().await? {
            Some(bytes) => {
                let passed = passed.saturating_add(length(&bytes));
                if passed > descriptor.size {
                    let wrong = format!("more than {} bytes", descriptor.size);
                    return Err(mismatch(&descriptor, wrong));
                }
                hasher.update(&bytes);
                Ok(Some((bytes, (stream, descriptor, Some(hasher), passed))))
            }
            None if passed < descriptor.size => {
                let wrong = format!("{passed} bytes instead of {}", descriptor.size);
                Err(mismatch(&descriptor, wrong))
            }
            None => {
                let digest = hasher.finish();
                if digest == descriptor.digest {
                    return Ok(None);
                }
                Err(mismatch(&descriptor, format!("it is {digest}")))
            }
        }
    })
    .boxed()
}

/// Reads a whole blob into memory, checked, when it has at most `limit` bytes.
pub(crate) async fn collect(
    stream: BlobStream,
    descriptor: &Descriptor,
    limit: u64,
) -> Result<Bytes, StoreError> {
    if descriptor.size > limit {
        let kind = StoreErrorKind::TooLarge { size: descriptor.size, limit };
        return Err(StoreError {
            operation: "read blob",
            subject: descriptor.digest.to_string(),
            kind,
        });
    }
    let mut stream = checked(stream, descriptor);
    let mut content = Vec::new();
    while let Some(bytes) = stream.try_next().await? {
        content.extend_from_slice(&bytes);
    }
    Ok(content.into())
}

/// Returns the length of a buffer as the `u64` that sizes are.
pub(crate) fn length(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).unwrap_or(u64::MAX)
}

fn mismatch(descriptor: &Descriptor, wrong: String) -> StoreError {
    StoreError {
        operation: "read blob",
        subject: descriptor.digest.to_string(),
        kind: StoreErrorKind::Mismatch(wrong),
    }
}
