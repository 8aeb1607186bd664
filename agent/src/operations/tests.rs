use fs_err as fs;
use kybernate_packager::claim::Claimant;

use super::journal::FINISHED_MAX;
use super::*;

#[tokio::test]
async fn a_restarted_agent_finds_what_was_not_finished() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let done = operations.begin(Subject::example()).await.unwrap();
    done.finish(|record| record.state = State::Done).await.unwrap();
    let cut = operations.begin(Subject::example()).await.unwrap();
    let paused = Made::Paused { pid: 7, born: 70, cgroup: None, directory: "/stage/7".into() };
    cut.will_make(paused.clone()).await.unwrap();

    let restarted = Operations::open(directory.path()).unwrap();
    let interrupted = restarted.interrupted(|_| true);
    assert_eq!(interrupted.len(), 1);
    let (record, driver) = &interrupted[0];
    assert_eq!(record.id, cut.id());
    assert_eq!(driver.made(), [paused]);
    assert_eq!(restarted.list(&Filter::default()).len(), 2);
}

#[tokio::test]
async fn everybody_who_takes_a_checkpoint_for_one_pod_is_known_until_it_ends() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let taken = |note: &str| Made::Taken {
        claimant: Claimant {
            node: "a".to_owned(),
            namespace: "team".to_owned(),
            owner: "uid".to_owned(),
            container: "web".to_owned(),
        },
        note: note.into(),
    };
    let begin = async |container: &str, note| {
        let subject = Subject { container: container.to_owned(), ..Subject::example() };
        let driver = operations.begin(subject).await.unwrap();
        driver.will_make(taken(note)).await.unwrap();
        driver
    };
    let first = begin("first", "/restored/uid.web").await;
    begin("second", "/restored/uid.web").await;
    begin("other", "/restored/uid.db").await;
    let takers = |operations: &Operations| {
        let takers = operations.takers(Path::new("/restored/uid.web"));
        takers.into_iter().map(|(_namespace, container)| container).collect::<Vec<_>>()
    };
    let mut both = takers(&Operations::open(directory.path()).unwrap());
    both.sort();
    assert_eq!(both, ["first", "second"], "what an earlier agent has begun counts");
    first.finish(|record| record.state = State::Failed).await.unwrap();
    assert_eq!(takers(&operations), ["second"]);
}

#[tokio::test]
async fn changes_made_at_once_are_all_kept_and_the_last_is_on_the_disk() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let driver = operations.begin(Subject::example()).await.unwrap();
    let made = |number: u32| Made::Lease(number.to_string());
    let changes = (0..64).map(|number| driver.will_make(made(number)));
    futures::future::try_join_all(changes).await.unwrap();
    let restarted = Operations::open(directory.path()).unwrap();
    assert_eq!(restarted.interrupted(|_| true)[0].1.made(), driver.made());
    assert_eq!(driver.made().len(), 64);
}

#[tokio::test]
async fn what_cannot_be_written_down_does_not_begin() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("operations");
    let operations = Operations::open(&place).unwrap();
    fs::remove_dir(&place).unwrap();
    operations.begin(Subject::example()).await.unwrap_err();
    assert_eq!(operations.list(&Filter::default()), []);
    fs::create_dir(&place).unwrap();
    operations.begin(Subject::example()).await.unwrap();
}

#[tokio::test]
async fn a_watch_tells_the_state_first_and_ends_with_the_operation() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let driver = operations.begin(Subject::example()).await.unwrap();
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
async fn nobody_is_told_an_end_that_the_next_agent_would_not_tell() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let done = Conclusion { restored_pid: 7, ..Conclusion::done(Sizes::default()) };
    let failed = Conclusion::failed("no room".to_owned(), None);
    for (ends, is_kept) in [(&failed, false), (&done, false), (&done, true)] {
        let driver = operations.begin(Subject::example()).await.unwrap();
        if is_kept {
            driver.update(|record| record.keep(|_| false, ends)).await.unwrap();
        }
        let told = || operations.present(driver.id()).unwrap().state();
        let lines = Arc::clone(&operations.entries().get(driver.id()).unwrap().lines);
        let disk_waits = lines.lock_owned().await;
        let mut closing = std::pin::pin!(driver.close(Some(ends.clone())));
        assert!(futures::poll!(&mut closing).is_pending());
        // What was kept with its end, the next agent ends so.
        assert_eq!(told() != api::OperationState::Running, is_kept, "{ends:?}");
        let late = operations.cancel(driver.id(), CancelCause::Asked).await.unwrap_err();
        assert!(matches!(late, CancelError::TooLate(..) | CancelError::Ended(..)), "{late}");
        drop(disk_waits);
        closing.await;
        assert_ne!(told(), api::OperationState::Running);
    }
}

