//! `index.json` of a layout. Everything here blocks.
//!
//! Other programs list things there too. What they wrote stays as it is, known to us or not; an entry
//! that is no descriptor for us is passed over.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use kybernate_spec::{Descriptor, Digest, Index, MANIFEST_BYTES_MAX, Tag, annotation, media_type};

use super::list::List;
use super::{files, load, missing};
use crate::outline::{Outline, may_be};
use crate::store::StoreErrorKind;

const NAME: &str = "index.json";

/// Manifests looked at in search of referrers, beside those that the list itself names.
const MANIFESTS_MAX: usize = 10_000;

/// Reads the list of what the layout holds, as far as we know it.
pub(super) fn read(root: &Path) -> Result<Index, StoreErrorKind> {
    Ok(open(root)?.known())
}

/// Reads the list and finds what `tag` names.
pub(super) fn resolve(root: &Path, tag: Option<&Tag>) -> Result<Descriptor, StoreErrorKind> {
    let list = open(root)?;
    if let Some(found) = find(&list.known(), tag) {
        return Ok(found.clone());
    }
    match tag.and_then(|tag| list.wrong_with(tag.as_str())) {
        Some(wrong) => Err(StoreErrorKind::Malformed(wrong)),
        None => Err(StoreErrorKind::NotFound),
    }
}

fn open(root: &Path) -> Result<List, StoreErrorKind> {
    files::open_beneath(root, files::MARKER).map_err(missing)?;
    let file = files::open_beneath(root, NAME).map_err(missing)?;
    let size = file.metadata()?.len();
    if size > MANIFEST_BYTES_MAX {
        return Err(StoreErrorKind::TooLarge { size, limit: MANIFEST_BYTES_MAX });
    }
    let content = files::read_whole(file, MANIFEST_BYTES_MAX)?;
    List::parse(&content).map_err(StoreErrorKind::Malformed)
}

/// Replaces the list by what `change` makes of it.
pub(super) fn update(root: &Path, change: impl FnOnce(&mut Index)) -> Result<(), StoreErrorKind> {
    let _lock = files::lock(root)?;
    let list = match open(root) {
        Err(StoreErrorKind::NotFound) => List::empty(),
        other => other?,
    };
    let mut index = list.known();
    change(&mut index);
    let content = list.changed(&index).map_err(StoreErrorKind::Malformed)?;
    let size = crate::checked::length(&content);
    if size > MANIFEST_BYTES_MAX {
        return Err(StoreErrorKind::TooLarge { size, limit: MANIFEST_BYTES_MAX });
    }
    Ok(files::write_file(root, NAME, &content)?)
}

/// Replaces the list of a layout that is there, when `change` finds what it looks for.
pub(super) fn change(
    root: &Path,
    change: impl FnOnce(&mut Index) -> bool,
) -> Result<(), StoreErrorKind> {
    // Not found is told before a lock is made in a directory that is no layout.
    read(root)?;
    let mut found = false;
    update(root, |index| found = change(index))?;
    if found { Ok(()) } else { Err(StoreErrorKind::NotFound) }
}

/// Returns the tags and what they name.
pub(super) fn tags(index: &Index) -> Vec<(Tag, Digest)> {
    let tagged = |entry: &Descriptor| Some((tag_of(entry)?.parse().ok()?, entry.digest.clone()));
    index.manifests.iter().filter_map(tagged).collect()
}

/// Takes a tag away; what it named stays listed, once. Returns whether there was such a tag.
pub(super) fn untag(index: &mut Index, tag: &Tag) -> bool {
    let named = |entry: &&mut Descriptor| tag_of(entry) == Some(tag.as_str());
    let Some(entry) = index.manifests.iter_mut().find(named) else { return false };
    entry.annotations.remove(annotation::REF_NAME);
    let digest = entry.digest.clone();
    let listed = index.manifests.iter().filter(|entry| entry.digest == digest).count();
    if listed > 1 {
        let mut dropped = false;
        index.manifests.retain(|entry| {
            let again = !dropped && entry.digest == digest && tag_of(entry).is_none();
            dropped |= again;
            !again
        });
    }
    true
}

