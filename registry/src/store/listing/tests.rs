use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn pages_put_together_are_the_sorted_list(
        names in proptest::collection::vec("[a-c]{1,3}", 0..40),
        limit in 1usize..7,
    ) {
        let names: BTreeSet<String> = names.into_iter().collect();
        let mut seen = Vec::new();
        let mut after = None;
        loop {
            let mut page = Collector::new(Window { after, limit });
            for name in names.iter().rev() {
                page.push(name);
            }
            let page = page.finish();
            prop_assert!(page.items.len() <= limit);
            seen.extend(page.items);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        prop_assert_eq!(seen, names.into_iter().collect::<Vec<_>>());
    }
}

#[test]
fn a_page_of_no_names_has_no_next() {
    let mut page = Collector::new(Window { after: None, limit: 0 });
    page.push("a");
    assert_eq!(page.finish(), Page { items: Vec::new(), next: None });
}
