use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kybernate_spec::Digest;
use proptest::prelude::*;

use super::{Fate, TagFacts, plan};
use crate::config::{Period, RetentionRule};

const HOUR: u64 = 3600;

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_hours(10_000)
}

/// A tag pushed and pulled so many hours ago.
fn tag(name: &str, pushed: u64, pulled: u64, signed: bool) -> TagFacts {
    TagFacts {
        tag: name.parse().unwrap(),
        digest: Digest::of(name.as_bytes()),
        pushed: now() - Duration::from_secs(pushed * HOUR),
        used: now() - Duration::from_secs(pulled * HOUR),
        signed,
        attached_to: None,
    }
}

fn rule(text: &str) -> RetentionRule {
    toml::from_str(text).unwrap()
}

fn check(rules: &[&str], tags: &[TagFacts], expected: &str) {
    let rules: Vec<_> = rules.iter().map(|text| rule(text)).collect();
    let rules: Vec<_> = rules.iter().enumerate().collect();
    let fates = plan(&rules, now(), tags);
    let told: Vec<_> = tags
        .iter()
        .zip(fates)
        .map(|(facts, fate)| match fate {
            Fate::Kept { rule } => format!("{}={rule}", facts.tag),
            Fate::Attached => format!("{}=attached", facts.tag),
            Fate::Dropped => format!("{}=-", facts.tag),
        })
        .collect();
    assert_eq!(told.join(" "), expected);
}

#[test]
fn a_rule_keeps_that_for_which_all_it_says_is_true() {
    let tags = [
        tag("v1", 50, 1, false),
        tag("v2", 20, 20, true),
        tag("v3", 5, 5, false),
        tag("x", 1, 1, true),
    ];
    check(&["newest = 2"], &tags, "v1=- v2=- v3=0 x=0");
    check(&["newest = 2\nmatching = ['v*']"], &tags, "v1=- v2=0 v3=0 x=-");
    check(&["younger_than = '24h'"], &tags, "v1=- v2=0 v3=0 x=0");
    check(&["pulled_within = '2h'"], &tags, "v1=0 v2=- v3=- x=0");
    check(&["signed = true"], &tags, "v1=- v2=0 v3=- x=0");
    check(&["signed = true\nnewest = 1"], &tags, "v1=- v2=- v3=- x=0");
    check(&["matching = ['v1']"], &tags, "v1=0 v2=- v3=- x=-");
    check(&[""], &tags, "v1=0 v2=0 v3=0 x=0");
}

#[test]
fn rules_add_up_and_the_first_is_named() {
    let tags = [tag("v1", 50, 50, true), tag("v2", 20, 20, false), tag("v3", 5, 5, true)];
    check(&["newest = 1", "signed = true"], &tags, "v1=1 v2=- v3=0");
}

#[test]
fn an_attachment_stays_and_takes_nobodys_place() {
    let mut signature = tag("sha256-00.sig", 0, 0, false);
    signature.attached_to = Some(Digest::of(b"v1"));
    let tags = [tag("v1", 5, 5, false), signature];
    check(&["newest = 1"], &tags, "v1=0 sha256-00.sig=attached");
}

#[test]
fn a_clock_that_went_back_drops_nothing() {
    let mut facts = tag("v1", 0, 0, false);
    facts.pushed = now() + Duration::from_hours(5);
    check(&["younger_than = '1h'"], &[facts], "v1=0");
}

prop_compose! {
    fn some_rule()(
        newest in prop::option::of(1..5usize),
        younger in prop::option::of(1..100u64),
        pulled in prop::option::of(2..100u64),
        signed: bool,
    ) -> RetentionRule {
        let hours = |hours: u64| Period(Duration::from_secs(hours * HOUR));
        RetentionRule {
            newest,
            younger_than: younger.map(hours),
            pulled_within: pulled.map(hours),
            signed,
            ..RetentionRule::default()
        }
    }
}

proptest! {
    /// A further rule, or a looser one, drops nothing that was kept before.
    #[test]
    fn more_rules_keep_more(
        rules in prop::collection::vec(some_rule(), 1..4),
        tags in prop::collection::vec((0..100u64, 0..100u64, any::<bool>()), 0..20),
    ) {
        let tags: Vec<_> = tags
            .iter()
            .enumerate()
            .map(|(at, (pushed, pulled, signed))| tag(&format!("t{at}"), *pushed, *pulled, *signed))
            .collect();
        let numbered: Vec<_> = rules.iter().enumerate().collect();
        let all = plan(&numbered, now(), &tags);
        let first = plan(&numbered[..1], now(), &tags);
        for (with_one, with_all) in first.iter().zip(&all) {
            prop_assert!(*with_one == Fate::Dropped || *with_all != Fate::Dropped);
        }
        if let Some(newest) = rules[0].newest {
            let kept = first.iter().filter(|fate| **fate != Fate::Dropped).count();
            prop_assert!(kept <= newest);
        }
    }
}
