use super::*;

fn subject() -> Subject {
    Subject {
        kind: Kind::Checkpoint,
        container: "web".to_owned(),
        namespace: "default".to_owned(),
        reference: "localhost:5000/web:1".to_owned(),
    }
}

#[tokio::test]
async fn a_restarted_agent_finds_what_was_not_finished() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let done = operations.begin(subject()).await.unwrap();
    done.finish(|record| record.state = State::Done).await.unwrap();
    let cut = operations.begin(subject()).await.unwrap();
    let paused = Made::Paused { pid: 7, directory: "/stage/7".into() };
    cut.will_make(paused.clone()).await.unwrap();

    let restarted = Operations::open(directory.path()).unwrap();
    let interrupted = restarted.interrupted();
    assert_eq!(interrupted.len(), 1);
    let (record, driver) = &interrupted[0];
    assert_eq!(record.id, cut.id());
    assert_eq!(driver.made(), [paused]);
    assert_eq!(restarted.list().len(), 2);
}

#[tokio::test]
async fn a_watch_tells_the_state_first_and_ends_with_the_operation() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let driver = operations.begin(subject()).await.unwrap();
    driver.step("dump");
    let mut watch = operations.watch(Some(driver.id().to_owned())).unwrap();

    assert_eq!(watch.next().await.unwrap().step, "dump");
    driver.finish(|record| record.state = State::Done).await.unwrap();
    let last = watch.next().await.unwrap();
    assert_eq!(last.state(), api::OperationState::Done);
    assert_eq!(last.times[0].step, "dump");
    assert!(watch.next().await.is_none());
    assert!(operations.watch(Some("other".to_owned())).is_none());
}

#[tokio::test]
async fn a_watch_that_is_too_slow_still_learns_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let driver = operations.begin(subject()).await.unwrap();
    let mut watch = operations.watch(Some(driver.id().to_owned())).unwrap();
    watch.next().await.unwrap();
    for _ in 0..2 * CHANGES_BEHIND_MAX {
        driver.publish();
    }
    driver.finish(|record| record.state = State::Failed).await.unwrap();

    let last = watch.collect::<Vec<_>>().await.pop().unwrap();
    assert_eq!(last.state(), api::OperationState::Failed);
}

#[tokio::test]
async fn old_operations_are_forgotten_and_running_ones_kept() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let running = operations.begin(subject()).await.unwrap();
    for _ in 0..FINISHED_MAX + 3 {
        let driver = operations.begin(subject()).await.unwrap();
        driver.finish(|record| record.state = State::Done).await.unwrap();
    }
    operations.begin(subject()).await.unwrap();

    assert_eq!(operations.list().len(), FINISHED_MAX + 2);
    assert!(operations.list().iter().any(|operation| operation.id == running.id()));
    let files = fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(files, FINISHED_MAX + 2);
}

#[test]
fn an_unreadable_file_hides_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("x.json"), "{").unwrap();
    assert!(Operations::open(directory.path()).unwrap().list().is_empty());
}

#[tokio::test]
async fn a_checkpoint_waits_for_its_signer_also_over_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let pushed = operations.begin(subject()).await.unwrap();
    let ended = |record: &mut Record| {
        record.state = State::Done;
        record.tag = TagState::AwaitsSigner;
    };
    pushed.finish(ended).await.unwrap();
    let failed = operations.begin(subject()).await.unwrap();
    failed.finish(|record| record.state = State::Failed).await.unwrap();

    let restarted = Operations::open(directory.path()).unwrap();
    let tag = |operations: &Operations, id: &str| operations.present(id).unwrap().tag();
    assert_eq!(tag(&restarted, pushed.id()), api::TagState::AwaitsSigner);
    for _ in 0..2 {
        let told = restarted.tagged(pushed.id()).await.unwrap().unwrap();
        assert_eq!(told.tag(), api::TagState::Tagged);
    }
    let restarted = Operations::open(directory.path()).unwrap();
    assert_eq!(tag(&restarted, pushed.id()), api::TagState::Tagged);
    let other = restarted.tagged(failed.id()).await.unwrap().unwrap();
    assert_eq!(other.tag(), api::TagState::Unspecified);
    assert!(restarted.tagged("other").await.unwrap().is_none());
}
