use std::path::Path;

use super::*;
use crate::config::Config;
use crate::store::Rules;

/// A store whose repositories may hold `bytes` each.
fn store(directory: &tempfile::TempDir, bytes: u64) -> Arc<Store> {
    let mut store = Store::open(directory.path()).unwrap();
    let rule = format!("[[quota.rule]]\nrepositories = [\"**\"]\nbytes = {bytes}\n");
    let config = Config::read(Path::new("test.toml"), &rule).unwrap();
    let quotas = Quotas::new(config.quota);
    store.govern(Rules { quotas, ..Rules::default() });
    Arc::new(store)
}

fn take(store: &Arc<Store>, bytes: u64) -> Option<Room> {
    Room::take(store, &"a".parse().unwrap(), bytes).ok().flatten()
}

#[test]
fn what_is_given_back_during_a_look_still_counts() {
    let directory = tempfile::tempdir().unwrap();
    let (store, name) = (store(&directory, 100), "a".parse::<RepositoryName>().unwrap());
    let room = take(&store, 60).unwrap();
    let look = store.quotas().look(&name);
    let later = store.quotas().look(&name);
    assert_eq!(look.given_back(&store.quotas().lock()), 0);
    // Its push has ended: what it was given may be in the repository, unseen by who looked before.
    drop(room);
    assert_eq!(look.given_back(&store.quotas().lock()), 60);
    let after = store.quotas().look(&name);
    assert_eq!(after.given_back(&store.quotas().lock()), 0);
    let mut mine = take(&store, 0).unwrap();
    let refused = mine.promise(&mut store.quotas().lock(), (0, 60), 41).unwrap_err();
    assert!(matches!(refused.kind, StoreErrorKind::Quota { limit: 100, used: 0 }));
    mine.promise(&mut store.quotas().lock(), (0, 60), 40).unwrap();
    drop((look, later));
    assert!(!store.quotas().lock().looks.is_empty());
    drop(after);
    assert!(store.quotas().lock().looks.is_empty(), "nothing is kept of those who have looked");
    drop(mine);
    assert!(store.quotas().lock().rooms.is_empty());
}

#[test]
fn rooms_never_pass_the_limit_together() {
    let directory = tempfile::tempdir().unwrap();
    let store = store(&directory, 100);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for bytes in 1..200 {
                    let room = take(&store, bytes % 70);
                    let all: u64 = store.quotas().lock().rooms.values().sum();
                    assert!(all <= 100, "{all}");
                    drop(room);
                }
            });
        }
    });
    take(&store, 100).unwrap();
    assert!(take(&store, 101).is_none());
}
