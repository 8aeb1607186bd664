use super::*;

#[test]
fn what_is_held_is_left_alone() {
    let pins = Pins::default();
    let digest = Digest::of(b"a");
    let held = pins.hold(&digest);
    let again = pins.hold(&digest);
    assert_eq!(pins.unless_held(&digest, || ()), None);
    assert_eq!(pins.unless_held(&Digest::of(b"b"), || ()), Some(()));
    drop(held);
    assert_eq!(pins.unless_held(&digest, || ()), None);
    drop(again);
    assert_eq!(pins.unless_held(&digest, || ()), Some(()));
}

#[test]
fn who_came_and_went_since_the_look_began_is_noticed() {
    let pins = Pins::default();
    let digest = Digest::of(b"a");
    let before = pins.hold(&digest);
    drop(before);
    let watch = pins.watch(&digest);
    assert_eq!(watch.unless_used(|| ()), Some(()), "an earlier holder does not matter");
    drop(pins.hold(&digest));
    assert_eq!(watch.unless_used(|| ()), None);
    drop(watch);
    assert_eq!(pins.watch(&digest).unless_used(|| ()), Some(()), "nothing is remembered");
    let held = pins.hold(&digest);
    let watch = pins.watch(&digest);
    drop(held);
    assert_eq!(watch.unless_used(|| ()), None, "a holder from before may have linked since");
}
