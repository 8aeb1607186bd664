use super::*;
use crate::key::SigningKey;

fn now() -> Timestamp {
    "2026-11-21T12:00:00Z".parse().unwrap()
}

fn question<'a>(repository: &'a str, source: &'a str, target: &'a str) -> Question<'a> {
    Question { repository, source_namespace: source, target_namespace: target }
}

/// Writes a policy and reads it; `KEY` in its text is a good key, `FILE` the name of a file with one.
#[expect(clippy::unwrap_in_result, reason = "a failed preparation is a failed test")]
fn read(text: &str) -> Result<Policy, String> {
    let directory = tempfile::tempdir().unwrap();
    let pem = SigningKey::generate().unwrap().public().to_pem();
    fs_err::write(directory.path().join("team.pub"), &pem).unwrap();
    let text = text.replace("KEY", &format!("'''\n{pem}'''")).replace("FILE", "'team.pub'");
    let file = directory.path().join("policy.toml");
    fs_err::write(&file, text).unwrap();
    Policy::read(&file).map_err(|wrong| {
        let told: Vec<String> = wrong.iter().map(ToString::to_string).collect();
        told.join("\n").replace(&format!("{}/", directory.path().display()), "")
    })
}

#[test]
fn what_no_rule_speaks_of_is_refused() {
    let policy = read("[[rule]]\nrepositories = ['r.example/team/**']\nkeys = [FILE]\n").unwrap();
    let same = policy.ask(question("r.example/team/a/b", "shop", "shop"), now()).unwrap();
    assert_eq!((same.mode(), same.keys().len()), (Mode::Enforce, 1));
    for (repository, source, target) in [
        ("r.example/other/a", "shop", "shop"),
        ("r.example/team/a", "shop", "bank"),
        ("r.example/team/a", "", "bank"),
    ] {
        let refused = policy.ask(question(repository, source, target), now()).unwrap_err();
        assert!(refused.to_string().contains(repository), "{refused}");
    }
    policy.ask(question("r.example/team/a", "", ""), now()).unwrap();
    assert!(Policy::default().ask(question("a", "b", "b"), now()).is_err());
}

#[test]
fn rules_add_and_the_mildest_mode_counts() {
    let policy = read(
        "[[rule]]\nname = 'all'\nrepositories = ['**']\nkeys = [KEY]\n\
         [[rule]]\nname = 'try'\nrepositories = ['r.example/try/*']\nkeys = [FILE]\nmode = 'warn'\n\
         [[rule]]\nname = 'scratch'\nrepositories = ['r.example/try/x']\nmode = 'off'\n\
         source_namespaces = ['lab-*']\ntarget_namespaces = ['lab']\n",
    );
    let policy = policy.unwrap();
    let ask = |repository, source, target| {
        policy.ask(question(repository, source, target), now()).unwrap()
    };
    let all = ask("r.example/a", "shop", "shop");
    assert_eq!((all.mode(), all.keys().len()), (Mode::Enforce, 1));
    let both = ask("r.example/try/x", "shop", "shop");
    assert_eq!((both.mode(), both.keys().len()), (Mode::Warn, 2));
    assert_eq!(ask("r.example/try/x", "lab-1", "lab").mode(), Mode::Off);
    assert_eq!(ask("r.example/try/x", "lab-1", "lab-1").mode(), Mode::Warn);
    policy.ask(question("r.example/try/y", "lab-1", "lab"), now()).unwrap_err();
}

#[test]
fn a_rule_counts_in_its_time() {
    let read = |times: &str| {
        read(&format!("[[rule]]\nname = 'team'\nrepositories = ['**']\nkeys = [KEY]\n{times}"))
    };
    let question = question("a", "b", "b");
    for good in [
        "not_before = 2026-11-21T12:00:00Z",
        "not_after = '2026-11-21T13:00:00+01:00'",
        "not_before = 2026-11-01T00:00:00Z\nnot_after = 2027-01-01T00:00:00+02:00",
    ] {
        read(good).unwrap().ask(question, now()).unwrap();
    }
    for (outdated, told) in [
        ("not_before = 2026-11-21T12:00:01Z", "\"team\" counts from 2026-11-21T12:00:01Z on"),
        ("not_after = 2026-11-21T11:59:59Z", "\"team\" counted until 2026-11-21T11:59:59Z"),
    ] {
        let refused = read(outdated).unwrap().ask(question, now()).unwrap_err();
        assert!(refused.to_string().ends_with(told), "{refused}");
    }
}

