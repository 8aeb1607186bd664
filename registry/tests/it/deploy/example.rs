//! Writes a configuration file with every setting, from the schema.
//!
//! Prose begins with `# `, a setting that is not set with `#` alone, so that it is set by taking
//! one character away.

use std::fmt::Write as _;

use serde_json::{Map, Value};

const HEAD: &str = r##"# Every setting of kybernate-registry, made from the program's own types.
#
# A line that begins with "#" and no space is a setting with its default, or, where it says so, an
# example of one that has none: take the "#" away to set it. Every setting is also an option and a
# name in the environment, which win: "[log] format" is --log-format is KYBERNATE_REGISTRY_LOG_FORMAT.
#
#   kybernate-registry verify FILE    says everything that is wrong with a file at once
#   kybernate-registry schema         prints the JSON schema
"##;

/// Prose lines are broken here.
const WIDTH: usize = 100;
const EXAMPLE: &str = "(Example.)";

/// Which commented settings are wanted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    Nothing,
    Defaults,
    Everything,
}

/// Sets what is commented out.
pub(super) fn uncommented(text: &str, choice: Choice) -> String {
    let mut out = String::new();
    let mut example = false;
    for line in text.lines() {
        let setting = line.strip_prefix('#').filter(|rest| !rest.starts_with([' ', '#']));
        let setting = setting.filter(|setting| !setting.is_empty());
        if line.starts_with("# ") {
            // An array of tables is an example as a whole.
            example |= line.ends_with(EXAMPLE);
        } else if line.is_empty() {
            example = false;
        }
        match setting {
            Some(setting) if choice == Choice::Everything => out += setting,
            Some(setting) if choice == Choice::Defaults && !example => out += setting,
            _ => out += line,
        }
        out.push('\n');
    }
    out
}

/// Returns the file.
pub(super) fn example(schema: &Value) -> String {
    let mut out = HEAD.to_owned();
    table(&mut out, "", &schema["properties"]);
    out
}

fn properties(schema: &Value) -> Option<&Map<String, Value>> {
    schema.get("properties")?.as_object()
}

fn table(out: &mut String, path: &str, settings: &Value) {
    let settings = settings.as_object().unwrap();
    let is_table = |schema: &Value| properties(schema).is_some();
    let is_list = |schema: &Value| schema.get("items").is_some_and(is_table);
    for (key, schema) in settings.iter().filter(|(_, schema)| !is_table(schema) && !is_list(schema))
    {
        setting(out, key, schema);
    }
    for (key, schema) in settings.iter().filter(|(_, schema)| is_list(schema)) {
        list(out, &format!("{path}{key}"), schema);
    }
    for (key, schema) in settings.iter().filter(|(_, schema)| is_table(schema)) {
        let path = format!("{path}{key}");
        out.push('\n');
        prose(out, told(schema));
        writeln!(out, "[{path}]").unwrap();
        table(out, &format!("{path}."), &schema["properties"]);
    }
}

fn setting(out: &mut String, key: &str, schema: &Value) {
    out.push('\n');
    if let Some(default) = schema.get("default").filter(|default| !default.is_null()) {
        prose(out, told(schema));
        writeln!(out, "#{key} = {default}").unwrap();
    } else {
        prose(out, &format!("{} {EXAMPLE}", told(schema)));
        writeln!(out, "#{key} = {}", sample(key, schema)).unwrap();
    }
}

/// Writes one element of an array of tables.
fn list(out: &mut String, path: &str, schema: &Value) {
    out.push('\n');
    prose(out, &format!("{} {EXAMPLE}", told(schema)));
    writeln!(out, "#[[{path}]]").unwrap();
    for (key, schema) in properties(&schema["items"]).unwrap() {
        prose(out, told(schema));
        let default = schema.get("default").filter(|default| is_set(default));
        let value = default.cloned().unwrap_or_else(|| sample(key, schema));
        writeln!(out, "#{key} = {value}").unwrap();
    }
}

/// Whether a default is more than nothing.
fn is_set(default: &Value) -> bool {
    !(default.is_null() || default.as_array().is_some_and(Vec::is_empty) || default == false)
}

fn told(schema: &Value) -> &str {
    schema["description"].as_str().unwrap()
}

/// Returns a value that may be written: the schema's example, or one of the type.
fn sample(key: &str, schema: &Value) -> Value {
    let given = schema.get("examples").and_then(|examples| examples.get(0));
    let kinds = &schema["type"];
    let is = |kind: &str| {
        kinds == kind || kinds.as_array().is_some_and(|kinds| kinds.iter().any(|one| one == kind))
    };
    match given {
        Some(given) => given.clone(),
        None if schema["format"] == "file" => format!("/etc/kybernate/registry/{key}").into(),
        None if is("integer") => 100.into(),
        None if is("boolean") => true.into(),
        None if is("array") => Value::Array(vec![sample(key, &schema["items"])]),
        None => key.into(),
    }
}

/// Writes a text as comment, in lines that are not too long.
fn prose(out: &mut String, text: &str) {
    let mut line = "#".to_owned();
    for word in text.split_whitespace() {
        if line.len() + 1 + word.len() > WIDTH {
            writeln!(out, "{line}").unwrap();
            line.truncate(1);
        }
        write!(line, " {word}").unwrap();
    }
    writeln!(out, "{line}").unwrap();
}
