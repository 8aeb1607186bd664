use super::{RepositoryName, Tag};
use proptest::prelude::*;

#[test]
fn names_of_the_specification_are_accepted() {
    for good in ["a", "library/ubuntu", "a.b/c_d/e__f/g---h", "0/1"] {
        assert!(good.parse::<RepositoryName>().is_ok(), "{good}");
    }
}

#[test]
fn names_that_could_leave_the_repository_are_refused() {
    let long = "a".repeat(256);
    for bad in ["", "/", "a/", "/a", "a//b", ".", "..", "a/../b", "A", "a___b", "a..b", "-a", &long]
    {
        assert!(bad.parse::<RepositoryName>().is_err(), "{bad}");
    }
}

#[test]
fn tags_follow_the_specification() {
    for good in ["latest", "v1.0", "_x", "A-b.c"] {
        assert!(good.parse::<Tag>().is_ok(), "{good}");
    }
    let long = "a".repeat(129);
    for bad in ["", ".a", "-a", "a/b", "a:b", "ä", &long] {
        assert!(bad.parse::<Tag>().is_err(), "{bad}");
    }
}

proptest! {
    #[test]
    fn an_accepted_name_has_no_special_path_component(text in "[a-z0-9._/-]{0,40}") {
        if let Ok(name) = text.parse::<RepositoryName>() {
            prop_assert!(name.as_str().split('/').all(|c| !c.is_empty() && c != "." && c != ".."));
        }
    }
}
