//! Checkpoints that go on in one place only.

use kybernate_packager::claim::{ClaimError, Claimant, claim, release};

use crate::artifact::{checkpoint, noise};
use crate::registry::Registry;

fn claimant(owner: &str) -> Claimant {
    Claimant {
        node: "a".to_owned(),
        namespace: "team".to_owned(),
        owner: owner.to_owned(),
        container: "web".to_owned(),
    }
}

#[tokio::test]
async fn of_many_that_try_one_gets_it() {
    let Some(registry) = Registry::ours() else { return };
    let store = registry.open("a/b").await;
    let index = checkpoint(&store, &[noise(1000, 1)]).await;
    let owners = (0..8).map(|number| format!("pod-{number}")).collect::<Vec<_>>();
    let attempts = owners.iter().map(async |owner| {
        // Each as from a node of its own.
        let store = registry.open("a/b").await;
        claim(&store, &index, &claimant(owner)).await
    });
    let tried = futures::future::join_all(attempts).await;
    let won: Vec<&String> = owners
        .iter()
        .zip(&tried)
        .filter(|(_, tried)| tried.is_ok())
        .map(|(owner, _)| owner)
        .collect();
    assert_eq!(won.len(), 1, "{tried:?}");
    for lost in tried.iter().filter_map(|tried| tried.as_ref().err()) {
        assert!(matches!(lost, ClaimError::Taken { .. }) && lost.is_refusal(), "{lost:?}");
        let told = lost.to_string();
        assert!(told.contains(won[0]) && told.contains("crane delete"), "{told}");
    }
    // It has it still, and others have not, until it lets go.
    claim(&store, &index, &claimant(won[0])).await.unwrap();
    assert!(!release(&store, &index, &claimant("stranger")).await.unwrap());
    claim(&store, &index, &claimant("stranger")).await.unwrap_err();
    assert!(release(&store, &index, &claimant(won[0])).await.unwrap());
    assert!(!release(&store, &index, &claimant(won[0])).await.unwrap());
    claim(&store, &index, &claimant("stranger")).await.unwrap();
}

#[tokio::test]
async fn a_registry_that_replaces_what_was_to_be_new_gives_it_to_nobody() {
    let others = [Registry::docker(), Registry::distribution()];
    for registry in others.into_iter().flatten() {
        let store = registry.open("a/b").await;
        let index = checkpoint(&store, &[noise(1000, 1)]).await;
        for owner in ["one", "two"] {
            let error = claim(&store, &index, &claimant(owner)).await.unwrap_err();
            assert!(matches!(error, ClaimError::Unkept(_)) && error.is_refusal(), "{error:?}");
            assert!(error.to_string().contains("If-None-Match"), "{error}");
        }
    }
}
