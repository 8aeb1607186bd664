//! Stands before every endpoint: who may not, does not get in, and is not told what is inside.
//!
//! Whether a repository is shown to be there must never depend on whether it is there, for callers
//! who may not see it. So the decision is made from names and rules alone, before the store is
//! asked; and where the answer is "there is no such thing", the handler gives it, looking at a
//! repository that does not exist.

use std::borrow::Cow;

use http::Method;
use kybernate_spec::RepositoryName;

use super::Call;
use crate::access::Caller;
use crate::access::action::Action;
use crate::error::ApiError;
use crate::route::Route;

/// How a request goes on.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry<'a> {
    /// As it is.
    Open,
    /// To a repository that does not exist.
    Hidden(Route<'a>),
}

/// Decides about a request.
pub(super) async fn enter<'a>(call: Call<'a>, route: &'a Route<'_>) -> Result<Entry<'a>, ApiError> {
    let Caller::Somebody { .. } = call.caller else { return Ok(Entry::Open) };
    let Some((action, name)) = needed(route, &call.parts.method) else { return Ok(Entry::Open) };
    // Malformed names are the handler's to refuse: they name nothing that could be hidden.
    let Ok(repository) = name.parse::<RepositoryName>() else { return Ok(Entry::Open) };
    if call.caller.may(action, name) {
        return Ok(Entry::Open);
    }
    if let Route::Upload(_, id) = route
        && let Ok(id) = id.parse()
        && call.app.uploads.received(&repository, &id).await.is_ok()
    {
        // Whoever began the upload was asked then; its id is a secret that suffices for its life.
        return Ok(Entry::Open);
    }
    let visible = action != Action::Pull && call.caller.may(Action::Pull, name);
    match action {
        Action::Pull | Action::Delete if !visible => Ok(hide(route, call.app.access.hidden())),
        _ => Err(ApiError::Denied),
    }
}

/// Returns what a request does with which repository, when it does something with one.
fn needed<'a>(route: &'a Route<'_>, method: &Method) -> Option<(Action, &'a str)> {
    let name = route.repository()?;
    let action = match (route, method) {
        (Route::Uploads(_) | Route::Upload(..), _) | (Route::Manifest(..), &Method::PUT) => {
            Action::Push
        }
        (Route::Blob(..) | Route::Manifest(..), &Method::DELETE) => Action::Delete,
        _ => Action::Pull,
    };
    Some((action, name))
}

/// Leads to the same endpoint of another repository.
fn hide<'a>(route: &'a Route<'_>, name: &'a RepositoryName) -> Entry<'a> {
    let name = || Cow::Borrowed(name.as_str());
    let same = |part: &'a Cow<'_, str>| Cow::Borrowed(&**part);
    Entry::Hidden(match route {
        Route::Tags(_) => Route::Tags(name()),
        Route::Blob(_, digest) => Route::Blob(name(), same(digest)),
        Route::Uploads(_) => Route::Uploads(name()),
        Route::Upload(_, id) => Route::Upload(name(), same(id)),
        Route::Manifest(_, reference) => Route::Manifest(name(), same(reference)),
        Route::Referrers(_, subject) => Route::Referrers(name(), same(subject)),
        _ => return Entry::Open,
    })
}
