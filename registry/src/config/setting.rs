//! Every setting by name, made from the types: options, the environment, the schema.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use schemars::generate::SchemaSettings;
use serde_json::Value;

use super::document::Sources;
use super::{Config, Mistake, Origin, Place};

const PREFIX: &str = "KYBERNATE_REGISTRY_";
const FILE: &str = "config";
/// Options that have a second, shorter name.
const SHORT: [(&str, &str); 1] = [("log-filter", "log")];

static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| {
    let mut settings = Vec::new();
    collect(&schema(), &mut Vec::new(), &mut settings);
    settings
});

/// One value that can be set.
#[derive(Debug)]
pub(super) struct Setting {
    pub(super) path: Vec<String>,
    option: String,
    environment: String,
    help: String,
    value_name: String,
    text: bool,
}

/// What the command line and the environment set.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    file: Option<PathBuf>,
    given: Vec<Given>,
}

/// One setting's value as it was typed.
#[derive(Debug, Clone)]
pub(super) struct Given {
    pub(super) setting: &'static Setting,
    pub(super) origin: Origin,
    text: String,
}

impl Setting {
    /// Whether its value is a string, so that what is typed is meant literally.
    pub(super) fn is_text(&self) -> bool {
        self.text
    }
}

impl Settings {
    /// Whether an option was typed or its name in the environment is set.
    pub fn is_given(&self, option: &str) -> bool {
        self.given.iter().any(|given| given.setting.option == option)
    }

    pub(super) fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    pub(super) fn given(&self) -> &[Given] {
        &self.given
    }

    pub(super) fn sources(&self, sources: &mut Sources) {
        for Given { origin, text, .. } in &self.given {
            sources.add(origin.clone(), text.clone());
        }
    }

    /// Returns names in `environment` that look like ours and are none: a typing error there would
    /// otherwise go unnoticed.
    pub(super) fn unknown(environment: impl Iterator<Item = OsString>) -> Vec<Mistake> {
        let names = environment.filter_map(|name| name.into_string().ok());
        let ours = names.filter(|name| name.starts_with(PREFIX) && !is_service_link(name));
        let unknown = ours.filter(|name| known().all(|known| known != name));
        unknown
            .map(|name| Mistake {
                told: format!("names no setting; did you mean {}?", nearest(&name)),
                place: Place { origin: Origin::Environment(name), at: None },
                setting: String::new(),
            })
            .collect()
    }
}

fn known() -> impl Iterator<Item = &'static str> {
    SETTINGS.iter().map(|setting| &*setting.environment).chain(["KYBERNATE_REGISTRY_CONFIG"])
}

fn nearest(name: &str) -> &'static str {
    let close = |known: &&str| strsim::damerau_levenshtein(known, name);
    known().min_by_key(close).unwrap_or_default()
}

/// Whether a name is one that Kubernetes puts into every container of a namespace that has a
/// service called `kybernate-registry` or `kybernate-registry-…`.
fn is_service_link(name: &str) -> bool {
    let words: Vec<_> = name.split('_').collect();
    let port = words.iter().rposition(|word| *word == "PORT");
    words.ends_with(&["SERVICE", "HOST"])
        || port.is_some_and(|at| match words.get(at + 1..) {
            None | Some([]) => true,
            Some([number, ..]) => {
                words.get(at.wrapping_sub(1)) == Some(&"SERVICE") || number.parse::<u16>().is_ok()
            }
        })
}

/// Returns the JSON schema of the configuration, without references.
pub(super) fn schema() -> Value {
    let settings =
        SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    settings.into_generator().into_root_schema_for::<Config>().to_value()
}

fn collect(schema: &Value, path: &mut Vec<String>, settings: &mut Vec<Setting>) {
    let Some(Value::Object(properties)) = schema.get("properties") else {
        settings.push(Setting::new(schema, path));
        return;
    };
    for (name, schema) in properties {
        path.push(name.clone());
        collect(schema, path, settings);
        path.pop();
    }
}

impl Setting {
    fn new(schema: &Value, path: &[String]) -> Self {
        let types = types(schema);
        let help = schema.get("description").and_then(Value::as_str).unwrap_or_default();
        let default = match schema.get("default") {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => format!(" [default: {text}]"),
            Some(other) => format!(" [default: {other}]"),
        };
        Self {
            path: path.to_vec(),
            option: path.join("-").replace('_', "-"),
            environment: format!("{PREFIX}{}", path.join("_").to_uppercase()),
            help: format!("{}{default}", help.replace('\n', " ")),
            value_name: value_name(schema, &types),
            text: types.iter().any(|kind| kind == "string"),
        }
    }
}

