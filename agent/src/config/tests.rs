use kybernate_spec::chain;

use super::*;
use crate::metrics::Metrics;

#[expect(clippy::unwrap_in_result, reason = "a failed preparation is a failed test")]
fn check(text: &str) -> Result<Config, Vec<String>> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    io::Write::write_all(&mut file, text.as_bytes()).unwrap();
    let args = ServeArgs { config: Some(file.path().to_owned()), ..ServeArgs::default() };
    args.validate().map_err(|wrong| wrong.iter().map(ToString::to_string).collect())
}

#[test]
fn an_empty_file_is_enough() {
    let config = check("").unwrap();
    assert_eq!(config.root, Path::new("/var/lib/kybernate"));
    assert_eq!(config.pause_deadline, PAUSE_DEADLINE);
    assert_eq!(config.restore_stall, RESTORE_STALL);
    assert!(!config.allow_unsigned && !config.allow_request_keys);
    assert!(config.trust.current(&Metrics::default()).rules().is_empty());
}

#[test]
fn every_mistake_is_told_at_once() {
    let wrong = check(
        "root = 'relative'\nnoise = 1\npause_deadline = '0s'\nrestore_stall = '25h'\nallow_unsigned = 'yes'\n\
         [staging]\nmemory_share = 2\nsize = 1\n\
         [[sign_keys]]\nname = 'a'\n\
         [[trust]]\nkey = '/nowhere/a.pub'\n",
    );
    let wrong = wrong.unwrap_err().join("\n");
    for part in [
        "root must be an absolute path",
        "noise is not a setting",
        "pause_deadline must be a time",
        "restore_stall must be a time like \"30m\", from 1s to 24h",
        "allow_unsigned must be true or false, not string",
        "staging.memory_share must be between 0 and 1",
        "staging.size is not a setting",
        "sign_keys[0].file is missing",
        "trust[0].repository is missing",
        "trust[0].key cannot be used",
    ] {
        assert!(wrong.contains(part), "{part:?} is missing in:\n{wrong}");
    }
}

#[test]
fn keys_are_read_and_their_names_are_unique() {
    let directory = tempfile::tempdir().unwrap();
    let key = SigningKey::generate().unwrap();
    let [private, public] = key.write_files(&directory.path().join("node"), b"secret").unwrap();
    let password = directory.path().join("password");
    fs::write(&password, "secret\n").unwrap();
    let entry =
        format!("[[sign_keys]]\nname = 'node'\nfile = {private:?}\npassword_file = {password:?}\n");
    let trust = format!("[[trust]]\nkey = {public:?}\nrepository = 'r.example/team/*'\n");

    let config = check(&format!("{entry}{trust}")).unwrap();
    assert!(config.sign_key("node").is_some() && config.sign_key("other").is_none());
    assert_eq!(config.trust.current(&Metrics::default()).rules().len(), 1);
    let wrong = check(&format!("{entry}{entry}")).unwrap_err();
    assert_eq!(wrong, ["sign_keys.name is given twice: \"node\""]);
}

#[test]
fn a_policy_is_read_with_the_configuration() {
    let directory = tempfile::tempdir().unwrap();
    let policy = directory.path().join("policy.toml");
    let config = format!("node = 'a'\ntrust_policy = {policy:?}\n");
    let rule = "[[rule]]\nrepositories = ['r.example/team/**']\n";
    fs::write(&policy, format!("{rule}mode = 'off'\n")).unwrap();
    let trust = check(&config).unwrap().trust;
    assert_eq!(trust.current(&Metrics::default()).rules().len(), 1);
    fs::write(&policy, format!("{rule}mode = 'on'\nkeys = []\n")).unwrap();
    let wrong = check(&format!("{config}noise = 1\n")).unwrap_err().join("\n");
    for part in [
        "line 3: noise is not a setting",
        "policy.toml:3:8: rule[0].mode: must be enforce, warn or off",
        "policy.toml:4:8: rule[0].keys: is empty",
    ] {
        assert!(wrong.contains(part), "{part:?} is missing in:\n{wrong}");
    }
    let wrong = check("trust_policy = 'policy.toml'").unwrap_err().join("\n");
    assert!(wrong.contains("line 1: trust_policy must be an absolute path"), "{wrong}");
}

