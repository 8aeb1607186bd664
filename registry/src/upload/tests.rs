use std::convert::Infallible;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use futures::channel::mpsc;
use futures::{SinkExt as _, StreamExt as _};

use super::*;
use crate::store::StoreErrorKind;
use crate::tasks::Tasks;

/// How long an upload may be left alone.
const DAY: Duration = Duration::from_hours(24);

fn uploads(root: &tempfile::TempDir) -> Arc<Uploads> {
    let store = Arc::new(Store::open(root.path()).unwrap());
    Arc::new(Uploads::new(store, Notices::default(), Places::new(4)))
}

fn arrival(body: &mut Body) -> Arrival<'_> {
    Arrival { body, range: None, length: None, origin: None }
}

/// A body that sends what the first channel is given, and tells by the second that it is read.
fn body() -> (mpsc::Sender<&'static str>, Body, mpsc::Receiver<()>) {
    let (give, given) = mpsc::channel::<&'static str>(0);
    let (mut tell, told) = mpsc::channel(8);
    let bytes = given.map(move |text| {
        tell.try_send(()).unwrap();
        Ok::<_, Infallible>(Bytes::from_static(text.as_bytes()))
    });
    (give, Body::from_stream(bytes), told)
}

#[tokio::test]
async fn an_upload_that_somebody_sends_to_does_not_expire() {
    let root = tempfile::tempdir().unwrap();
    let (uploads, repository) = (uploads(&root), "a".parse::<RepositoryName>().unwrap());
    let id = uploads.open(&repository, Algorithm::Sha256).await.unwrap();
    let left = uploads.open(&repository, Algorithm::Sha256).await.unwrap();
    let (mut give, mut body, mut read) = body();
    let sending = Tasks::default().run({
        let (uploads, repository, id) = (Arc::clone(&uploads), repository.clone(), id.clone());
        async move { uploads.patch(&repository, &id, arrival(&mut body)).await }
    });
    // Too little to be written: the file looks left alone, and is not.
    give.send("slow").await.unwrap();
    read.next().await.unwrap();
    let later = SystemTime::now() + DAY + Duration::from_mins(1);
    uploads.expire(later).await.unwrap();
    assert_eq!(uploads.open_count(), 1);
    assert!(matches!(uploads.received(&repository, &left).await, Err(UploadError::Unknown)));

    drop(give);
    assert_eq!(sending.await.unwrap().unwrap(), 4);
    uploads.expire(later - Duration::from_mins(5)).await.unwrap();
    assert_eq!(uploads.received(&repository, &id).await.unwrap(), 4, "it was sent to just now");
    uploads.expire(later).await.unwrap();
    assert!(matches!(uploads.received(&repository, &id).await, Err(UploadError::Unknown)));
    assert_eq!(std::fs::read_dir(root.path().join("uploads")).unwrap().count(), 0);
}

#[tokio::test]
async fn who_asks_for_an_upload_that_has_ended_takes_no_place() {
    let root = tempfile::tempdir().unwrap();
    let repository = "a".parse::<RepositoryName>().unwrap();
    let id = uploads(&root).open(&repository, Algorithm::Sha256).await.unwrap();
    // Begun by an earlier process: to look at it is not to go on with it.
    let uploads = uploads(&root);
    assert_eq!(uploads.received(&repository, &id).await.unwrap(), 0);
    assert_eq!(uploads.open_count(), 0);
    // Another request ends it after this one has seen its file.
    let session = uploads.session(&repository, &id).await.unwrap();
    session.file.remove();
    let mut none = Body::empty();
    let patched = uploads.patch(&repository, &id, arrival(&mut none)).await;
    assert!(matches!(patched, Err(UploadError::Unknown)));
    assert_eq!(uploads.open_count(), 0);
}

/// Whoever begins more than can be known, and sends a byte to each, keeps nobody else out.
#[tokio::test]
async fn uploads_that_are_left_alone_are_forgotten_and_gone_on_with() {
    let root = tempfile::tempdir().unwrap();
    let mut store = Store::open(root.path()).unwrap();
    let rule = "[[quota.rule]]\nrepositories = [\"**\"]\nbytes = \"10B\"\n";
    let config = crate::config::Config::read(Path::new("test.toml"), rule).unwrap();
    let quotas = crate::quota::Quotas::new(config.quota);
    store.govern(crate::store::Rules { quotas, ..Default::default() });
    let uploads = Uploads::new(Arc::new(store), Notices::default(), Places::new(4));
    let repository = "a".parse::<RepositoryName>().unwrap();
    let id = uploads.open(&repository, Algorithm::Sha512).await.unwrap();
    let fresh = uploads.open(&repository, Algorithm::Sha256).await.unwrap();
    let empty = uploads.open(&repository, Algorithm::Sha256).await.unwrap();
    for (id, text) in [(&id, "content"), (&fresh, "x")] {
        let mut body = Body::from(text);
        uploads.patch(&repository, id, arrival(&mut body)).await.unwrap();
    }
    let file =
        std::fs::File::options().write(true).open(root.path().join("uploads").join(format!(
            "{}-{}",
            id.secret(),
            UploadFile::mark(&repository)
        )));
    file.unwrap().set_modified(SystemTime::now() - Duration::from_mins(2)).unwrap();
    assert!(uploads.put_to_sleep().await.unwrap());
    assert!(!uploads.put_to_sleep().await.unwrap(), "the others are young or have nothing");
    assert_eq!(uploads.open_count(), 2);
    assert_eq!(uploads.received(&repository, &id).await.unwrap(), 7);
    // It counts all the same: 8 of 10 bytes are taken.
    let mut body = Body::from("more");
    let refused = uploads.patch(&repository, &empty, arrival(&mut body)).await.unwrap_err();
    assert!(
        matches!(refused, UploadError::Store(error) if matches!(error.kind, StoreErrorKind::Quota { .. }))
    );

    let digest = Digest::of(b"content!");
    let mut body = Body::from("!");
    uploads.finish(&repository, &id, &digest, arrival(&mut body)).await.unwrap();
    assert!(uploads.is_there(&repository, &digest).await.unwrap());
    uploads.cancel(&repository, &fresh).await.unwrap();
    let mut body = Body::from("or");
    assert_eq!(
        uploads.patch(&repository, &empty, arrival(&mut body)).await.unwrap(),
        2,
        "all there is"
    );
}
