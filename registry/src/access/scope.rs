//! What a client asks a token for: `repository:NAME:pull,push` (Docker's token specification).

use super::action::{Action, Actions};

/// Scopes in one request; a copy between repositories has two.
const SCOPES_MAX: usize = 50;

/// Something that a token may be good for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// What may be done with a repository.
    Repository {
        /// Its name, as the client wrote it.
        name: String,
        /// What is wanted.
        actions: Actions,
    },
    /// The list of repositories: `registry:catalog:*`.
    Catalog,
}

/// Why scopes are refused as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ScopeError {
    /// Too many.
    #[error("more than 50 scopes are asked for")]
    TooMany,
    /// One is not TYPE:NAME:ACTIONS.
    #[error("a scope is not of the form TYPE:NAME:ACTIONS")]
    Malformed,
}

impl Scope {
    /// Reads scopes that are separated by spaces, as form fields have them. Types that mean nothing
    /// here are left out: the token is not good for them.
    pub fn parse_all<'a>(
        texts: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<Self>, ScopeError> {
        let mut scopes = Vec::new();
        let texts = texts.into_iter().flat_map(|text| text.split(' '));
        for (number, text) in texts.filter(|text| !text.is_empty()).enumerate() {
            if number >= SCOPES_MAX {
                return Err(ScopeError::TooMany);
            }
            scopes.extend(Self::parse(text)?);
        }
        Ok(scopes)
    }

    /// Reads one. The name may hold `:`, as in `repository:host:5000/name:pull`.
    fn parse(text: &str) -> Result<Option<Self>, ScopeError> {
        let (kind, rest) = text.split_once(':').ok_or(ScopeError::Malformed)?;
        let (name, actions) = rest.rsplit_once(':').ok_or(ScopeError::Malformed)?;
        if kind.is_empty() || name.is_empty() {
            return Err(ScopeError::Malformed);
        }
        // A class may follow the type: `repository(plugin)`.
        let kind = kind.split_once('(').map_or(kind, |(kind, _)| kind);
        Ok(match (kind, name) {
            ("repository", name) => {
                let actions = Actions::of_words(actions.split(','));
                Some(Self::Repository { name: name.to_owned(), actions })
            }
            ("registry", "catalog") => Some(Self::Catalog),
            _ => None,
        })
    }

    /// Returns the scope that a client needs for a request, as a challenge names it.
    pub fn needed(action: Action, repository: &str) -> String {
        let actions = match action {
            // Clients that push also look whether something is there.
            Action::Push => "pull,push",
            action => action.name(),
        };
        format!("repository:{repository}:{actions}")
    }
}

#[cfg(test)]
mod tests;
