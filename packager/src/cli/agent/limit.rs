//! How long `kyb` waits for an operation whose time is over: it is cancelled then, but what it made
//! may be taken away only when containerd is back, and that is the agent's to see to.

use std::time::Duration;

use kybernate_packager::agent_api::Operation;
use tokio::time::Instant;

use super::super::Failure;
use super::pause;

/// What an operation whose time is over may take to end by itself: CRIU gets five seconds.
const GRACE: Duration = Duration::from_secs(10);

/// When an operation should have ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit(Option<Instant>);

impl Limit {
    /// Reads the operation's own deadline.
    pub(super) fn of(operation: &Operation) -> Self {
        let deadline = operation.deadline.parse::<jiff::Timestamp>().ok();
        let left = deadline.map(|deadline| {
            let left = deadline.duration_since(jiff::Timestamp::now());
            Instant::now() + Duration::try_from(left).unwrap_or_default() + GRACE
        });
        Self(left)
    }

    /// Returns when it is over; then about once a second.
    pub(super) async fn is_over(self) {
        match self.0 {
            Some(limit) if limit > Instant::now() => tokio::time::sleep_until(limit).await,
            Some(_) => pause().await,
            None => std::future::pending().await,
        }
    }
}

/// Returns why nobody should wait for it any longer, if it cannot get any further by itself.
pub(super) fn overdue(operation: &Operation) -> Option<Failure> {
    let Operation { id, error, waits_for, .. } = operation;
    if waits_for.is_empty() {
        return None;
    }
    let why = if error.is_empty() { "its time is over" } else { error };
    Some(Failure::failed(format!(
        "{why}; operation {id} waits for {waits_for}, and the agent takes away what it made when that \
         is back: `kyb ps --operations` shows it"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_what_waits_and_has_a_deadline_is_left_to_the_agent() {
        let never = Limit::of(&Operation::default()).is_over();
        assert!(tokio::time::timeout(Duration::from_hours(9), never).await.is_err());
        let deadline = jiff::Timestamp::now() + Duration::from_mins(1);
        let mut one = Operation { deadline: deadline.to_string(), ..Operation::default() };
        let (limit, began) = (Limit::of(&one), Instant::now());
        limit.is_over().await;
        let waited = began.elapsed();
        assert!((Duration::from_secs(65)..Duration::from_secs(75)).contains(&waited), "{waited:?}");
        assert!(overdue(&one).is_none());
        one.waits_for = "containerd (it is away)".to_owned();
        let told = overdue(&one).unwrap().to_string();
        assert!(told.contains("its time is over") && told.contains("it is away"), "{told}");
        one.error = "the dump failed".to_owned();
        assert!(overdue(&one).unwrap().to_string().contains("the dump failed"));
    }
}
