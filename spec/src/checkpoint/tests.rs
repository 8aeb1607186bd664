use std::path::Path;

use serde_json::Value;

use super::CheckpointConfig;

/// The schema that others read is that of the types. `UPDATE=1 cargo test` writes it anew.
#[test]
fn the_schema_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/config.json");
    let schema = schemars::schema_for!(CheckpointConfig);
    let generated = serde_json::to_string_pretty(&schema).unwrap() + "\n";
    if std::env::var_os("UPDATE").is_some() {
        fs_err::write(&path, &generated).unwrap();
    }
    let committed = fs_err::read_to_string(&path).unwrap_or_default();
    assert_eq!(committed, generated, "run `UPDATE=1 cargo test` and commit spec/schema");
}

/// Looks up what a pointer's last part is allowed to be, following references.
fn property<'a>(schema: &'a Value, path: &[&str]) -> &'a Value {
    let mut at = schema;
    for name in path {
        if let Some(reference) = at["$ref"].as_str() {
            at = schema.pointer(reference.trim_start_matches('#')).unwrap();
        }
        at = &at["properties"][*name];
        // An optional object is one of two.
        if let Some(either) = at["anyOf"].as_array() {
            at = &either[0];
        }
        assert!(!at.is_null(), "the schema has no {name:?} of {path:?}");
    }
    at
}

/// Every field that the prose lists is in the schema under that name.
#[test]
fn the_schema_has_the_fields_of_the_prose() {
    let schema = schemars::schema_for!(CheckpointConfig).to_value();
    for path in [
        &["version"][..],
        &["created"],
        &["notAfter"],
        &["source", "podTemplateHash"],
        &["source", "imageDigest"],
        &["lineage", "generation"],
        &["node", "pageBytes"],
        &["node", "cpu", "features"],
        &["node", "cpu", "xsave", "bytesMax"],
        &["node", "seccomp"],
        &["node", "devices"],
        &["node", "gpu", "devices"],
        &["needs", "hostNamespaces"],
        &["needs", "identity", "noNewPrivileges"],
        &["device", "storage"],
        &["device", "gpus"],
        &["device", "streams"],
        &["sizes", "dumpBytes"],
        &["sizes", "bulkBytes"],
        &["sizes", "pageBytes"],
    ] {
        property(&schema, path);
    }
    assert_eq!(schema["required"], serde_json::json!(["version"]));
}