#[test]
fn a_file_that_was_named_must_exist() {
    let args = ServeArgs { config: Some("/nowhere/agent.toml".into()), ..ServeArgs::default() };
    assert!(args.validate().is_err());
}

/// Who opens a FIFO waits for somebody who writes, and a device has no end.
#[test]
fn a_configuration_is_a_file_of_some_size() {
    let place = tempfile::tempdir().unwrap();
    let (fifo, large) = (place.path().join("fifo"), place.path().join("large"));
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, 0o600.into()).unwrap();
    fs::write(&large, "#".repeat(usize::try_from(CONFIG_BYTES_MAX).unwrap() + 1)).unwrap();
    for (file, told) in [
        (fifo, "is no regular file"),
        (PathBuf::from("/dev/zero"), "is no regular file"),
        (large, "has more than 4194304 bytes"),
    ] {
        let args = ServeArgs { config: Some(file), ..ServeArgs::default() };
        let wrong = args.validate().unwrap_err();
        assert!(wrong.iter().any(|one| chain(one).to_string().contains(told)), "{wrong:?}");
    }
}

#[test]
fn a_directory_of_the_systems_is_not_the_agents() {
    for root in ["/", "/var", "/var/", "/data", "/var/lib", "/usr/local", "/a/../../etc"] {
        let wrong = check(&format!("root = '{root}'\n")).unwrap_err().join("\n");
        assert!(wrong.contains("line 1: root must be a directory of the agent's own"), "{wrong}");
    }
    check("root = '/data/kybernate'\n").unwrap();
}

#[test]
fn names_that_nothing_can_have_are_told() {
    let wrong = check(
        "node = ''\ncluster = \"a\\nb\"\n[[registry]]\nhost = 'https://r.example'\n\
         [[registry]]\nhost = 'r.example/team'\n[[trust]]\nkey = '/k.pub'\n\
         repository = 'https://r.example/*'\n",
    );
    let wrong = wrong.unwrap_err().join("\n");
    for part in [
        "line 1: node must be a name without spaces, not \"\"",
        "line 2: cluster must be a name without spaces, not \"a\\nb\"",
        "line 4: registry[0].host must be a registry's HOST[:PORT], without a scheme and a path",
        "line 6: registry[1].host must be",
        "line 9: trust[0].repository must be HOST[:PORT]/NAME, without a scheme",
    ] {
        assert!(wrong.contains(part), "{part:?} is missing in:\n{wrong}");
    }
    for empty in ["registry]]\nhost = ''", "trust]]\nrepository = 'r.example/*'\nkey = ''"] {
        let wrong = check(&format!("[[{empty}\n")).unwrap_err().join("\n");
        assert!(wrong.contains("must be a text that is not empty"), "{wrong}");
    }
    for host in ["10.77.0.1:5000", "localhost:5000", "r.example", "[::1]:5000"] {
        check(&format!("[[registry]]\nhost = '{host}'\n")).unwrap();
    }
    let twice = "[[registry]]\nhost = 'r'\n[[registry]]\nhost = 'r'\nplain_http = true\n";
    let wrong = check(twice).unwrap_err().join("\n");
    assert!(wrong.contains("registry.host") && wrong.contains("\"r\""), "{wrong}");
}

#[test]
fn a_repository_that_nothing_can_be_in_is_told() {
    for never in ["r.example", "r.example/team/", "r.example/a:v1", "r.example/a@sha256:0", "r/a b"]
    {
        assert!(!is_repository(never), "{never}");
    }
    for good in ["*", "r.example/*", "10.77.0.1:5000/team/*", "[::1]:5000/a", "*/a", "r.example*"] {
        assert!(is_repository(good), "{good}");
    }
}

