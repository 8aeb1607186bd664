use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;

use proptest::prelude::*;

use super::*;

/// A repository in memory: of each manifest what it names, and its subject.
#[derive(Debug, Clone, Default)]
struct Model {
    manifests: BTreeMap<u8, (BTreeSet<u8>, Option<u8>)>,
}

fn digest(number: u8) -> Digest {
    Digest::of(&[number])
}

fn number(wanted: &Digest) -> u8 {
    (0..=255).find(|number| digest(*number) == *wanted).unwrap()
}

impl Graph for Model {
    type Error = Infallible;

    fn neighbours(&self, wanted: &Digest) -> Result<Vec<Digest>, Infallible> {
        let wanted = number(wanted);
        let names = self.manifests.get(&wanted).into_iter().flat_map(|(names, _)| names);
        let attached = self.manifests.iter().filter(|(_, (_, subject))| *subject == Some(wanted));
        Ok(names.chain(attached.map(|(number, _)| number)).map(|n| digest(*n)).collect())
    }
}

impl Model {
    /// The rules, applied to everything again and again until nothing changes.
    fn needed(&self, roots: &BTreeSet<u8>) -> BTreeSet<u8> {
        let mut needed = roots.clone();
        loop {
            let before = needed.len();
            for (manifest, (names, subject)) in &self.manifests {
                if subject.is_some_and(|subject| needed.contains(&subject)) {
                    needed.insert(*manifest);
                }
                if needed.contains(manifest) {
                    needed.extend(names);
                }
            }
            if needed.len() == before {
                return needed;
            }
        }
    }
}

/// Real manifests have no cycles, since a digest cannot name itself; ours may, and must end.
fn model() -> impl Strategy<Value = Model> {
    let manifest = (prop::collection::btree_set(0..40u8, 0..5), prop::option::of(0..40u8));
    prop::collection::btree_map(0..25u8, manifest, 0..25).prop_map(|manifests| Model { manifests })
}

proptest! {
    #[test]
    fn what_is_needed_is_what_the_rules_say(
        model in model(),
        roots in prop::collection::btree_set(0..40u8, 0..4),
        later in prop::collection::btree_set(0..40u8, 0..3),
    ) {
        let mut needed = Needed::default();
        let Ok(()) = needed.extend(&model, roots.iter().map(|n| digest(*n)));
        let found: BTreeSet<u8> = (0..40).filter(|n| needed.contains(&digest(*n))).collect();
        prop_assert_eq!(found, model.needed(&roots));

        let Ok(()) = needed.extend(&model, later.iter().map(|n| digest(*n)));
        let found: BTreeSet<u8> = (0..40).filter(|n| needed.contains(&digest(*n))).collect();
        prop_assert_eq!(found, model.needed(&(&roots | &later)));
    }

    /// What was named before it was pushed is looked at once it is there.
    #[test]
    fn what_comes_late_is_looked_at_again(
        model in model(),
        roots in prop::collection::btree_set(0..40u8, 0..4),
        late in 0..25u8,
    ) {
        let mut before = model.clone();
        before.manifests.remove(&late);
        let mut needed = Needed::default();
        let Ok(()) = needed.extend(&before, roots.iter().map(|n| digest(*n)));
        let Ok(()) = needed.extend(&model, [digest(late)]);
        let found: BTreeSet<u8> = (0..40).filter(|n| needed.contains(&digest(*n))).collect();
        prop_assert_eq!(found, model.needed(&(&roots | &BTreeSet::from([late]))));
    }

    #[test]
    fn parents_come_before_what_they_need(model in model()) {
        // Only downwards, as digests force it.
        let mut model = model;
        for (number, (names, subject)) in &mut model.manifests {
            names.retain(|name| name < number);
            *subject = subject.filter(|subject| subject < number);
        }
        let manifests: Vec<_> = model.manifests.keys().map(|n| digest(*n)).collect();
        let order = parents_first(&Names(&model), manifests.clone());
        prop_assert_eq!(order.iter().collect::<BTreeSet<_>>(), manifests.iter().collect());
        let place = |n: &u8| order.iter().position(|d| *d == digest(*n));
        for (parent, (names, _)) in &model.manifests {
            for child in names.iter().filter(|child| model.manifests.contains_key(child)) {
                prop_assert!(place(parent) < place(child));
            }
        }
    }
}

/// Only what manifests consist of.
struct Names<'a>(&'a Model);

impl Graph for Names<'_> {
    type Error = Infallible;

    fn neighbours(&self, wanted: &Digest) -> Result<Vec<Digest>, Infallible> {
        let names = self.0.manifests.get(&number(wanted)).into_iter().flat_map(|(names, _)| names);
        Ok(names.map(|number| digest(*number)).collect())
    }
}
