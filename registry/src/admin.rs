//! Maintenance of a store, also while it is served.
//!
//! The one who has the store's lock does the work. A server takes requests on a socket in the root,
//! `admin.sock`, which only its owner can open; a command talks to it, and opens the store itself
//! only when nobody serves it.
//!
//! A request is one line of JSON, a reply is lines of JSON until the connection ends:
//!
//! ```text
//! → {"command":"gc","dry_run":true,"everything":true}
//! ← {"command":"gc","event":"condemned","repository":"a","kind":"blob","digest":"sha256:…"}
//! ← {"command":"gc","event":"done","dry_run":true,"condemned":1,…}
//! ```
//!
//! Who hangs up stops what he asked for; what is done stays done.

use std::io;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use crate::index::Reindexed;
use crate::{gc, scrub};

mod client;
mod server;

pub use self::client::{AdminError, Told, run};
pub(crate) use self::server::start;

/// The socket's name in the root.
pub(crate) const SOCKET: &str = "admin.sock";

/// What can be asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase")]
pub enum Request {
    /// Collect garbage.
    Gc {
        /// Change nothing and tell what would be done.
        dry_run: bool,
        /// Look everywhere, not only where garbage is known to have come about.
        everything: bool,
    },
    /// Read everything again.
    Scrub {
        /// Begin anew, also when a pass is under way.
        restart: bool,
        /// Bytes read per second, at most; without, what the configuration says.
        rate: Option<u64>,
    },
    /// Make the index again from the objects.
    Reindex,
}

/// One line of a reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase")]
pub enum Reply {
    /// It failed.
    Failed {
        /// Why.
        error: String,
    },
    /// What a collection tells.
    Gc(gc::Event),
    /// What scrubbing tells.
    Scrub(scrub::Event),
    /// The index is made.
    Reindex(Reindexed),
}

/// Returns a path of the socket that is short enough for an address, whatever the root's is, as
/// long as the directory is open.
fn short(root: &fs::File) -> PathBuf {
    use std::os::fd::AsRawFd as _;
    Path::new("/proc/self/fd").join(root.as_raw_fd().to_string()).join(SOCKET)
}

fn line(reply: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(reply).map_err(io::Error::other)?;
    line.push(b'\n');
    Ok(line)
}
