use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;

use super::*;

const UNREAD_MAX: Duration = Duration::from_mins(5);

/// The clock is paused: it moves on only when nothing else can, that is, when the write waits.
#[tokio::test(start_paused = true)]
async fn a_client_that_reads_nothing_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    let (metrics, places) = (ConnectionMetrics::default(), Places::new(1));
    let mut patience = Patience::new(stream, UNREAD_MAX, &metrics, &places);
    let began = Instant::now();

    let error = loop {
        if let Err(error) = patience.write_all(&vec![0; 1 << 16]).await {
            break error;
        }
    };

    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert!(began.elapsed() >= UNREAD_MAX);
    drop(client);
}