/// Returns the JSON types a value may have.
fn types(schema: &Value) -> Vec<String> {
    let names = |value: &Value| match value {
        Value::String(name) => vec![name.clone()],
        Value::Array(names) => names.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    };
    let own = schema.get("type").map(names).unwrap_or_default();
    let alternatives = ["anyOf", "oneOf"].iter().filter_map(|key| schema.get(key)?.as_array());
    own.into_iter().chain(alternatives.flatten().flat_map(types)).collect()
}

fn value_name(schema: &Value, types: &[String]) -> String {
    let words = |values: &[Value]| {
        let words: Vec<_> = values.iter().filter_map(Value::as_str).collect();
        Some(words.join("|")).filter(|words| !words.is_empty())
    };
    let one = schema.get("enum").and_then(Value::as_array).and_then(|values| words(values));
    let many = schema.get("oneOf").and_then(Value::as_array).and_then(|kinds| {
        words(&kinds.iter().filter_map(|kind| kind.get("const").cloned()).collect::<Vec<_>>())
    });
    let format = schema.get("format").and_then(Value::as_str).map(str::to_uppercase);
    let kind = || match types.first().map(String::as_str) {
        Some("boolean") => "true|false",
        Some("integer" | "number") => "NUMBER",
        Some("array" | "object") => "TOML",
        _ => "VALUE",
    };
    let format = format.filter(|_| types.iter().any(|kind| kind == "string"));
    one.or(many).or(format).unwrap_or_else(|| kind().to_owned())
}

impl Settings {
    /// Adds the options whose path begins with one of `sections`, or all of them.
    fn options(command: Command, sections: Option<&[&str]>) -> Command {
        let file = Arg::new(FILE)
            .long(FILE)
            .env("KYBERNATE_REGISTRY_CONFIG")
            .value_name("FILE")
            .value_parser(clap::value_parser!(PathBuf))
            .help("Configuration file (TOML); `verify` checks one, `schema` describes it");
        let wanted = |setting: &&Setting| {
            let section = setting.path.first().map_or("", String::as_str);
            sections.is_none_or(|sections| sections.contains(&section))
        };
        SETTINGS.iter().filter(wanted).fold(command.arg(file), |command, setting| {
            let arg = Arg::new(&*setting.option)
                .long(&*setting.option)
                .env(&*setting.environment)
                .hide_env_values(true)
                .value_name(&*setting.value_name)
                .value_parser(clap::value_parser!(OsString))
                .allow_hyphen_values(true)
                .help(&*setting.help);
            let short = SHORT.iter().filter(|(option, _)| *option == setting.option);
            command.arg(arg.visible_aliases(short.map(|(_, alias)| *alias)))
        })
    }
}

/// What the command `gc` takes: other settings are for the server.
#[derive(Debug, Clone)]
pub struct GcSettings(pub Settings);

/// What the command `scrub` takes: other settings are for the server.
#[derive(Debug, Clone)]
pub struct ScrubSettings(pub Settings);

/// What the command `reindex` takes: other settings are for the server.
#[derive(Debug, Clone)]
pub struct ReindexSettings(pub Settings);

impl clap::Args for Settings {
    fn augment_args(command: Command) -> Command {
        Self::options(command, None)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::Args for GcSettings {
    fn augment_args(command: Command) -> Command {
        Settings::options(command, Some(&["root", "root_wait", "log", "gc"]))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::Args for ScrubSettings {
    fn augment_args(command: Command) -> Command {
        Settings::options(command, Some(&["root", "root_wait", "log", "scrub"]))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::Args for ReindexSettings {
    fn augment_args(command: Command) -> Command {
        Settings::options(command, Some(&["root", "root_wait", "log"]))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl clap::FromArgMatches for GcSettings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Settings::from_arg_matches(matches).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.update_from_arg_matches(matches)
    }
}

impl clap::FromArgMatches for ScrubSettings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Settings::from_arg_matches(matches).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.update_from_arg_matches(matches)
    }
}

impl clap::FromArgMatches for ReindexSettings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Settings::from_arg_matches(matches).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.update_from_arg_matches(matches)
    }
}

impl clap::FromArgMatches for Settings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut settings = Self::default();
        settings.update_from_arg_matches(matches)?;
        Ok(settings)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.file = matches.get_one(FILE).cloned();
        for setting in SETTINGS.iter() {
            // A command does not take all of them.
            let given = matches.try_get_one::<OsString>(&setting.option);
            let Ok(Some(value)) = given else { continue };
            let origin = match matches.value_source(&setting.option) {
                Some(ValueSource::EnvVariable) => Origin::Environment(setting.environment.clone()),
                _ => Origin::Option(setting.option.clone()),
            };
            let text = OsStr::to_string_lossy(value).into_owned();
            self.given.push(Given { setting, origin, text });
        }
        Ok(())
    }
}
