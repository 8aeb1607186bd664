//! How much one client may ask for.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::config::LimitSettings;

/// Clients known at once, about 100 bytes each; more share one account.
const CLIENTS_MAX: usize = 100_000;
/// How often those who have come to rest are forgotten when there are too many.
const FORGET_EVERY: Duration = Duration::from_secs(1);
/// Seconds of requests that may come at once unless it is set otherwise.
const BURST_SECONDS: u32 = 10;
/// When to come again after too many requests in progress; nobody knows when they end.
const BUSY_AGAIN: Duration = Duration::from_secs(1);

/// Limits, and who has used how much of them.
#[derive(Debug)]
pub struct Limits {
    rate: Option<Rate>,
    concurrent_max: Option<u32>,
    // Held for a look-up only, never across an `.await`, hence not a tokio mutex.
    clients: Mutex<Clients>,
}

/// One request per `interval` over time, `tolerance` early at most.
#[derive(Debug, Clone, Copy)]
struct Rate {
    interval: Duration,
    tolerance: Duration,
}

#[derive(Debug)]
struct Clients {
    accounts: HashMap<Client, Account>,
    forgotten: Instant,
}

/// Who is counted.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Client {
    /// Somebody whose name is proven.
    Name(String),
    /// Whoever comes from an address.
    Address(IpAddr),
    /// Those who are too many to be counted one by one.
    Others,
}

#[derive(Debug)]
struct Account {
    /// When the next request would be neither early nor late.
    due: Instant,
    running: u32,
}

/// The right to one request in progress.
#[derive(Debug)]
pub struct Place {
    limits: Arc<Limits>,
    client: Client,
}

/// Too much: come again after that long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComeAgain(pub Duration);

impl Client {
    /// Returns how an address is counted: one that a client chooses freely is not an address.
    pub fn of(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6((address.to_bits() & !u128::from(u64::MAX)).into()),
            address @ IpAddr::V4(_) => address,
        })
    }
}

impl Limits {
    /// Returns nothing when nothing is limited.
    pub fn new(settings: &LimitSettings, now: Instant) -> Option<Arc<Self>> {
        let rate = settings.requests_per_second.map(|requests| {
            let burst = settings.burst.unwrap_or(requests.saturating_mul(BURST_SECONDS));
            Rate::new(requests, burst)
        });
        let concurrent_max = settings.concurrent_requests;
        if rate.is_none() && concurrent_max.is_none() {
            return None;
        }
        Some(Self::with(rate, concurrent_max, now))
    }

    /// Returns limits of what is counted only when it turns out wrong: so many per second, at once,
    /// and under way at once.
    pub(super) fn of_guesses(
        (per_second, at_once, under_way): (u32, u32, u32),
        now: Instant,
    ) -> Arc<Self> {
        Self::with(Some(Rate::new(per_second, at_once)), Some(under_way), now)
    }

    fn with(rate: Option<Rate>, concurrent_max: Option<u32>, now: Instant) -> Arc<Self> {
        let clients = Mutex::new(Clients { accounts: HashMap::new(), forgotten: now });
        Arc::new(Self { rate, concurrent_max, clients })
    }

    /// Counts a request, which is in progress as long as the returned value lives.
    pub fn enter(self: &Arc<Self>, client: Client, now: Instant) -> Result<Place, ComeAgain> {
        let mut clients = self.lock();
        let client = clients.admit(client, now);
        let account =
            clients.accounts.entry(client.clone()).or_insert(Account { due: now, running: 0 });
        if self.concurrent_max.is_some_and(|most| account.running >= most) {
            return Err(ComeAgain(BUSY_AGAIN));
        }
        if let Some(rate) = self.rate {
            let due = account.due.max(now);
            let early = due.saturating_duration_since(now);
            if early > rate.tolerance {
                return Err(ComeAgain(early.saturating_sub(rate.tolerance)));
            }
            account.due = due + rate.interval;
        }
        account.running += 1;
        Ok(Place { limits: Arc::clone(self), client })
    }

    fn lock(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Rate {
    fn new(per_second: u32, burst: u32) -> Self {
        let interval = Duration::from_secs(1) / per_second.max(1);
        Self { interval, tolerance: interval.saturating_mul(burst.saturating_sub(1)) }
    }
}

impl Place {
    /// Ends a request that does not count towards the rate.
    pub(super) fn forgive(&self) {
        let Some(rate) = self.limits.rate else { return };
        let mut clients = self.limits.lock();
        if let Some(account) = clients.accounts.get_mut(&self.client) {
            account.due = account.due.checked_sub(rate.interval).unwrap_or(account.due);
        }
    }
}

impl Clients {
    /// Returns the account that counts for a client.
    fn admit(&mut self, client: Client, now: Instant) -> Client {
        if self.accounts.len() < CLIENTS_MAX || self.accounts.contains_key(&client) {
            return client;
        }
        if now.saturating_duration_since(self.forgotten) >= FORGET_EVERY {
            // Whoever is at rest has a whole account again, as if never seen.
            self.accounts.retain(|_, account| account.running > 0 || account.due > now);
            self.forgotten = now;
        }
        if self.accounts.len() < CLIENTS_MAX { client } else { Client::Others }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut clients = self.limits.lock();
        if let Some(account) = clients.accounts.get_mut(&self.client) {
            account.running = account.running.saturating_sub(1);
        }
    }
}

impl ComeAgain {
    /// Returns the value of `Retry-After`, whole seconds and at least one.
    pub fn seconds(self) -> u64 {
        let Self(wait) = self;
        wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)).max(1)
    }
}

#[cfg(test)]
mod tests;
