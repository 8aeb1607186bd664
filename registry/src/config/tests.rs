use std::collections::BTreeSet;

use clap::Parser as _;
use serde_json::json;

use super::*;
use crate::cli::{Args, Command};

fn serve(arguments: &[&str]) -> Settings {
    let command = ["kybernate-registry", "serve"].iter().chain(arguments);
    match Args::try_parse_from(command).unwrap().command {
        Command::Serve(settings) => settings,
        other => panic!("{other:?}"),
    }
}

/// What is said, without the list of all settings, which grows.
fn told(wrong: &[Mistake]) -> String {
    let line = |mistake: &Mistake| {
        let line = mistake.to_string();
        match line.split_once("`, expected one of `root`") {
            Some((before, _all)) => format!("{before}`, expected one of …"),
            None => line,
        }
    };
    wrong.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn read(text: &str) -> Result<Config, Vec<Mistake>> {
    Config::read(Path::new("r.toml"), text)
}

#[test]
fn nothing_need_be_set() {
    let config = Config::load(&serve(&[])).unwrap();
    assert_eq!(config.listen.as_str(), "127.0.0.1:5000");
    assert_eq!(config.log.format, LogFormat::Text);
}

#[test]
fn options_win_over_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("r.toml");
    let text = "listen = \"[::1]:1\"\n[log]\nformat = \"json\"\n[connections]\nmax = 7\n";
    fs_err::write(&file, text).unwrap();
    let file = file.to_str().unwrap();
    let given = ["--config", file, "--log-format", "text", "--connections-drain", "1m 30s"];
    let config = Config::load(&serve(&given)).unwrap();
    assert_eq!(config.listen.as_str(), "[::1]:1");
    assert_eq!(config.log.format, LogFormat::Text);
    assert_eq!(config.connections.max, 7);
    assert_eq!(config.connections.drain.0.as_secs(), 90);
}

