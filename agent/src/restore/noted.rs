//! What is noted about a pod's container that has begun, by kybernate-runc for the agent, until its pod is
//! gone: the identifier of the operation that restored it, or that it began afresh. The agent itself notes
//! where something of a restore is left.

/// What the note of a container says that began afresh, since it could not be restored.
pub(crate) const AFRESH: &str = "afresh";

/// What it says where something of a restore that failed may be in the pod's directories.
pub(super) const LEFT: &str = "left";

/// Returns the name of such a note; `None` when the words are none of Kubernetes'.
pub(crate) fn name(pod_uid: &str, container: &str) -> Option<String> {
    let all = is_plain(pod_uid) && is_plain(container);
    all.then(|| format!("{pod_uid}.{container}"))
}

/// Whether something can be part of a file's name.
pub(super) fn is_plain(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    !text.is_empty() && text.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_in_its_own_directory() {
        assert_eq!(name("0-1", "web").as_deref(), Some("0-1.web"));
        for (uid, container) in
            [("..", "web"), ("", "web"), ("a/b", "web"), ("0-1", "../x"), ("0-1", "")]
        {
            assert_eq!(name(uid, container), None, "{uid:?} {container:?}");
        }
    }
}
