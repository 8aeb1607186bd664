//! Users and passwords: a file as `htpasswd -B` writes it.
//!
//! ```text
//! alice:$2y$10$…          name, then a bcrypt hash
//! # a comment
//! ```

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use bcrypt::HashParts;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::follow::mistake;
use super::known::{Known, Mark};
use super::limit::{Client, Limits};
use super::subject::{Holder, Identity};
use crate::config::Mistake;

/// Highest cost accepted: 2^16 rounds take seconds, and each wrong password costs them.
const COST_MAX: u32 = 16;
/// Passwords that wait to be checked; more are sent away.
const WAITING_MAX: usize = 128;
/// Of these, how many from one address: one alone must not keep everybody else waiting.
const WAITING_FROM_ONE_MAX: u32 = 16;
/// Wrong passwords that an address may try at once, …
const WRONG_AT_ONCE: u32 = 60;
/// … and how many per second over time. A right one costs nothing.
const WRONG_PER_SECOND: u32 = 1;

/// The users of one state of the file, and who of them has proven to be one.
#[derive(Debug)]
pub(super) struct Users {
    hashes: HashMap<Box<str>, Box<str>>,
    /// Hashes that no password fits, at the costs that real ones have.
    decoys: Vec<Box<str>>,
    known: Known,
}

/// Checks passwords where blocking is allowed, a few at a time: each is meant to cost a tenth of a
/// second of a processor.
#[derive(Debug)]
pub(super) struct Checker {
    waiting: Arc<Semaphore>,
    working: Arc<Semaphore>,
    /// What an address has tried. Whoever is remembered is not counted.
    guesses: Arc<Limits>,
}

/// Why a password was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum PasswordError {
    #[error("there is no such user, or the password is wrong")]
    Wrong,
    #[error("too many passwords wait to be checked, or too many from this address were wrong")]
    Busy,
}

impl Users {
    /// Reads a file and returns everything that is wrong at once, without the hashes.
    pub(super) fn read(path: &Path, content: &[u8], key: &[u8; 32]) -> Result<Self, Vec<Mistake>> {
        let (mut hashes, mut wrong) = (HashMap::new(), Vec::new());
        let mut costs = Vec::new();
        for (number, line) in content.split(|byte| *byte == b'\n').enumerate() {
            let mut refuse = |told: &str| wrong.push(mistake(path, Some(number + 1), told));
            let Ok(line) = std::str::from_utf8(line).map(str::trim) else {
                refuse("the line is not UTF-8");
                continue;
            };
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            match entry(line) {
                Err(told) => refuse(told),
                Ok((user, hash, cost)) => {
                    costs.push(cost);
                    if hashes.insert(Box::from(user), Box::from(hash)).is_some() {
                        refuse("the user has a line already; remove one");
                    }
                }
            }
        }
        if !wrong.is_empty() {
            return Err(wrong);
        }
        costs.sort_unstable();
        if costs.is_empty() {
            costs.push(bcrypt::DEFAULT_COST);
        }
        let decoys = costs.into_iter().map(decoy).collect();
        Ok(Self { hashes, decoys, known: Known::new(key) })
    }

    /// Whether there is such a user.
    pub(super) fn has(&self, user: &str) -> bool {
        self.hashes.contains_key(user)
    }

    /// Returns the hash to check a password against. One for a user who is not there costs what it
    /// costs for one who is, and always the same for the same name.
    pub(super) fn hash(&self, user: &str) -> &str {
        if let Some(hash) = self.hashes.get(user) {
            return hash;
        }
        let [first, second, ..] = self.known.mark(&["decoy", user]);
        let pick = usize::from(u16::from_le_bytes([first, second]));
        let decoy = pick.checked_rem(self.decoys.len()).and_then(|at| self.decoys.get(at));
        decoy.map_or("", |hash| hash)
    }

    /// Whether the password fits. Blocks for as long as the hash is meant to take.
    fn fits(&self, user: &str, password: &str) -> bool {
        let fits = bcrypt::verify(password, self.hash(user));
        fits.unwrap_or(false) && self.has(user)
    }

    fn recall(&self, mark: &Mark) -> Option<Arc<Identity>> {
        self.known.find(mark, SystemTime::UNIX_EPOCH)
    }
}

fn entry(line: &str) -> Result<(&str, &str, u32), &'static str> {
    const SHAPE: &str = "the line is not NAME:HASH; write it with `htpasswd -nB NAME`";
    let (user, hash) = line.split_once(':').ok_or(SHAPE)?;
    if user.is_empty() || user.chars().any(char::is_control) {
        return Err(SHAPE);
    }
    let parts: Option<HashParts> = hash.parse().ok();
    match parts.map(|parts| parts.get_cost()) {
        None => Err("the hash is not bcrypt's; write the line with `htpasswd -nB NAME`"),
        Some(cost) if cost > COST_MAX => Err("the hash costs too much; use a cost of at most 16"),
        Some(cost) => Ok((user, hash, cost)),
    }
}

/// Returns a hash of the given cost that nobody knows a password for.
fn decoy(cost: u32) -> Box<str> {
    format!("$2b${cost:02}${}", "abcdefghijklmnopqrstuu".to_owned() + &"x".repeat(30) + ".").into()
}

impl Default for Checker {
    fn default() -> Self {
        let workers = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            waiting: Arc::new(Semaphore::new(WAITING_MAX)),
            working: Arc::new(Semaphore::new(workers)),
            guesses: Limits::of_guesses(
                (WRONG_PER_SECOND, WRONG_AT_ONCE, WAITING_FROM_ONE_MAX),
                Instant::now(),
            ),
        }
    }
}

impl Checker {
    /// Returns the identity of a user when the password is right. What was right once is not
    /// checked again until the file changes. What else an address tries is counted before it costs
    /// anything: whether it was right is told to nobody who has tried too much.
    pub(super) async fn check(
        &self,
        users: &Arc<Users>,
        (user, password): (&str, &str),
        address: IpAddr,
    ) -> Result<Arc<Identity>, PasswordError> {
        let mark = users.known.mark(&["basic", user, password]);
        if let Some(identity) = users.recall(&mark) {
            return Ok(identity);
        }
        let guess = self.guesses.enter(Client::of(address), Instant::now());
        let guess = guess.map_err(|_come_again| PasswordError::Busy)?;
        let waiting = Arc::clone(&self.waiting).try_acquire_owned();
        let waiting = waiting.map_err(|_full| PasswordError::Busy)?;
        let working = Arc::clone(&self.working).acquire_owned().await;
        let working = working.map_err(|_closed| PasswordError::Busy)?;
        // Somebody else may have asked the same meanwhile: many requests begin at once.
        if let Some(identity) = users.recall(&mark) {
            guess.forgive();
            return Ok(identity);
        }
        let (held, checked) = ((waiting, working, guess), Arc::clone(users));
        let (user, password) = (user.to_owned(), password.to_owned());
        let checking = tokio::task::spawn_blocking(move || {
            // Held until the work is done, also when nobody waits for it any more.
            let (_waiting, _working, guess): (OwnedSemaphorePermit, OwnedSemaphorePermit, _) = held;
            checked.fits(&user, &password).then(|| {
                guess.forgive();
                let holder = Holder::User(user.into());
                let identity = Arc::new(Identity { holder, ..Identity::default() });
                checked.known.remember(mark, &identity, None);
                identity
            })
        });
        match checking.await {
            Ok(identity) => identity.ok_or(PasswordError::Wrong),
            Err(error) => {
                tracing::error!(%error, "failed to check a password");
                Err(PasswordError::Busy)
            }
        }
    }
}

#[cfg(test)]
mod tests;
