//! What `index.json` says, with what we do not know of.

use kybernate_spec::{Annotations, Descriptor, Index, annotation, document, media_type};
use serde::de::Error as _;
use serde_json::{Map, Value, json};

const MANIFESTS: &str = "manifests";
const ANNOTATIONS: &str = "annotations";

type Object = Map<String, Value>;

/// The document as it was read.
#[derive(Debug)]
pub(super) struct List {
    /// Everything but the entries.
    rest: Object,
    head: Index,
    entries: Vec<Entry>,
}

/// One entry: as it was read, and as we know it when we do.
#[derive(Debug)]
struct Entry {
    read: Value,
    known: Option<Descriptor>,
}

impl List {
    /// Reads a document in which nothing is twice.
    pub(super) fn parse(content: &[u8]) -> Result<Self, serde_json::Error> {
        let mut rest: Object = document::parse(content)?;
        let Some(Value::Array(entries)) = rest.remove(MANIFESTS) else {
            return Err(serde_json::Error::custom("its \"manifests\" are no list"));
        };
        let mut shell = rest.clone();
        shell.insert(MANIFESTS.to_owned(), json!([]));
        let head = serde_json::from_value(Value::Object(shell))?;
        let entries = entries.into_iter().map(Entry::of).collect();
        Ok(Self { rest, head, entries })
    }

    /// Returns the list of a layout that holds nothing.
    pub(super) fn empty() -> Self {
        let head = Index {
            schema_version: 2,
            media_type: Some(media_type::OCI_INDEX.to_owned()),
            artifact_type: None,
            manifests: Vec::new(),
            subject: None,
            annotations: Annotations::new(),
        };
        let mut rest = Object::new();
        rest.insert("schemaVersion".to_owned(), json!(2));
        rest.insert("mediaType".to_owned(), json!(media_type::OCI_INDEX));
        Self { rest, head, entries: Vec::new() }
    }

    /// Returns what we know of it.
    pub(super) fn known(&self) -> Index {
        let known = self.entries.iter().filter_map(|entry| entry.known.clone());
        Index { manifests: known.collect(), ..self.head.clone() }
    }

    /// Returns why the entry with a tag is not known, when there is one.
    pub(super) fn wrong_with(&self, tag: &str) -> Option<serde_json::Error> {
        let entry = self.entries.iter().find(|entry| entry.tag() == Some(tag))?;
        serde_json::from_value::<Descriptor>(entry.read.clone()).err()
    }

    /// Writes it with other known entries. Of one that was there, only what differs is written anew.
    pub(super) fn changed(mut self, index: &Index) -> Result<Vec<u8>, serde_json::Error> {
        let tags: Vec<_> = index.manifests.iter().filter_map(tag_of).collect();
        let mut entries = Vec::new();
        let mut before: Vec<(Value, Descriptor)> = Vec::new();
        for mut entry in self.entries {
            if entry.tag().is_some_and(|tag| entry.known.is_none() && tags.contains(&tag)) {
                entry.untag();
            }
            match entry.known {
                Some(known) => before.push((entry.read, known)),
                None => entries.push(entry.read),
            }
        }
        for after in &index.manifests {
            let same = before.iter().position(|(_, known)| known == after);
            let alike = || before.iter().position(|(_, known)| known.digest == after.digest);
            match same.or_else(alike).map(|at| before.remove(at)) {
                Some((read, known)) => entries.push(merged(read, &known, after)?),
                None => entries.push(serde_json::to_value(after)?),
            }
        }
        self.rest.insert(MANIFESTS.to_owned(), Value::Array(entries));
        serde_json::to_vec(&self.rest)
    }
}

impl Entry {
    fn of(read: Value) -> Self {
        let known = serde_json::from_value(read.clone());
        if let Err(error) = &known {
            tracing::debug!(%error, "an entry of a layout's list is passed over");
        }
        Self { read, known: known.ok() }
    }

    fn tag(&self) -> Option<&str> {
        self.read.get(ANNOTATIONS)?.get(annotation::REF_NAME)?.as_str()
    }

    fn untag(&mut self) {
        if let Some(Value::Object(annotations)) = self.read.get_mut(ANNOTATIONS) {
            annotations.remove(annotation::REF_NAME);
        }
    }
}

/// Returns `read` with the members that differ between the two.
fn merged(
    read: Value,
    before: &Descriptor,
    after: &Descriptor,
) -> Result<Value, serde_json::Error> {
    let (Value::Object(mut merged), Value::Object(before), Value::Object(after)) =
        (read, serde_json::to_value(before)?, serde_json::to_value(after)?)
    else {
        return Err(serde_json::Error::custom("a descriptor is no object"));
    };
    for name in before.keys().filter(|name| !after.contains_key(*name)) {
        merged.remove(name);
    }
    for (name, value) in after {
        if before.get(&name) != Some(&value) {
            merged.insert(name, value);
        }
    }
    Ok(Value::Object(merged))
}

fn tag_of(entry: &Descriptor) -> Option<&str> {
    entry.annotations.get(annotation::REF_NAME).map(String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(of: &[u8]) -> kybernate_spec::Digest {
        kybernate_spec::Digest::of(of)
    }

    #[test]
    fn what_is_foreign_stays_when_something_else_changes() {
        let foreign = json!({
            "mediaType": media_type::OCI_MANIFEST, "digest": digest(b"a"), "size": 1,
            "platform": {"os": "linux", "architecture": "amd64", "features": ["sse4"]},
            "com.example": {"kept": [1]},
            "annotations": {annotation::REF_NAME: "v1", "b": "c"},
        });
        let unknown = json!({
            "mediaType": media_type::OCI_MANIFEST, "digest": "blake3:00", "size": 1,
            "annotations": {annotation::REF_NAME: "v2"},
        });
        let document = json!({
            "schemaVersion": 2, "com.example": true, "manifests": [foreign, unknown],
        });
        let list = List::parse(document.to_string().as_bytes()).unwrap();
        let mut index = list.known();
        assert_eq!(index.manifests.len(), 1);
        assert!(list.wrong_with("v2").is_some() && list.wrong_with("v1").is_none());

        let written = list.changed(&index).unwrap();
        let same: Value = serde_json::from_slice(&written).unwrap();
        assert_eq!(same["manifests"], json!([unknown, foreign]));
        assert_eq!(same["com.example"], json!(true));

        // Both tags go to something new.
        index.manifests[0].annotations.remove(annotation::REF_NAME);
        for tag in ["v1", "v2"] {
            let new = Descriptor::new(media_type::OCI_MANIFEST, digest(b"n"), 1);
            index.manifests.push(new.with_annotation(annotation::REF_NAME, tag));
        }
        let list = List::parse(document.to_string().as_bytes()).unwrap();
        let written: Value = serde_json::from_slice(&list.changed(&index).unwrap()).unwrap();
        let entries = written["manifests"].as_array().unwrap();
        assert_eq!(entries.len(), 4);
        assert_eq!(entries[0]["annotations"], json!({}));
        assert_eq!(entries[1]["annotations"], json!({"b": "c"}));
        assert_eq!(entries[1]["com.example"], foreign["com.example"]);
        assert_eq!(entries[1]["platform"], foreign["platform"]);
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for text in ["[]", "{}", "{\"schemaVersion\":2}", "{\"schemaVersion\":2,\"manifests\":{}}"]
        {
            assert!(List::parse(text.as_bytes()).is_err(), "{text}");
        }
        let twice = "{\"schemaVersion\":2,\"manifests\":[],\"manifests\":[]}";
        assert!(List::parse(twice.as_bytes()).is_err());
    }
}
