use containerd_client::services::v1::{
    Container, GetContainerResponse, GetImageResponse, Image, ListContainersResponse,
};
use containerd_client::types::Descriptor;
use prost::Message as _;
use tonic::Status;

use super::*;
use crate::operations::{Kind, Subject};
use crate::runtime::fake::Fake;

/// A name that no real container on the machine has.
const NAME: &str = "kybernate-test-undo";

/// What the image is called that the restore has made.
const IMAGE: &str = "registry/web@sha256:1";

/// Fails a restore that was about to make these, where everything is of the operation `owner`, and
/// returns what containerd was asked to take away.
async fn taken_away(owner: &'static str, made: Vec<Made>) -> Vec<String> {
    taken_away_beside(owner, made, &[]).await
}

/// The same, where there are containers of `others` that have the image.
async fn taken_away_beside(
    owner: &'static str,
    made: Vec<Made>,
    others: &'static [&str],
) -> Vec<String> {
    let labels_for = move |own: &str| {
        let owner = if owner.is_empty() { own } else { owner };
        HashMap::from([(OPERATION_LABEL.to_owned(), owner.to_owned())])
    };
    let own = Arc::new(std::sync::OnceLock::<String>::new());
    let known = Arc::clone(&own);
    let fake = Fake::start(move |method, _| {
        let labels = labels_for(known.get().unwrap());
        let id = NAME.to_owned();
        match method {
            "Containers/Get" => {
                let container = Some(Container { id, labels, ..Container::default() });
                Ok(GetContainerResponse { container }.encode_to_vec())
            }
            "Images/Get" => {
                let digest = kybernate_spec::Digest::of(b"image").to_string();
                let target = Some(Descriptor { digest, ..Descriptor::default() });
                let image = Some(Image { name: id, labels, target, ..Image::default() });
                Ok(GetImageResponse { image }.encode_to_vec())
            }
            "Containers/List" => {
                let having = |other: &&str| Container {
                    labels: HashMap::from([(OPERATION_LABEL.to_owned(), (*other).to_owned())]),
                    image: IMAGE.to_owned(),
                    ..Container::default()
                };
                let own = known.get().unwrap();
                let containers = others.iter().map(having).chain([having(&&**own)]).collect();
                Ok(ListContainersResponse { containers }.encode_to_vec())
            }
            "Containers/Delete" | "Images/Delete" => Ok(Vec::new()),
            _ => Err(Status::not_found("no such thing")),
        }
    });
    let app = fake.app();
    let subject = Subject { kind: Kind::Restore, container: NAME.to_owned(), ..Subject::example() };
    let driver = app.operations.begin(subject).await.unwrap();
    own.set(driver.id().to_owned()).unwrap();
    for made in made {
        driver.will_make(made).await.unwrap();
    }
    let conclusion = Conclusion::failed("it failed".to_owned(), None);
    let undoing = Undoing { namespace: "default", container: NAME, conclusion: &conclusion };
    let cancel = CancellationToken::new();
    let undone = undo(&app, &driver, undoing, &cancel);
    assert!(tokio::time::timeout(Duration::from_mins(1), undone).await.unwrap());
    let mut asked = fake.asked();
    asked.retain(|method| !method.ends_with("/Get") && !method.ends_with("/List"));
    asked
}

#[tokio::test]
async fn hooks_for_a_failure_run_when_it_is_undone() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ran");
    let command = ["/bin/sh", "-c", &format!("echo $KYBERNATE_PHASE > {}", file.display())];
    let hook = Hook {
        name: "thaw".to_owned(),
        when: crate::hooks::When::Failed,
        command: command.map(str::to_owned).to_vec(),
        limit: Duration::from_secs(30),
    };
    assert_eq!(taken_away("", vec![Made::Hooked(vec![hook])]).await, [""; 0]);
    assert_eq!(fs_err::read_to_string(&file).unwrap(), "failed\n");
}

#[tokio::test]
async fn what_only_has_the_same_name_is_not_taken_away() {
    let made = || {
        let cgroup = "/kybernate-no-such-cgroup".to_owned();
        vec![
            Made::Image(IMAGE.to_owned()),
            Made::Container(NAME.to_owned()),
            Made::Task { container: NAME.to_owned(), cgroup },
        ]
    };
    assert_eq!(taken_away("another", made()).await, [""; 0]);
    assert_eq!(taken_away("", made()).await, ["Containers/Delete", "Images/Delete"]);
}

#[tokio::test]
async fn an_image_that_another_restore_runs_from_stays() {
    let made = || vec![Made::Image(IMAGE.to_owned())];
    assert_eq!(taken_away_beside("", made(), &["another"]).await, [""; 0]);
    assert_eq!(taken_away("", made()).await, ["Images/Delete"]);
}

/// Gives up an operation, as whoever drives it does, while containerd still makes something for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn what_is_still_being_made_is_taken_away_when_it_is_there() {
    let (asked, is_asked) = std::sync::mpsc::channel();
    let (come_to_undo, undone) = std::sync::mpsc::channel();
    let order = Arc::<std::sync::Mutex<Vec<&str>>>::default();
    let (noted, undone) = (Arc::clone(&order), std::sync::Mutex::new(undone));
    let fake = Fake::start(move |method, _| {
        match method {
            "Leases/Create" => {
                asked.send(()).unwrap();
                // Nobody is to come meanwhile.
                let came = undone.lock().unwrap().recv_timeout(Duration::from_millis(500));
                noted.lock().unwrap().push(if came.is_ok() { "too early" } else { "made" });
            }
            "Leases/Delete" => {
                noted.lock().unwrap().push("undone");
                come_to_undo.send(()).unwrap_or_default();
            }
            other => panic!("{other}"),
        }
        Ok(Vec::new())
    });
    let app = fake.app();
    let driver = app.operations.begin(Subject::example()).await.unwrap();
    driver.will_make(Made::Lease("lease".to_owned())).await.unwrap();
    let namespace = driver.follow(app.containerd.namespace("default"));
    tokio::select! {
        made = namespace.lease("lease") => panic!("{made:?}"),
        given_up = tokio::task::spawn_blocking(move || is_asked.recv()) => given_up.unwrap().unwrap(),
    }

    let conclusion = Conclusion::failed("it was given up".to_owned(), None);
    let undoing = Undoing { namespace: "default", container: NAME, conclusion: &conclusion };
    assert!(undo(&app, &driver, undoing, &CancellationToken::new()).await);
    assert_eq!(*order.lock().unwrap(), ["made", "undone"]);

    // An agent that is to end takes away what it can,
    let ends = CancellationToken::new();
    ends.cancel();
    for _ in 0..16 {
        let driver = app.operations.begin(Subject::example()).await.unwrap();
        driver.will_make(Made::Lease("lease".to_owned())).await.unwrap();
        assert!(undo(&app, &driver, undoing, &ends).await);
    }
    // but does not wait for long: the next one goes on.
    let (ends_work, work_ends) = std::sync::mpsc::channel::<()>();
    let works = driver.spawn_blocking(move || work_ends.recv());
    assert!(!undo(&app, &driver, undoing, &ends).await);
    drop(ends_work);
    works.await.unwrap().unwrap_err();
}