#[test]
fn a_tier_is_there_with_a_budget_and_has_a_directory_of_its_own() {
    let config = check("root = '/srv/k'\n[staging.nvme]\nbudget = '2GiB'\n").unwrap();
    let nvme = TierConfig { directory: "/srv/k/nvme".into(), budget: 2 << 30, verify: true };
    assert_eq!((config.staging.ram, config.staging.nvme), (None, Some(nvme)));
    let unproven = check("[staging.nvme]\nbudget = '2GiB'\nverify = false\n").unwrap();
    assert!(!unproven.staging.nvme.unwrap().verify);
    assert!(check("[staging.ram]\nbudget = '2GiB'\nverify = true\n").is_err());
    // A tmpfs of so many bytes would have no limit.
    assert!(check("[staging.ram]\nbudget = '99999999TiB'\n").is_err());
    let wrong = check(
        "[staging]\ntmpfs = '/run/s'\n[staging.ram]\ndirectory = '/run/s/ram'\nbudget = '1GiB'\n\
         [staging.nvme]\ndirectory = 'near'\nbudget = '7'\nsize = 1\n",
    );
    let wrong = wrong.unwrap_err().join("\n");
    for part in [
        "line 4: staging.ram.directory must be a directory of its own",
        "line 7: staging.nvme.directory must be an absolute path",
        "line 8: staging.nvme.budget must be a size from \"1MiB\" to \"1PiB\", not \"7\"",
        "line 9: staging.nvme.size is not a setting",
    ] {
        assert!(wrong.contains(part), "{part:?} is missing in:\n{wrong}");
    }
}

#[test]
fn mistakes_have_a_line() {
    let wrong = check("node = 'a'\n\n[staging]\nsize = 1\nmemory_share = 2\n[[trust]]\nkey = 3\n");
    let wrong = wrong.unwrap_err().join("\n");
    for part in [
        "line 4: staging.size is not a setting",
        "line 5: staging.memory_share must be between 0 and 1",
        "line 6: trust[0].repository is missing",
        "line 7: trust[0].key must be a text, not integer",
    ] {
        assert!(wrong.contains(part), "{part:?} is missing in:\n{wrong}");
    }
}

#[test]
fn the_environment_wins_and_its_slips_are_told() {
    let given = |names: &[(&str, &str)]| {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("agent.toml");
        fs::write(&file, "page_hashes = false\n[staging]\ntmpfs = '/a'\n").unwrap();
        let args = ServeArgs { config: Some(file), ..ServeArgs::default() };
        let names = names.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let config = args.validate_with(names.collect::<Vec<_>>().into_iter());
        config.map_err(|wrong| wrong.iter().map(ToString::to_string).collect::<Vec<_>>())
    };
    let config = given(&[
        ("KYBERNATE_AGENT_STAGING_TMPFS", "/b"),
        ("KYBERNATE_AGENT_PAGE_HASHES", "true"),
        ("KYBERNATE_AGENT_METRICS", "unix:/run/m.sock"),
        ("KYBERNATE_AGENT_LOG_FORMAT", "json"),
        ("KYBERNATE_AGENT_CONFIG", "/x"),
        ("KYBERNATE_LOG", "info"),
    ]);
    let config = config.unwrap();
    assert_eq!(config.staging.tmpfs, Path::new("/b"));
    assert!(config.page_hashes && config.log_format == LogFormat::Json);
    assert_eq!(config.metrics, Some(Address::Unix("/run/m.sock".into())));
    let wrong = given(&[
        ("KYBERNATE_AGENT_STAGING_SIZE", "1"),
        ("KYBERNATE_AGENT_PAGE_HASHES", "yes"),
        ("KYBERNATE_AGENT_METRICS", "9464"),
    ]);
    let wrong = wrong.unwrap_err().join("\n");
    for part in [
        "KYBERNATE_AGENT_STAGING_SIZE of the environment is not a setting",
        "KYBERNATE_AGENT_PAGE_HASHES must be true or false",
        "metrics must be IP:PORT or unix:PATH",
    ] {
        assert!(wrong.contains(part), "{part:?} is missing in:\n{wrong}");
    }
}