#[test]
fn everything_that_is_wrong_with_a_file_is_said_at_once_with_its_place() {
    let wrong = read(
        r#"root = ""
lissten = "127.0.0.1:5000"
listen = "nowhere"

[log]
format = "xml"
filter = "a=b=c"
colour = true

[connections]
max = 0
drain = "25 parsecs"
idle = 90
unread = "3days"

[tiers]
ram = 1
"#,
    )
    .unwrap_err();
    insta::assert_snapshot!(told(&wrong), @r#"
    r.toml:1:8: root: is empty; name the directory that holds everything
    r.toml:2:1: lissten: unknown setting `lissten`, expected one of …
    r.toml:3:10: listen: invalid value: string "nowhere", expected an address such as "127.0.0.1:5000"
    r.toml:6:10: log.format: unknown variant `xml`, expected `text` or `json`
    r.toml:7:10: log.filter: "a=b=c" is no filter (error parsing level filter: expected one of "off", "error", "warn", "info", "debug", "trace", or a number 0-5); write a level such as "info", or rules such as "warn,kybernate_registry=debug"
    r.toml:8:1: log.colour: unknown setting `colour`, expected one of `format`, `filter`, `access`
    r.toml:11:7: connections.max: 0 is out of range; write a number from 1 to 1000000
    r.toml:12:9: connections.drain: invalid value: string "25 parsecs", expected a time such as "90s" or "24h"
    r.toml:13:8: connections.idle: invalid type: integer `90`, expected a time such as "90s" or "24h"
    r.toml:14:10: connections.unread: 3days is out of range; write a time from 1s to 1day
    r.toml:16:2: tiers: unknown setting `tiers`, expected one of …
    "#);
}

#[test]
fn what_is_no_toml_is_said_too() {
    let text = "root = \nlisten = 7\n[connections]\nmax = 1.5\nmax = 2\n";
    let wrong = read(text).unwrap_err();
    insta::assert_snapshot!(told(&wrong), @r#"
    r.toml:1:8: string values must be quoted, expected literal string
    r.toml:2:10: listen: invalid type: integer `7`, expected an address such as "127.0.0.1:5000"
    r.toml:4:7: connections.max: invalid type: floating point `1.5`, expected a whole number
    r.toml:5:1: duplicate key
    "#);
}

#[test]
fn options_are_called_by_name() {
    let given = [
        "--root",
        "/dev/null",
        "--listen",
        "nowhere",
        "--log-format",
        "xml",
        "--connections-max",
        "many",
    ];
    let wrong = Config::load(&serve(&given)).unwrap_err();
    insta::assert_snapshot!(told(&wrong), @r#"
    --connections-max: invalid type: string "many", expected a whole number
    --listen: invalid value: string "nowhere", expected an address such as "127.0.0.1:5000"
    --log-format: unknown variant `xml`, expected `text` or `json`
    --root: /dev/null is not a directory; name one
    "#);
}

#[test]
fn a_name_in_the_environment_that_is_no_setting_is_a_mistake() {
    let names = |names: &[&str]| {
        told(&Settings::unknown(
            names.iter().map(std::ffi::OsString::from).collect::<Vec<_>>().into_iter(),
        ))
    };
    insta::assert_snapshot!(
        names(&["KYBERNATE_REGISTRY_LISTN", "KYBERNATE_REGISTRY_ROOT", "KYBERNATE_AGENT_X"]),
        @"KYBERNATE_REGISTRY_LISTN: names no setting; did you mean KYBERNATE_REGISTRY_LISTEN?"
    );
    // What Kubernetes sets for services called kybernate-registry and kybernate-registry-metrics.
    assert_eq!(
        names(&[
            "KYBERNATE_REGISTRY_SERVICE_HOST",
            "KYBERNATE_REGISTRY_SERVICE_PORT",
            "KYBERNATE_REGISTRY_SERVICE_PORT_HTTP",
            "KYBERNATE_REGISTRY_PORT",
            "KYBERNATE_REGISTRY_PORT_5000_TCP",
            "KYBERNATE_REGISTRY_PORT_5000_TCP_ADDR",
            "KYBERNATE_REGISTRY_METRICS_SERVICE_HOST",
            "KYBERNATE_REGISTRY_METRICS_PORT_9090_TCP_PROTO",
        ]),
        ""
    );
}

/// Every leaf of the schema with its path.
fn leaves(schema: &serde_json::Value, path: &str, all: &mut Vec<(String, serde_json::Value)>) {
    match schema.get("properties").and_then(|properties| properties.as_object()) {
        Some(properties) => {
            assert_eq!(schema["additionalProperties"], json!(false), "{path} takes unknown keys");
            for (name, schema) in properties {
                assert!(schema["description"].is_string(), "{path}.{name} has no doc comment");
                leaves(schema, format!("{path}.{name}").trim_start_matches('.'), all);
            }
        }
        None => all.push((path.to_owned(), schema.clone())),
    }
}

#[test]
fn the_schema_is_that_of_the_types() {
    let schema = Config::schema();
    let (mut all, mut environment) = (Vec::new(), BTreeSet::new());
    leaves(&schema, "", &mut all);
    assert!(all.len() > 5);
    for (path, schema) in all {
        // Each setting refuses a type that its schema does not name, and says where.
        let wrong = read(&format!("{path} = 1979-05-27")).unwrap_err();
        assert_eq!(wrong.len(), 1, "{wrong:?}");
        assert_eq!((&*wrong[0].setting, wrong[0].place.at), (&*path, Some((1, path.len() + 4))));
        // Each default is one that may be written.
        if let Some(default) = schema.get("default").filter(|default| !default.is_null()) {
            read(&format!("{path} = {default}")).unwrap();
        }
        // `[a] b_c` and `[a.b] c` would share a name; and none may look like Kubernetes' own.
        let name = format!("KYBERNATE_REGISTRY_{}", path.replace('.', "_").to_uppercase());
        let name = std::ffi::OsString::from(name);
        let misnamed = [name.clone(), "KYBERNATE_REGISTRY_PORT".into()];
        assert_eq!(Settings::unknown(misnamed.into_iter()), [], "{path}");
        assert!(environment.insert(name), "{path} shares its name");
    }
    assert_eq!(read("").unwrap().log.filter, "info");
}

#[test]
fn sizes_and_times_read_back_as_they_are_written() {
    for bytes in [0, 1, 1023, 1024, 1 << 20, 3 << 30, (1 << 40) + 1, 10_000_000] {
        let text = json!(Size(bytes));
        assert_eq!(serde_json::from_value::<Size>(text.clone()).unwrap(), Size(bytes), "{text}");
    }
    for (text, bytes) in [("10GiB", 10 << 30), ("500MB", 500_000_000), ("7", 7)] {
        assert_eq!(serde_json::from_value::<Size>(json!(text)).unwrap(), Size(bytes));
    }
    assert_eq!(serde_json::from_value::<Size>(json!(12)).unwrap(), Size(12));
    serde_json::from_value::<Size>(json!(-1)).unwrap_err();
    serde_json::from_value::<Size>(json!("ten")).unwrap_err();
    for seconds in [0, 1, 90, 86_400 * 3 + 1] {
        let period = Period(Duration::from_secs(seconds));
        assert_eq!(serde_json::from_value::<Period>(json!(period)).unwrap(), period);
    }
}

#[test]
fn an_address_is_a_host_and_a_port() {
    let read = |text: &str| serde_json::from_value::<Address>(json!(text)).is_ok();
    for good in ["127.0.0.1:5000", "[::]:0", "localhost:5000", "registry.local:443"] {
        assert!(read(good), "{good}");
    }
    for bad in ["", "5000", ":5000", "localhost", "a b:1", "h:65536", "::1:80", "http://h:1"] {
        assert!(!read(bad), "{bad}");
    }
}