/// Takes manifests off the list. Returns whether one of them was on it.
pub(super) fn forget(index: &mut Index, digests: &[Digest]) -> bool {
    let before = index.manifests.len();
    index.manifests.retain(|entry| !digests.contains(&entry.digest));
    index.manifests.len() < before
}

/// Finds what `tag` names. Without a tag: `latest`, else the only entry with a tag, else the only
/// entry.
fn find<'a>(index: &'a Index, tag: Option<&Tag>) -> Option<&'a Descriptor> {
    let named = |name: &str| index.manifests.iter().find(|entry| tag_of(entry) == Some(name));
    if let Some(tag) = tag {
        return named(tag.as_str());
    }
    let only = |entries: Vec<&'a Descriptor>| match *entries {
        [entry] => Some(entry),
        _ => None,
    };
    named("latest")
        .or_else(|| only(index.manifests.iter().filter(|e| tag_of(e).is_some()).collect()))
        .or_else(|| only(index.manifests.iter().collect()))
}

/// Lists a manifest without a tag, unless it is listed already.
pub(super) fn list(index: &mut Index, entry: Descriptor) {
    if !index.manifests.iter().any(|listed| listed.digest == entry.digest) {
        index.manifests.push(entry);
    }
}

/// Gives a manifest a tag. What had the tag before stays listed without one.
pub(super) fn point(index: &mut Index, entry: Descriptor, tag: &Tag) {
    for listed in &mut index.manifests {
        if tag_of(listed) == Some(tag.as_str()) {
            listed.annotations.remove(annotation::REF_NAME);
        }
    }
    index.manifests.retain(|listed| listed.digest != entry.digest || tag_of(listed).is_some());
    index.manifests.push(entry.with_annotation(annotation::REF_NAME, tag.as_str()));
}

/// Finds the manifests of an artifact type whose subject is `wanted`, in the list and among the
/// children of what is listed; those of a checkpoint have no subject. What is listed as an artifact and cannot be read is among them, as it may be one: whoever
/// reads it gets to know why it cannot be had. Anything else unreadable is passed over.
pub(super) fn referrers(
    root: &Path,
    wanted: &Digest,
    artifact_type: Option<&str>,
) -> Result<Vec<Descriptor>, StoreErrorKind> {
    let mut found = Vec::new();
    let mut seen = BTreeSet::new();
    let mut left = read(root)?.manifests;
    let limit = left.len().saturating_add(MANIFESTS_MAX);
    while let Some(entry) = left.pop() {
        // Who looks for signatures need not read what says that it is something else.
        let passed_over = !may_be(&entry, artifact_type);
        if passed_over && (entry.is_manifest() || is_checkpoint(&entry)) {
            continue;
        }
        if seen.len() >= limit {
            let text = format!("more than {MANIFESTS_MAX} manifests");
            return Err(StoreErrorKind::Io(io::Error::new(io::ErrorKind::QuotaExceeded, text)));
        }
        let readable = entry.is_index() || entry.is_manifest();
        if !readable || !seen.insert(entry.digest.clone()) {
            continue;
        }
        let Ok(stored) = load(root, &entry.digest, Some(&entry)) else {
            found.extend(Some(entry).filter(is_other_artifact));
            continue;
        };
        let Ok(outline) = Outline::parse(&stored.content, Some(&entry.media_type)) else {
            continue;
        };
        if outline.subject.as_ref().is_some_and(|subject| subject.digest == *wanted) {
            found.push(outline.referrer(&stored.descriptor));
        }
        if outline.artifact_type.as_deref() != Some(media_type::CHECKPOINT) {
            left.extend(outline.manifests);
        }
    }
    found.retain(|entry| may_be(entry, artifact_type));
    found.sort_by(|one, other| one.digest.cmp(&other.digest));
    Ok(found)
}

fn is_checkpoint(entry: &Descriptor) -> bool {
    entry.artifact_type.as_deref() == Some(media_type::CHECKPOINT)
}

/// Whether an entry says that it is an artifact, and no checkpoint: signatures are such.
fn is_other_artifact(entry: &Descriptor) -> bool {
    entry.artifact_type.is_some() && !is_checkpoint(entry)
}

fn tag_of(entry: &Descriptor) -> Option<&str> {
    entry.annotations.get(annotation::REF_NAME).map(String::as_str)
}
