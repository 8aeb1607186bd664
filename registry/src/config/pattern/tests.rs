use super::*;

fn read(text: &str) -> Result<Pattern, String> {
    #[derive(Debug, Deserialize)]
    struct Written {
        pattern: Pattern,
    }
    let written = toml::from_str::<Written>(&format!("pattern = {text:?}"));
    written.map(|written| written.pattern).map_err(|error| error.to_string())
}

#[test]
fn two_stars_beside_letters_are_refused_since_they_would_be_one() {
    for text in ["release-**", "**-prod", "a/b**", "**a/b", "a/***", "{a**,b}", "{a,**}", "{**,a}"]
    {
        let told = read(text).unwrap_err();
        assert!(told.contains("alone between slashes"), "{text} {told}");
    }
}

#[test]
fn two_stars_are_any_number_of_parts() {
    let check = |text: &str, name: &str, expected: bool| {
        assert_eq!(read(text).unwrap().matches(name), expected, "{text} {name}");
    };
    check("**", "a", true);
    check("**", "a/b/c", true);
    check("team/**", "team/a/b", true);
    check("team/**", "team", false);
    check("team-*/**", "team-a/b/c", true);
    check("**/app", "app", true);
    check("**/app", "a/b/app", true);
    check("a/**/c", "a/c", true);
    check("a/**/c", "a/b/b/c", true);
    check("{team/**,ci/*}", "team/a/b", true);
    check("{team/**,ci/*}", "ci/a/b", false);
    check("{a,**/b}", "c/d/b", true);
    check("ci-*", "ci-1/a", false);
}
