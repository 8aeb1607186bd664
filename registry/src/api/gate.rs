//! Stands before every endpoint: who may not, does not get in, and is not told what is inside.
//!
//! Whether a repository is shown to be there must never depend on whether it is there, for callers
//! who may not see it. So the decision is made from names and rules alone, before the store is
//! asked; and where the answer is "there is no such thing", the handler gives it, looking at a
//! repository that does not exist.

use std::borrow::Cow;

use http::Method;
use kybernate_spec::RepositoryName;

use super::{Call, parameter};
use crate::access::action::Action;
use crate::access::challenge::Lack;
use crate::access::proof::Refusal;
use crate::access::scope::Scope;
use crate::access::{Caller, Somebody};
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
    let Caller::Somebody(caller) = call.caller else { return Ok(Entry::Open) };
    let Some((action, name)) = needed(route, &call.parts.method) else {
        return without_repository(call, route, caller).map(|()| Entry::Open);
    };
    // Malformed names are the handler's to refuse: they name nothing that could be hidden.
    let Ok(repository) = name.parse::<RepositoryName>() else { return Ok(Entry::Open) };
    if caller.refused().is_none() && call.caller.may(action, name) {
        return Ok(Entry::Open);
    }
    if let Route::Upload(_, id) = route
        && let Ok(id) = id.parse()
        && call.app.uploads.received(&repository, &id).await.is_ok()
    {
        // Whoever began the upload was asked then; its id is a secret that suffices for its life.
        return Ok(Entry::Open);
    }
    refuse_credentials(call, caller)?;
    if caller.could_bring_more(action, name)
        && let Some(challenge) = call.ask(lack(caller, &scope(call, route, action, name)))
    {
        let why = "prove who you are, or bring a token that is good for this".to_owned();
        return Err(ApiError::Unauthorized { challenge, why });
    }
    let visible = action != Action::Pull && call.caller.may(Action::Pull, name);
    match action {
        Action::Pull | Action::Delete if !visible => Ok(hide(route, call.app.access.hidden())),
        _ => Err(ApiError::Denied),
    }
}

/// Decides about what is about no repository.
fn without_repository(
    call: Call<'_>,
    route: &Route<'_>,
    caller: &Somebody,
) -> Result<(), ApiError> {
    let enough = match route {
        // Clients learn here whether, and how, they have to prove something.
        Route::Base => !caller.is_nobody() || caller.has_token(),
        Route::Catalog => caller.may_list(),
        _ => return Ok(()),
    };
    refuse_credentials(call, caller)?;
    let scope = if matches!(route, Route::Catalog) { "registry:catalog:*" } else { "" };
    match call.ask(lack(caller, scope)) {
        Some(challenge) if !enough => {
            Err(ApiError::Unauthorized { challenge, why: "prove who you are".to_owned() })
        }
        _ => Ok(()),
    }
}

/// Refuses credentials that prove nothing, also where none would be needed.
pub(super) fn refuse_credentials(call: Call<'_>, caller: &Somebody) -> Result<(), ApiError> {
    let Some(refusal) = caller.refused() else { return Ok(()) };
    tracing::warn!(client = %call.peer.address, why = %refusal, "credentials are not accepted");
    if *refusal == Refusal::Busy {
        return Err(ApiError::Busy {
            why: "too many passwords wait to be checked, or too many from this address were wrong",
            retry_after: 2,
        });
    }
    let challenge = call.ask(Lack::Validity).unwrap_or_default();
    Err(ApiError::Unauthorized { challenge, why: refusal.to_string() })
}

fn lack<'a>(caller: &Somebody, scope: &'a str) -> Lack<'a> {
    match (scope.is_empty(), caller.has_token()) {
        (true, _) => Lack::Credentials,
        (false, false) => Lack::Scope(scope),
        (false, true) => Lack::More(scope),
    }
}

/// Returns the scope of a token that would be good for a request.
fn scope(call: Call<'_>, route: &Route<'_>, action: Action, name: &str) -> String {
    let own = Scope::needed(action, name);
    let source = match route {
        Route::Uploads(_) => call.query().ok().and_then(|query| {
            parameter(&query, "from").and_then(|from| from.parse::<RepositoryName>().ok())
        }),
        _ => None,
    };
    match source {
        Some(from) => format!("{own} {}", Scope::needed(Action::Pull, from.as_str())),
        None => own,
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
