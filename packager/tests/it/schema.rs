//! The schemas of what `kyb … --json` prints, and of policies.

use std::path::Path;

use kybernate_packager::difference::Difference;
use kybernate_packager::inspect::Inspected;
use kybernate_packager::listing::{Chain, Listing};
use kybernate_packager::policy::Policy;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::Value;

use crate::dump::dump;
use crate::kyb::kyb;

fn schema_of<T: JsonSchema>() -> Value {
    let generator = SchemaSettings::draft2020_12().for_serialize().into_generator();
    generator.into_root_schema_for::<T>().to_value()
}

fn schema() -> Value {
    schema_of::<Inspected>()
}

/// The schemas that others read are those of the types. `UPDATE=1 cargo test` writes them anew.
#[test]
fn the_schemas_are_up_to_date() {
    for (name, schema) in [
        ("inspect", schema()),
        ("diff", schema_of::<Difference>()),
        ("ls", schema_of::<Listing>()),
        ("tree", schema_of::<Chain>()),
        ("policy", Policy::schema()),
    ] {
        let file = format!("../spec/schema/{name}.json");
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let generated = serde_json::to_string_pretty(&schema).unwrap() + "\n";
        if std::env::var_os("UPDATE").is_some() {
            fs_err::write(&path, &generated).unwrap();
        }
        let committed = fs_err::read_to_string(&path).unwrap_or_default();
        assert_eq!(committed, generated, "run `UPDATE=1 cargo test` and commit spec/schema");
    }
}

/// What is printed has every member that the schema requires, and none that it does not know.
#[tokio::test]
async fn what_is_printed_has_the_members_of_the_schema() {
    let scratch = tempfile::tempdir().unwrap();
    dump(scratch.path(), 3);
    let packed = kyb(scratch.path(), ["pack", "dump", "oci:layout:v1"]).await;
    assert_eq!(packed.code, 0, "{packed:?}");
    let printed = kyb(scratch.path(), ["inspect", "oci:layout:v1", "--json"]).await.json();
    let schema = schema();
    for required in schema["required"].as_array().unwrap() {
        assert!(printed.get(required.as_str().unwrap()).is_some(), "{required} is missing");
    }
    for member in printed.as_object().unwrap().keys() {
        assert!(schema["properties"].get(member).is_some(), "{member} is not in the schema");
    }
}