#[test]
fn every_mistake_is_told_at_once_with_its_place() {
    let wrong = read(
        "mode = 'off'\n\
         [[rule]]\n\
         repositories = ['a', '[', 3]\n\
         keys = ['nowhere.pub', 'policy.toml', '-----BEGIN NONSENSE-----']\n\
         kind = 1\n\
         [[rule]]\n\
         name = 7\n\
         repositories = []\n\
         mode = 'on'\n\
         not_before = 2027-01-01\n\
         [[rule]]\n\
         repositories = '**'\n\
         source_namespaces = ['']\n\
         keys = [KEY]\n\
         not_before = 2027-01-01T00:00:00Z\n\
         not_after = 2026-01-01T00:00:00Z\n",
    );
    let wrong = wrong.unwrap_err();
    for part in [
        "policy.toml:1:1: mode: is not a setting; there are only [[rule]]",
        "policy.toml:3:22: rule[0].repositories[1]: unclosed character class",
        "policy.toml:3:27: rule[0].repositories[2]: must be a text, not an integer",
        "policy.toml:4:9: rule[0].keys[0]: nowhere.pub cannot be read: entity not found",
        "policy.toml:4:24: rule[0].keys[1]: ",
        "policy.toml:4:39: rule[0].keys[2]: ",
        "policy.toml:5:1: rule[0].kind: is not a setting; there are name, repositories,",
        "rule[1].keys: is missing",
        "policy.toml:7:8: rule[1].name: must be a text, not an integer",
        "policy.toml:8:16: rule[1].repositories: is empty",
        "policy.toml:9:8: rule[1].mode: must be enforce, warn or off, not \"on\"",
        "policy.toml:10:14: rule[1].not_before: must be a time with its offset",
        "policy.toml:12:16: rule[2].repositories: must be a list of texts, not a string",
        "policy.toml:13:22: rule[2].source_namespaces[0]: is empty",
        "rule[2].not_after: is before not_before",
    ] {
        assert!(wrong.contains(part), "{part:?} is missing in:\n{wrong}");
    }
    assert_eq!(wrong.lines().count(), 15, "{wrong}");
}

#[test]
fn what_is_no_policy_is_told() {
    for (text, told) in [
        ("", "there is no rule"),
        ("rule = 3", "policy.toml:1:8: rule: must be tables, [[rule]], not an integer"),
        ("rule = [3]", "rule[0]: must be a table"),
        ("[[rule]\nx = 1", "policy.toml:1:"),
        (
            "[[rule]]\nname = 'a'\nrepositories = ['a']\nmode = 'off'\n\
             [[rule]]\nname = 'a'\nrepositories = ['b']\nmode = 'off'\n",
            "two rules are called \"a\"",
        ),
    ] {
        let wrong = read(text).unwrap_err();
        assert!(wrong.contains(told), "{wrong}");
    }
    let nowhere = Policy::read(Path::new("/nowhere/policy.toml")).unwrap_err();
    assert_eq!(nowhere[0].to_string(), "/nowhere/policy.toml: it cannot be read: entity not found");
}

#[test]
fn a_change_of_the_file_or_of_a_key_is_seen() {
    let directory = tempfile::tempdir().unwrap();
    let place = |name: &str| directory.path().join(name);
    let pem = || SigningKey::generate().unwrap().public().to_pem();
    let text = "[[rule]]\nrepositories = ['**']\nkeys = ['a.pub']\n";
    fs_err::write(place("a.pub"), pem()).unwrap();
    fs_err::write(place("policy.toml"), text).unwrap();
    let policy = Policy::read(&place("policy.toml")).unwrap();
    assert!(policy.is_current());
    fs_err::write(place("a.pub"), pem()).unwrap();
    assert!(!policy.is_current());
    let policy = Policy::read(&place("policy.toml")).unwrap();
    fs_err::write(place("policy.toml"), format!("{text}# more\n")).unwrap();
    assert!(!policy.is_current());
    let policy = Policy::read(&place("policy.toml")).unwrap();
    fs_err::remove_file(place("a.pub")).unwrap();
    assert!(!policy.is_current());
}

#[test]
fn what_is_past_its_time_is_refused() {
    let until = |text: &str| CheckpointConfig {
        not_after: Some(text.to_owned()),
        ..CheckpointConfig::default()
    };
    in_time(&CheckpointConfig::default(), now()).unwrap();
    in_time(&until("2026-11-21T12:00:00Z"), now()).unwrap();
    let over = in_time(&until("2026-11-21T11:59:59Z"), now()).unwrap_err();
    assert_eq!(PolicyError::from(over).objection(), Some(Objection::Expired));
    in_time(&until("tomorrow"), now()).unwrap_err();
}

#[test]
fn a_layout_is_called_by_its_whole_path() {
    let named = |text: &str| repository(&text.parse().unwrap());
    assert_eq!(named("oci:/media/stick/job:v1"), "oci:/media/stick/job");
    assert!(named("oci:job").starts_with("oci:/") && named("oci:job").ends_with("/job"));
    assert_eq!(named("r.example:5000/a/b:v1"), "r.example:5000/a/b");
}

/// The schema has the settings that are read, and no others.
#[test]
fn the_schema_and_the_reader_agree() {
    let text = "[[rule]]\nname = 'a'\nrepositories = ['**']\nsource_namespaces = ['a']\n\
                target_namespaces = ['b']\nkeys = [KEY]\nmode = 'warn'\n\
                not_before = 2026-01-01T00:00:00Z\nnot_after = 2027-01-01T00:00:00Z\n";
    read(text).unwrap();
    schema::is_shaped(&text.replace("KEY", "'a.pub'")).unwrap();
    schema::is_shaped(&text.replace("KEY", "'a.pub'").replace("mode", "made")).unwrap_err();
    let schema = Policy::schema();
    let known = schema["$defs"]["Rule"]["properties"].as_object().unwrap();
    let written: toml::Table = text.replace("KEY", "'a.pub'").parse().unwrap();
    let written = written["rule"][0].as_table().unwrap();
    let sorted = |keys: Vec<&String>| {
        let mut keys = keys.into_iter().cloned().collect::<Vec<_>>();
        keys.sort_unstable();
        keys
    };
    assert_eq!(sorted(known.keys().collect()), sorted(written.keys().collect()));
}