#[tokio::test]
async fn what_is_only_told_goes_to_the_disk_with_the_next_thing() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let driver = operations.begin(Subject::example()).await.unwrap();
    let digest = Digest::of(b"1");
    driver.note(|record| record.digest = Some(digest.clone()));
    assert_eq!(driver.to_api().digest, digest.to_string());
    let kept = || Journal::open(directory.path()).unwrap().1.remove(0).digest;
    assert_eq!(kept(), None);
    driver.will_make(Made::Lease("one".to_owned())).await.unwrap();
    assert_eq!(kept(), Some(digest));
}

#[tokio::test]
async fn what_was_kept_ends_as_it_was_and_is_not_cancelled() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let driver = operations.begin(Subject::example()).await.unwrap();
    driver.will_make(Made::Container("web".to_owned())).await.unwrap();
    let done = Conclusion { restored_pid: 7, ..Conclusion::done(Sizes::default()) };
    driver.update(|record| record.keep(|_| false, &done)).await.unwrap();
    for operations in [operations, Operations::open(directory.path()).unwrap()] {
        let late = operations.cancel(driver.id(), CancelCause::Asked).await.unwrap_err();
        assert!(matches!(late, CancelError::TooLate(..)), "{late}");
        assert_eq!(operations.present(driver.id()).unwrap().error, "");
    }
    let restarted = Operations::open(directory.path()).unwrap();
    let (record, driver) = restarted.interrupted(|_| true).remove(0);
    assert_eq!(driver.made(), []);
    driver.close(record.conclusion).await;
    let told = restarted.present(driver.id()).unwrap();
    assert_eq!((told.state(), told.restored_pid), (api::OperationState::Done, 7));
}

#[tokio::test]
async fn a_watch_that_is_too_slow_still_learns_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let driver = operations.begin(Subject::example()).await.unwrap();
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
    let running = operations.begin(Subject::example()).await.unwrap();
    for _ in 0..FINISHED_MAX + 3 {
        let driver = operations.begin(Subject::example()).await.unwrap();
        driver.finish(|record| record.state = State::Done).await.unwrap();
    }
    operations.begin(Subject::example()).await.unwrap();

    assert_eq!(operations.list(&Filter::default()).len(), FINISHED_MAX + 2);
    assert!(
        operations.list(&Filter::default()).iter().any(|operation| operation.id == running.id())
    );
    let files = fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(files, FINISHED_MAX + 2);
}

#[tokio::test]
async fn what_is_done_in_place_pushes_out_no_checkpoint() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let checkpoint = operations.begin(Subject::example()).await.unwrap();
    checkpoint.finish(|record| record.state = State::Done).await.unwrap();
    for round in 0..FINISHED_MAX + 3 {
        let kind = if round % 2 == 0 { Kind::Suspend } else { Kind::Resume };
        let driver = operations.begin(Subject { kind, ..Subject::example() }).await.unwrap();
        driver.finish(|record| record.state = State::Done).await.unwrap();
    }
    operations.begin(Subject::example()).await.unwrap();
    let left = operations.list(&Filter::default());
    assert_eq!(left.len(), FINISHED_MAX + 2);
    assert!(left.iter().any(|operation| operation.id == checkpoint.id()));
}

#[test]
fn an_unreadable_file_hides_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("x.json"), "{").unwrap();
    assert!(Operations::open(directory.path()).unwrap().list(&Filter::default()).is_empty());
}

