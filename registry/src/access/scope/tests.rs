use proptest::prelude::*;

use super::*;

fn repository(name: &str, actions: &str) -> Scope {
    let actions = Actions::of_words(actions.split(','));
    Scope::Repository { name: name.to_owned(), actions }
}

#[test]
fn scopes_are_read_as_clients_write_them() {
    let read = |text: &str| Scope::parse_all([text]);
    assert_eq!(read("repository:a/b:pull,push"), Ok(vec![repository("a/b", "pull,push")]));
    assert_eq!(read("repository:a:*"), Ok(vec![repository("a", "pull,push,delete")]));
    assert_eq!(read("repository:a:restore,fly"), Ok(vec![repository("a", "restore")]));
    assert_eq!(read("repository(plugin):a:pull"), Ok(vec![repository("a", "pull")]));
    assert_eq!(read("repository:host:5000/a:pull"), Ok(vec![repository("host:5000/a", "pull")]));
    assert_eq!(read("registry:catalog:*"), Ok(vec![Scope::Catalog]));
    assert_eq!(read("galaxy:x:pull"), Ok(vec![]));
    assert_eq!(read(""), Ok(vec![]));
    let two = [repository("a", "pull"), repository("b", "push")];
    assert_eq!(read("repository:a:pull  repository:b:push"), Ok(two.to_vec()));
    assert_eq!(Scope::parse_all(["repository:a:pull", "repository:b:push"]), Ok(two.to_vec()));
    for malformed in ["a", "repository:a", "repository::pull", ":a:pull", "repository:a:pull x"] {
        assert_eq!(read(malformed), Err(ScopeError::Malformed), "{malformed}");
    }
    assert_eq!(read(&"repository:a:pull ".repeat(51)), Err(ScopeError::TooMany));
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,80}") {
        let _either = Scope::parse_all([&*text]).is_ok();
    }

    #[test]
    fn what_a_challenge_names_is_read_back(name in "[a-z]{1,5}(/[a-z]{1,5}){0,2}") {
        for action in Action::ALL {
            let scopes = Scope::parse_all([&*Scope::needed(action, &name)]).unwrap();
            let [Scope::Repository { name: read, actions }] = &*scopes else {
                panic!("{scopes:?}")
            };
            prop_assert!(*read == name && actions.has(action));
        }
    }
}
