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
    let mut patience =
        Patience::new(stream, UNREAD_MAX, &ConnectionMetrics::default(), &Places::new(1));
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

/// It may read nothing for as long as is allowed, and less once others wait.
#[tokio::test(start_paused = true)]
async fn a_client_that_reads_too_little_is_given_up_when_its_place_is_wanted() {
    const HOUR: Duration = Duration::from_hours(1);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    let places = Places::new(0);
    let metrics = ConnectionMetrics::default();
    let mut patience = Patience::new(stream, HOUR * 9, &metrics, &places);
    let began = Instant::now();
    let writing = async {
        loop {
            if let Err(error) = patience.write_all(&vec![0; 1 << 16]).await {
                return error;
            }
        }
    };
    let wanting = async {
        let mut ticks = tokio::time::interval_at(began + HOUR, HOUR);
        ticks.tick().await;
        places.take().await.unwrap_err();
        ticks.tick().await;
    };
    let error = tokio::select! {
        error = writing => error,
        () = wanting => panic!("it is not given up"),
    };
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert!(began.elapsed() >= HOUR && began.elapsed() <= HOUR + LOOK_EVERY, "{began:?}");
    drop(client);
}
