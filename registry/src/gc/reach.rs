//! What is needed, given what refers to what.
//!
//! - What a needed manifest names is needed.
//! - What is attached to what is needed, as a signature is, is needed too, also where an index names
//!   a child that is elsewhere. The other way round nothing follows: a referrer does not keep its
//!   subject.

use std::collections::HashSet;

use kybernate_spec::Digest;

use super::Key;

/// What a repository's manifests refer to.
pub(super) trait Graph {
    /// Why it cannot be told.
    type Error;

    /// Returns what the digest needs, when it is a manifest of the repository, and what is attached
    /// to it, whether it is there or not.
    fn neighbours(&self, digest: &Digest) -> Result<Vec<Digest>, Self::Error>;
}

/// What is needed. It holds digests whether they are there or not.
#[derive(Debug, Default)]
pub(super) struct Needed(HashSet<Key>);

impl Needed {
    pub(super) fn contains(&self, digest: &Digest) -> bool {
        self.0.contains(&Key::of(digest))
    }

    /// Adds `roots` and all that follows from them. A root is looked at also when it was known to
    /// be needed before: it may not have been there then.
    pub(super) fn extend<G: Graph>(
        &mut self,
        graph: &G,
        roots: impl IntoIterator<Item = Digest>,
    ) -> Result<(), G::Error> {
        let mut unread: Vec<Digest> = Vec::new();
        for root in roots {
            self.0.insert(Key::of(&root));
            unread.push(root);
        }
        while let Some(digest) = unread.pop() {
            let neighbours = graph.neighbours(&digest)?.into_iter();
            unread.extend(neighbours.filter(|neighbour| self.0.insert(Key::of(neighbour))));
        }
        Ok(())
    }
}

/// Orders manifests so that none comes after one it needs: whoever is stopped in between leaves no
/// manifest without its parts.
pub(super) fn parents_first<G: Graph>(graph: &G, manifests: Vec<Digest>) -> Vec<Digest> {
    let ours: HashSet<Key> = manifests.iter().map(Key::of).collect();
    let mut entered = HashSet::new();
    let mut children_first = Vec::new();
    for manifest in manifests {
        // Depth first, without recursion: nesting is the pusher's choice.
        let mut path = vec![(manifest, false)];
        while let Some((digest, left)) = path.pop() {
            if left {
                children_first.push(digest);
            } else if entered.insert(Key::of(&digest)) {
                // What cannot be read has no parts to be left without.
                let children = graph.neighbours(&digest).unwrap_or_default();
                path.push((digest, true));
                let children = children.into_iter().filter(|child| ours.contains(&Key::of(child)));
                path.extend(children.map(|child| (child, false)));
            }
        }
    }
    children_first.reverse();
    children_first
}

#[cfg(test)]
mod tests;
