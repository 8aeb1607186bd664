//! What became of a checkpoint whose agent died when nothing but its tag was missing.

use std::str::FromStr as _;
use std::time::Duration;

use kybernate_packager::store::{ConnectOptions, Store, StoreErrorKind};
use kybernate_spec::{Digest, Location, chain};

use super::STORED;
use crate::operations::{Conclusion, Driver, Record, Tagging};
use crate::undo::ENDED;

/// How long a registry may take to say what has a tag. The source runs meanwhile.
const LOOK_LIMIT: Duration = Duration::from_secs(10);

/// Looks whether the checkpoint has its tag. Returns how it ends then, and where that cannot be known;
/// `None` when it has not, or was not that far.
pub(crate) async fn finish_tag(driver: &Driver, record: &Record) -> Option<Conclusion> {
    let (None, Some(tagging), Some(digest)) = (&record.stored, &record.tagging, &record.digest)
    else {
        return None;
    };
    let looked = tokio::time::timeout(LOOK_LIMIT, tagged(record, tagging)).await;
    let told = match looked {
        Ok(Ok(found)) if found.as_ref() != Some(digest) => return None,
        Ok(Ok(_)) if !tagging.stops => return Some(tagging.conclusion.clone()),
        Ok(Ok(_)) => format!("{ENDED}{STORED}"),
        Ok(Err(reason)) => unknown(record, &reason),
        Err(_late) => unknown(record, "it does not answer"),
    };
    Some(driver.ends(Conclusion::failed(told, None)))
}

fn unknown(record: &Record, reason: &str) -> String {
    let reference = &record.reference;
    format!("{ENDED}, and {reference} may be its checkpoint: it could not be looked at ({reason})")
}

/// Returns what has the tag.
async fn tagged(record: &Record, tagging: &Tagging) -> Result<Option<Digest>, String> {
    let read = Location::from_str(&record.reference);
    let location = read.map_err(|error| chain(&error).to_string())?;
    let connect = ConnectOptions { plain_http: tagging.plain_http, notes: None };
    let found = async { Store::open(&location, &connect).await?.resolve(&location).await };
    match found.await {
        Ok(found) => Ok(Some(found.descriptor.digest)),
        Err(error) if matches!(error.kind, StoreErrorKind::NotFound) => Ok(None),
        Err(error) => Err(chain(&error).to_string()),
    }
}
