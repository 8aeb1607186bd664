use axum::extract::Query;
use proptest::prelude::*;

use super::*;

#[test]
fn a_link_can_carry_any_media_type() {
    assert_eq!(encode("application/vnd.a+json; x=é"), "application%2Fvnd.a%2Bjson%3B%20x%3D%C3%A9");
}

#[test]
fn a_page_has_a_limit_whatever_is_asked_for() {
    let query = |n: &str| vec![("n".to_owned(), n.to_owned())];
    assert_eq!(window(&query("7"), 10).unwrap().limit, 7);
    assert_eq!(window(&query("7000"), 10).unwrap().limit, 10);
    assert_eq!(window(&[], 10).unwrap().limit, 10);
    for wrong in ["-1", "x", "", "99999999999999999999999"] {
        window(&query(wrong), 10).unwrap_err();
    }
}

/// Returns the parameters of the link to the next page.
fn followed(link: &str) -> Vec<(String, String)> {
    let url = link.strip_prefix('<').unwrap().strip_suffix(">; rel=\"next\"").unwrap();
    let Query(parameters) = Query::try_from_uri(&url.parse().unwrap()).unwrap();
    parameters
}

proptest! {
    /// Whatever the last name of a page is, the link to the next begins after it.
    #[test]
    fn a_link_leads_to_where_the_page_ended(last in ".{0,60}", n in 0..20_000usize) {
        let response = linked(().into_response(), &format!("/v2/_catalog?n={n}"), Some(&last));
        let link = response.headers()[LINK].to_str().unwrap();
        let window = window(&followed(link), NAMES_MAX).unwrap();
        prop_assert_eq!((window.after, window.limit), (Some(last), n.min(NAMES_MAX)));
    }

    #[test]
    fn any_number_is_a_limit_or_is_refused(n in "[0-9+-]{0,25}|.{0,10}") {
        if let Ok(window) = window(&[("n".to_owned(), n)], 10) {
            prop_assert!(window.limit <= 10);
        }
    }
}