#[test]
fn callers_are_named_in_full_or_not_at_all() {
    let wrong = check(
        "[network]\nlisten = 'here'\ncertificate = 'a.pem'\nclient_ca = '/nowhere/ca.pem'\n\
         [[caller]]\nwho = 'root'\nmay = ['read', 'write']\nnamespaces = []\n\
         [[caller]]\nwho = 'uid:7'\nmay = 'read'\n",
    );
    let wrong = wrong.unwrap_err().join("\n");
    for part in [
        "line 2: network.listen must be IP:PORT, not \"here\"",
        "line 3: network.certificate must be an absolute path",
        "line 1: network.key is missing",
        "line 6: caller[0].who must be uid:NUMBER or certificate:NAME, not \"root\"",
        "line 7: caller[0].may must be some of read, checkpoint, restore",
        "line 8: caller[0].namespaces must be patterns",
        "line 11: caller[1].may must be a list of texts, not string",
        "line 9: caller[1].namespaces is missing",
    ] {
        assert!(wrong.contains(part), "{part:?} is missing in:\n{wrong}");
    }
    let good = "[[caller]]\nwho = 'uid:7'\nmay = ['read']\nnamespaces = ['*']\n";
    assert!(check(good).unwrap().callers.current().has_users());
    assert!(
        check("").unwrap().network.is_none() && !check("").unwrap().callers.current().has_users()
    );
}

#[test]
fn hooks_are_programs_with_a_bound() {
    let wrong = check(
        "[[hooks]]\nname = 'a'\nwhen = 'now'\ncommand = []\nlimit = '1h'\n\
         [[hooks]]\nname = 'a'\nwhen = 'before'\ncommand = ['flush', '-a']\ncontainers = []\n\
         [[hooks]]\nname = 'a'\nwhen = 'after'\ncommand = ['/bin/a']\nnamespaces = 'x'\n",
    );
    let wrong = wrong.unwrap_err().join("\n");
    for part in [
        "line 3: hooks[0].when must be before, while_paused, after or failed, not \"now\"",
        "line 4: hooks[0].command must be a program and its arguments",
        "line 5: hooks[0].limit must be a time like \"10s\"",
        "line 9: hooks[1].command must be an absolute path, not \"flush\"",
        "line 10: hooks[1].containers must be patterns",
        "line 15: hooks[2].namespaces must be a list of texts",
        "hooks.name is given twice: \"a\"",
    ] {
        assert!(wrong.contains(part), "{part:?} is missing in:\n{wrong}");
    }
    let good = "[[hooks]]\nname = 'a'\nwhen = 'while_paused'\ncommand = ['/bin/a', '-x']\n";
    let hooks = check(good).unwrap().hooks;
    assert_eq!((hooks[0].hook.limit, hooks[0].on_request), (Duration::from_secs(10), false));
    assert!(hooks[0].containers[0].is_match("a/b") && hooks[0].namespaces[0].is_match("k8s.io"));
}

fn example() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/agent/example.toml");
    fs::read_to_string(path).unwrap()
}

/// Returns the names of all settings of a schema, as `staging.tmpfs` and `trust.key`.
fn settings(schema: &serde_json::Value, node: &serde_json::Value, place: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (name, property) in node["properties"].as_object().unwrap() {
        let text = property.to_string();
        let inner = text.split("#/$defs/").nth(1).and_then(|rest| rest.split('"').next());
        let inner = inner.map(|inner| &schema["$defs"][inner]);
        match inner.filter(|inner| inner.get("properties").is_some()) {
            Some(inner) => found.extend(settings(schema, inner, &format!("{place}{name}."))),
            None => found.push(format!("{place}{name}")),
        }
    }
    found
}