#[tokio::test]
async fn a_checkpoint_waits_for_its_signer_also_over_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let pushed = operations.begin(Subject::example()).await.unwrap();
    let ended = |record: &mut Record| {
        record.state = State::Done;
        record.tag = TagState::AwaitsSigner;
    };
    pushed.finish(ended).await.unwrap();
    let failed = operations.begin(Subject::example()).await.unwrap();
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

#[tokio::test]
async fn a_cancelled_operation_ends_so_also_over_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let driver = operations.begin(Subject::example()).await.unwrap();
    for _ in 0..2 {
        let told = operations.cancel(driver.id(), CancelCause::Asked).await.unwrap();
        assert!(told.cancelling && told.state() == api::OperationState::Running);
    }
    driver.cancelled().await;
    driver.commit("it is done").unwrap_err();

    let restarted = Operations::open(directory.path()).unwrap();
    let (_, driver) = &restarted.interrupted(|_| true)[0];
    let ends = driver.ends(Conclusion::failed("the agent ended".to_owned(), None));
    assert_eq!(ends.state, State::Cancelled);
    driver.undone("the source runs".to_owned());
    driver.close(Some(ends)).await;
    let told = restarted.cancel(driver.id(), CancelCause::Asked).await.unwrap();
    assert_eq!(told.state(), api::OperationState::Cancelled);
    assert_eq!((&*told.error, told.cancelling), ("it was cancelled", false));
    assert_eq!(told.undone, ["the source runs"]);
}

#[tokio::test]
async fn what_failed_says_that_its_source_has_ended() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    for (state, status, told) in [
        (State::Failed, Some(137), "it broke; the source has ended, with exit status 137"),
        (State::Failed, None, "it broke; the source has ended"),
        // All that was undone is told of these.
        (State::Cancelled, None, "it broke"),
        (State::Done, None, "it broke"),
    ] {
        let driver = operations.begin(Subject::example()).await.unwrap();
        driver.undone(SourceEnd { status }.to_string());
        let failed = Conclusion::failed("it broke".to_owned(), None);
        driver.close(Some(Conclusion { state, ..failed })).await;
        assert_eq!(driver.to_api().error, told);
        assert!(driver.to_api().undone[0].starts_with("the source has ended"));
    }
}

#[tokio::test]
async fn what_cannot_be_cancelled_says_why() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let cancel =
        async |id: &str| operations.cancel(id, CancelCause::Asked).await.unwrap_err().to_string();
    assert!(cancel("other").await.contains("no operation \"other\""));
    let driver = operations.begin(Subject::example()).await.unwrap();
    driver.commit("its artifact is stored").unwrap();
    assert!(cancel(driver.id()).await.contains("any more: its artifact is stored"));
    let failed = Conclusion::failed("no room".to_owned(), None);
    driver.update(|record| record.conclusion = Some(failed.clone())).await.unwrap();
    assert!(cancel(driver.id()).await.contains("failed already"));
    driver.close(Some(failed)).await;
    assert!(cancel(driver.id()).await.contains("has ended already: failed"));
}

#[tokio::test]
async fn an_operation_whose_time_is_over_is_cancelled() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let time_out = Some(Duration::from_millis(20));
    let driver = operations.begin(Subject { time_out, ..Subject::example() }).await.unwrap();
    driver.step("pull");
    driver.bounded(driver.cancelled()).await;
    let ends = driver.ends(Conclusion::failed(String::new(), None));
    let told = "because its time was over in the step \"pull\"";
    assert!(ends.state == State::Cancelled && ends.error.contains(told), "{ends:?}");
    assert_ne!(operations.present(driver.id()).unwrap().deadline, "");
}

#[tokio::test]
async fn progress_has_a_percentage_where_the_total_is_known() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let driver = operations.begin(Subject::example()).await.unwrap();
    let percent = || driver.to_api().progress.unwrap().percent;
    driver.step("dump");
    assert_eq!(percent(), None);
    driver.progress.expect(300);
    driver.progress.advance(100);
    assert_eq!(percent(), Some(33));
    // An estimate may be too low.
    driver.progress.advance(1000);
    assert_eq!(percent(), Some(100));
}

