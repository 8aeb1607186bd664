//! Says what an operation waits for while nothing else can be seen of it: containerd that does not
//! answer, since it is being started anew, or hangs.

use std::time::Duration;

use kybernate_spec::chain;
use tokio::time::Instant;

use crate::operations::Driver;
use crate::runtime::{Containerd, RuntimeError, RuntimeErrorKind};

/// How often containerd is asked whether it is there. A call of its own: it answers while a dump
/// goes on.
const ASK_EVERY: Duration = Duration::from_secs(1);

/// How long it may take to answer. One that is well takes milliseconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// Does `work`, and has the operation tell whenever it can get no further for want of containerd.
pub(crate) async fn for_containerd<T>(
    containerd: &Containerd,
    driver: &Driver,
    work: impl Future<Output = T>,
) -> T {
    let mut work = std::pin::pin!(work);
    let watched = watch(driver, || answers(containerd));
    let done = tokio::select! {
        done = &mut work => done,
        never = watched => match never {},
    };
    driver.waits_for("");
    done
}

/// Tells what is missing as long as `answers` says that something is.
async fn watch<F>(driver: &Driver, mut answers: impl FnMut() -> F) -> std::convert::Infallible
where
    F: Future<Output = Result<(), RuntimeError>>,
{
    // Most operations are over before the first look.
    let mut ticks = tokio::time::interval_at(Instant::now() + ASK_EVERY, ASK_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match answers().await {
            Ok(()) => driver.waits_for(""),
            Err(error) => {
                let why = error.kind;
                driver.waits_for(&format!("containerd ({})", chain(&why)));
            }
        }
    }
}

async fn answers(containerd: &Containerd) -> Result<(), RuntimeError> {
    let late = || RuntimeError {
        operation: "ask",
        subject: "version".to_owned(),
        kind: RuntimeErrorKind::Timeout,
    };
    let asked = tokio::time::timeout(ANSWER_LIMIT, containerd.version()).await;
    match asked.unwrap_or_else(|_elapsed| Err(late())) {
        Err(error) if error.is_away() => Err(error),
        // Whatever it says, it is there.
        Ok(_) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operations::{Operations, Subject};

    async fn driver(directory: &std::path::Path) -> Driver {
        Operations::open(directory).unwrap().begin(Subject::example()).await.unwrap()
    }

    #[tokio::test]
    async fn an_operation_tells_that_containerd_is_away_as_long_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let driver = driver(directory.path()).await;
        let socket = directory.path().join("containerd.sock");
        let containerd = Containerd::at(&socket);
        let until = |wanted: &'static str| {
            let driver = driver.clone();
            async move {
                let told = async {
                    while !driver.to_api().waits_for.contains(wanted) {
                        tokio::task::yield_now().await;
                    }
                };
                tokio::time::timeout(Duration::from_secs(30), told).await.unwrap();
            }
        };
        assert_eq!(driver.to_api().waits_for, "");
        for_containerd(&containerd, &driver, until("containerd.sock")).await;
        // What is over waits for nothing.
        assert_eq!(driver.to_api().waits_for, "");
        // One that is there and says nothing.
        let _silent = tokio::net::UnixListener::bind(&socket).unwrap();
        for_containerd(&containerd, &driver, until("no answer in time")).await;
    }
}