/// Takes the `#` away from every setting.
fn uncommented() -> String {
    let line = |line: &str| match line.strip_prefix('#') {
        Some(setting) if !setting.starts_with(' ') && !setting.is_empty() => setting.to_owned(),
        _ => line.to_owned(),
    };
    example().lines().map(line).collect::<Vec<_>>().join("\n")
}

/// Returns the names of all settings in a file.
fn names(table: &toml::Table, place: &str) -> Vec<String> {
    let inner = |(name, value): (&String, &toml::Value)| {
        let inner = value.as_table().or_else(|| value.as_array()?.first()?.as_table());
        let place = format!("{place}{name}");
        inner.map_or_else(|| vec![place.clone()], |inner| names(inner, &format!("{place}.")))
    };
    table.iter().flat_map(inner).collect()
}

#[test]
fn the_example_lists_every_setting_and_no_other() {
    let text = uncommented();
    let table: toml::Table = text.parse().unwrap();
    let mut listed = names(&table, "");
    let schema = Config::schema();
    let mut known = settings(&schema, &schema, "");
    listed.sort_unstable();
    known.sort_unstable();
    assert_eq!(listed, known);
    let _typed: schema::File = toml::from_str(&text).unwrap();
    // What is read is what the schema has: nothing but keys, certificates and the policy, which are
    // not here, is wrong.
    let wrong = check(&text).unwrap_err();
    assert!(wrong.iter().all(|wrong| wrong.contains("cannot be")), "{wrong:?}");
    assert_eq!(wrong.len(), 4);
}

#[test]
fn the_example_states_the_defaults() {
    let shipped = check(&example()).unwrap();
    let defaults = check("").unwrap();
    let text = uncommented();
    let (scalars, _) = text.split_once("[[sign_keys]]").unwrap();
    let stated: Vec<&str> = scalars
        .lines()
        .filter(|line| {
            let examples = [
                "node",
                "cluster",
                "metrics",
                "budget",
                "trust_policy",
                "listen",
                "certificate",
                "key",
                "client_ca",
                "driver",
                "management",
            ];
            !examples.iter().any(|name| line.starts_with(name))
        })
        .collect();
    let stated = check(&stated.join("\n")).unwrap();
    for config in [&shipped, &stated] {
        assert_eq!(format!("{config:?}"), format!("{defaults:?}"));
    }
}

#[test]
fn the_unit_and_the_program_agree() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/agent/kybernate-agent.service");
    let unit = fs::read_to_string(path).unwrap();
    let set = |key: &str| {
        let mut lines = unit.lines();
        lines.find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).unwrap_or_default()
    };
    let program = "/usr/bin/kybernate-agent";
    // systemd starts it again and again where anything before it fails, whatever the exit code.
    assert_eq!((set("Type"), set("ExecStartPre")), ("notify", ""));
    assert_eq!(set("ExecStart"), format!("{program} serve --config {DEFAULT_FILE}"));
    let defaults = check("").unwrap();
    assert_eq!(Path::new("/var/lib").join(set("StateDirectory")), defaults.root);
    let runtime = Path::new("/run").join(set("RuntimeDirectory"));
    assert!(defaults.socket.starts_with(&runtime) && defaults.staging.tmpfs.starts_with(&runtime));
    // A mount namespace of its own would hide the staging tmpfs from containerd.
    for own in ["PrivateTmp", "PrivateDevices", "ProtectSystem", "ProtectHome", "PrivateMounts"] {
        assert_eq!(set(own), "", "{own}");
    }
    let stop: u64 = set("TimeoutStopSec").trim_end_matches('s').parse().unwrap();
    assert!(stop > 30, "it is killed while it undoes");
}