#[tokio::test]
async fn operations_are_found_by_state_container_and_namespace() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    operations.begin(Subject::example()).await.unwrap();
    let other = Subject { container: "db".to_owned(), ..Subject::example() };
    let ended = operations.begin(other).await.unwrap();
    ended.finish(|record| record.state = State::Failed).await.unwrap();
    let find = |filter: Filter| {
        let found = operations.list(&filter).into_iter();
        found.map(|one| one.container).collect::<Vec<_>>()
    };
    let states = vec![api::OperationState::Failed, api::OperationState::Done];
    assert_eq!(find(Filter { states, ..Filter::default() }), ["db"]);
    assert_eq!(find(Filter { container: "web".to_owned(), ..Filter::default() }), ["web"]);
    assert!(find(Filter { namespace: "k8s.io".to_owned(), ..Filter::default() }).is_empty());
}

#[tokio::test]
async fn the_end_of_the_agent_stops_what_can_still_be_undone() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let (begun, tagged) =
        (operations.begin(Subject::example()), operations.begin(Subject::example()));
    let (begun, tagged) = (begun.await.unwrap(), tagged.await.unwrap());
    let ends = CancellationToken::new();
    let (first, second) = (begun.stopped(ends.clone()), tagged.stopped(ends.clone()));
    tagged.commit("it is being tagged").unwrap();
    ends.cancel();
    assert_eq!(first.await, Stopped::AgentEnds);
    assert_eq!(futures::FutureExt::now_or_never(second), None);
}

#[tokio::test]
async fn the_last_checkpoint_of_a_container_is_known() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let created = jiff::Timestamp::now();
    let done = async |subject: Subject, state: State, content: &[u8]| {
        let driver = operations.begin(subject).await.unwrap();
        let digest = Digest::of(content);
        let finish = |record: &mut Record| (record.state, record.digest) = (state, Some(digest));
        driver.finish(finish).await.unwrap();
    };
    let last = |operations: &Operations, created| {
        let fits = |reference: &str| reference.starts_with("localhost:5000/web");
        operations.last_checkpoint("default", "web", created, fits).map(|(_, digest)| digest)
    };
    assert_eq!(last(&operations, created), None);
    done(Subject::example(), State::Done, b"1").await;
    assert_eq!(last(&operations, created), Some(Digest::of(b"1")));
    // It is another container of that name.
    assert_eq!(last(&operations, jiff::Timestamp::now()), None);
    done(Subject { kind: Kind::Restore, ..Subject::example() }, State::Done, b"2").await;
    for other in [
        Subject { kind: Kind::Stage, ..Subject::example() },
        Subject { container: "db".to_owned(), ..Subject::example() },
        Subject { namespace: "k8s.io".to_owned(), ..Subject::example() },
        Subject { reference: "localhost:5000/other:1".to_owned(), ..Subject::example() },
    ] {
        done(other, State::Done, b"3").await;
    }
    done(Subject::example(), State::Failed, b"4").await;
    let restarted = Operations::open(directory.path()).unwrap();
    assert_eq!(last(&restarted, created), Some(Digest::of(b"2")));
}

#[tokio::test]
async fn the_last_checkpoint_is_the_one_that_ended_last() {
    let directory = tempfile::tempdir().unwrap();
    let operations = Operations::open(directory.path()).unwrap();
    let created = jiff::Timestamp::now();
    let first = operations.begin(Subject::example()).await.unwrap();
    let second = operations.begin(Subject::example()).await.unwrap();
    for (driver, content) in [(&second, b"2"), (&first, b"1")] {
        let digest = Digest::of(content);
        let finish = |record: &mut Record| {
            (record.state, record.digest) = (State::Done, Some(digest));
        };
        driver.finish(finish).await.unwrap();
    }
    // It has ended, and there is nothing to compare with.
    let third = operations.begin(Subject::example()).await.unwrap();
    third.finish(|record| record.state = State::Done).await.unwrap();
    for operations in [&operations, &Operations::open(directory.path()).unwrap()] {
        let last = operations.last_checkpoint("default", "web", created, |_| true);
        assert_eq!(last.map(|(_, digest)| digest), Some(Digest::of(b"1")));
    }
}
