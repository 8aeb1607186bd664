//! What a policy file may have, for editors. A test holds it to what is read.

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::Deserialize;

/// Who must have signed checkpoints before they are used. What no rule speaks of is refused; of all
/// rules that speak of a checkpoint, one key is enough, and the mildest mode counts.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its shape counts: `Policy` has the values")]
#[schemars(title = "Kybernate trust policy")]
struct File {
    /// The rules, in any order.
    #[schemars(length(min = 1))]
    rule: Vec<Rule>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its shape counts")]
struct Rule {
    /// What messages call it; unique.
    name: Option<String>,
    /// Patterns of repositories with their registry, as `registry.example.com/team/**`, or of image
    /// layouts, as `oci:/media/**`. `*` is any text without a `/`, `**` any text.
    #[schemars(length(min = 1))]
    repositories: Vec<String>,
    /// Patterns of the namespaces in which checkpoints were taken; any by default.
    #[schemars(length(min = 1))]
    source_namespaces: Option<Vec<String>>,
    /// Patterns of the namespaces that checkpoints may go into; the source's own by default.
    #[schemars(length(min = 1))]
    target_namespaces: Option<Vec<String>>,
    /// Public keys, one of which must have signed: paths, relative to the policy file, or PEM texts.
    /// Needed unless `mode` is `off`.
    #[schemars(length(min = 1))]
    keys: Option<Vec<String>>,
    /// What happens without such a signature; `enforce` by default.
    mode: Option<Mode>,
    /// The rule counts from then on: a TOML date-time with its offset.
    #[schemars(with = "Option<String>")]
    not_before: Option<toml::value::Datetime>,
    /// The rule counts until then.
    #[schemars(with = "Option<String>")]
    not_after: Option<toml::value::Datetime>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Mode {
    /// The checkpoint is refused.
    Enforce,
    /// It is used, and that is told.
    Warn,
    /// Signatures are not looked at.
    Off,
}

pub(super) fn schema() -> serde_json::Value {
    let generator = SchemaSettings::draft2020_12().into_generator();
    generator.into_root_schema_for::<File>().to_value()
}

/// Whether a text is a policy file by its types alone, for the test.
#[cfg(test)]
pub(super) fn is_shaped(text: &str) -> Result<(), toml::de::Error> {
    toml::from_str::<File>(text).map(|_| ())
}
