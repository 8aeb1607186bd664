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
