use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::access::grant::Grants;
use crate::access::subject::Holder;

fn read(text: &str) -> Result<Policy, Vec<Mistake>> {
    Policy::read(Path::new("p.toml"), text, &["ci"])
}

fn user(name: &str) -> Identity {
    Identity { holder: Holder::User(name.into()), ..Identity::default() }
}

fn rule(repositories: &str, subjects: &str, actions: &str) -> String {
    format!(
        "[[rule]]\nrepositories = [{repositories}]\nsubjects = [{subjects}]\nactions = [{actions}]\n"
    )
}

#[test]
fn what_no_rule_allows_is_denied() {
    let policy = read(&rule(r#""a/*""#, r#""user:alice""#, r#""pull", "push""#)).unwrap();
    let allowed = |identity: &Identity, name: &str| policy.allowed(identity, name).to_string();
    assert_eq!(allowed(&user("alice"), "a/b"), "pull,push");
    assert_eq!(allowed(&user("alice"), "a/b/c"), "");
    assert_eq!(allowed(&user("alice"), "a"), "");
    assert_eq!(allowed(&user("bob"), "a/b"), "");
    assert_eq!(allowed(&Identity::default(), "a/b"), "");
    assert!(policy.speaks_of(&user("alice")) && !policy.speaks_of(&user("bob")));
}

#[test]
fn two_stars_beside_letters_are_refused() {
    let wrong = read(&rule(r#""team/**", "ci-**""#, r#""anonymous""#, r#""pull""#)).unwrap_err();
    assert_eq!(wrong.len(), 1, "{wrong:?}");
    assert!(wrong[0].to_string().contains("rule[0].repositories[1]"), "{wrong:?}");
}

#[test]
fn rules_that_overlap_add_up_in_any_order() {
    let one = rule(r#""a/**""#, r#""anonymous""#, r#""pull""#);
    let two = rule(r#""a/b""#, r#""user:alice""#, r#""push""#);
    let three = rule(r#""**""#, r#""group:admins""#, r#""delete", "restore""#);
    let groups = "[groups]\nadmins = [\"user:root\", \"user:al*\"]\n";
    for order in [[&one, &two, &three], [&three, &one, &two], [&two, &three, &one]] {
        let text = order.map(String::as_str).concat() + groups;
        let policy = read(&text).unwrap();
        let allowed = |identity: &Identity, name: &str| policy.allowed(identity, name).to_string();
        assert_eq!(allowed(&user("alice"), "a/b"), "pull,push,delete,restore");
        assert_eq!(allowed(&user("alice"), "a/c"), "pull,delete,restore");
        assert_eq!(allowed(&user("root"), "b"), "delete,restore");
        assert_eq!(allowed(&user("bob"), "a/x/y"), "pull");
        assert_eq!(allowed(&Identity::default(), "a/b"), "pull");
    }
}

#[test]
fn a_token_limits_what_its_holder_may() {
    let policy = read(&rule(r#""a/**""#, r#""user:alice""#, r#""pull", "push""#)).unwrap();
    let repositories = vec![("a/b".to_owned(), Actions::ALL), ("z".to_owned(), Actions::ALL)];
    let mut alice = user("alice");
    let grants =
        Grants { repositories: repositories.clone(), catalog: false, decided_by: Decider::Policy };
    alice.grants = Some(grants);
    assert!(policy.allows(&alice, Action::Push, "a/b"));
    assert!(!policy.allows(&alice, Action::Push, "a/c"), "not in the token");
    assert!(!policy.allows(&alice, Action::Delete, "a/b"), "not in the policy");
    assert!(!policy.allows(&alice, Action::Pull, "z"), "not in the policy");
    alice.grants = Some(Grants { repositories, catalog: false, decided_by: Decider::Issuer });
    assert!(policy.allows(&alice, Action::Delete, "z"));
    assert!(!policy.allows(&alice, Action::Pull, "a/c"));
}

#[test]
fn everything_wrong_is_said_at_once_with_its_place() {
    let text = r#"
rules = []
[[rule]]
repositories = ["a/[b", "c"]
subjects = ["user:", "group:none", "token:other:x", "claim:ci:groups", "nobody", "anonymous:x"]
actions = ["pull", "write"]
[[rule]]
repositories = []
subjects = ["claim:ci:groups=a"]
actions = []
[groups]
all = ["group:all"]
"#;
    let told: Vec<_> = read(text).unwrap_err().iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(told.join("\n"), @r#"
    p.toml:2:1: rules: unknown setting `rules`, expected `rule` or `groups`
    p.toml:4:17: rule[0].repositories[0]: error parsing glob 'a/[b': unclosed character class; missing ']'; write a glob such as "team/**"
    p.toml:5:13: rule[0].subjects[0]: "user:" names nobody; write anonymous, authenticated, user:NAME, group:NAME, certificate:NAME, token:ISSUER:SUBJECT or claim:ISSUER:CLAIM=VALUE
    p.toml:5:22: rule[0].subjects[1]: there is no group "none"; there are {"all"}
    p.toml:5:36: rule[0].subjects[2]: there is no issuer "other"; there are {"ci"}
    p.toml:5:53: rule[0].subjects[3]: "claim:ci:groups" names nobody; write anonymous, authenticated, user:NAME, group:NAME, certificate:NAME, token:ISSUER:SUBJECT or claim:ISSUER:CLAIM=VALUE
    p.toml:5:72: rule[0].subjects[4]: "nobody" names nobody; write anonymous, authenticated, user:NAME, group:NAME, certificate:NAME, token:ISSUER:SUBJECT or claim:ISSUER:CLAIM=VALUE
    p.toml:5:82: rule[0].subjects[5]: "anonymous:x" names nobody; write anonymous, authenticated, user:NAME, group:NAME, certificate:NAME, token:ISSUER:SUBJECT or claim:ISSUER:CLAIM=VALUE
    p.toml:6:20: rule[0].actions[1]: unknown variant `write`, expected one of `pull`, `push`, `delete`, `restore`
    p.toml:8:16: rule[1].repositories: is empty, so the rule says nothing; name at least one
    p.toml:10:11: rule[1].actions: is empty, so the rule says nothing; name at least one
    p.toml:12:8: groups.all[0]: there is no group "all", nor any other
    "#);
}

#[test]
fn an_empty_policy_is_a_mistake() {
    assert_eq!(read("").unwrap_err().len(), 1);
    assert_eq!(read("[groups]\na = []\n").unwrap_err().len(), 1);
}

proptest! {
    /// Whatever the rules are, a right is there exactly when one of them gives it.
    #[test]
    fn a_right_is_given_by_some_rule(
        rules in prop::collection::vec(
            ("(a|b|\\*|\\*\\*)(/(a|b|\\*|\\*\\*)){0,2}", "[xy*]", 1_u8..16), 1..6),
        name in "[ab](/[ab]){0,2}", who in "[xyz]",
    ) {
        let text: String = rules.iter().map(|(pattern, who, actions)| {
            let actions = Action::ALL.into_iter().enumerate()
                .filter(|(bit, _)| actions >> bit & 1 == 1)
                .map(|(_, action)| format!("{:?}", action.name()));
            let actions = actions.collect::<Vec<_>>().join(", ");
            rule(&format!("{pattern:?}"), &format!("\"user:{who}\""), &actions)
        }).collect();
        let policy = read(&text).unwrap();
        let parts: Vec<_> = name.split('/').collect();
        for (bit, action) in Action::ALL.into_iter().enumerate() {
            let given = rules.iter().any(|(pattern, subject, actions)| {
                let pattern: Vec<_> = pattern.split('/').collect();
                (subject == "*" || *subject == who) && actions >> bit & 1 == 1
                    && covers(&pattern, &parts)
            });
            prop_assert_eq!(policy.allowed(&user(&who), &name).has(action), given, "{}", text);
        }
    }

    /// Text from outside never does worse than being refused.
    #[test]
    fn any_text_is_read_or_refused(text in ".{0,200}") {
        let _either = read(&text);
        let _either = text.parse::<Subject>().is_ok();
    }
}

/// What the patterns of the property mean, the slow way. A `**` that follows something needs a
/// part to stand for, and one that comes first may stand for none.
fn covers(pattern: &[&str], name: &[&str]) -> bool {
    match (pattern, name) {
        ([], []) => true,
        (["**"], rest) => !rest.is_empty(),
        (["**", pattern @ ..], rest) => {
            (0..=rest.len()).any(|skipped| covers(pattern, &rest[skipped..]))
        }
        ([first, pattern @ ..], [part, rest @ ..]) => {
            (first == part || *first == "*") && covers(pattern, rest)
        }
        _ => false,
    }
}

proptest! {
    /// Whatever a policy's file holds, it is read or refused with a place that it has.
    #[test]
    fn any_file_is_a_policy_or_is_refused(
        pieces in prop::collection::vec(prop::sample::select(vec![
            "[[rule]]\n", "[groups]\n", "repositories = ", "subjects = ", "actions = ", "a = ",
            "[\"**\"]\n", "[\"user:x\", \"group:a\"]\n", "[\"pull\"]\n", "[\"claim:ci:a=b\"]\n",
            "[\"token:ci:\"]\n", "[]\n", "\"[\"\n", "anonymous", "= 1\n", "\u{0}", "[\"\u{e9}*/**\"]\n", "\n",
        ]), 0..14),
    ) {
        let text: String = pieces.concat();
        if let Err(wrong) = read(&text) {
            prop_assert!(!wrong.is_empty());
            let lines = text.matches('\n').count() + 1;
            for mistake in wrong {
                let (line, column) = mistake.place.at.unwrap_or((1, 1));
                prop_assert!((1..=lines).contains(&line) && column > 0, "{} {:?}", mistake, text);
            }
        }
    }
}
