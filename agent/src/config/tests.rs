use super::*;

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
    assert!(!config.allow_unsigned && !config.allow_request_keys);
    assert!(config.trust.is_empty());
}

#[test]
fn every_mistake_is_told_at_once() {
    let wrong = check(
        "root = 'relative'\nnoise = 1\npause_deadline = '0s'\nallow_unsigned = 'yes'\n\
         [staging]\nmemory_share = 2\nsize = 1\n\
         [[sign_keys]]\nname = 'a'\n\
         [[trust]]\nkey = '/nowhere/a.pub'\n",
    );
    let wrong = wrong.unwrap_err().join("\n");
    for part in [
        "root must be an absolute path",
        "noise is not a setting",
        "pause_deadline must be a time",
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
    assert_eq!(config.trust.len(), 1);
    let wrong = check(&format!("{entry}{entry}")).unwrap_err();
    assert_eq!(wrong, ["sign_keys.name is given twice: \"node\""]);
}

#[test]
fn a_file_that_was_named_must_exist() {
    let args = ServeArgs { config: Some("/nowhere/agent.toml".into()), ..ServeArgs::default() };
    assert!(args.validate().is_err());
}
