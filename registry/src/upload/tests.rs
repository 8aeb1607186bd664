use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use futures::channel::mpsc;
use futures::{SinkExt as _, StreamExt as _};

use super::*;
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
