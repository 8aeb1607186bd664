//! What can be done with a repository.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What somebody wants to do with a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Read blobs, manifests and lists.
    Pull,
    /// Write blobs, manifests and tags.
    Push,
    /// Delete them.
    Delete,
    /// Bring a checkpoint back to life. Only tokens carry it; agents check it, the registry does
    /// not.
    Restore,
}

/// A set of [`Action`]s.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Actions(u8);

impl Action {
    /// All of them, in the order in which sets are written.
    pub const ALL: [Self; 4] = [Self::Pull, Self::Push, Self::Delete, Self::Restore];

    /// Returns the word that tokens, scopes and policies use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pull => "pull",
            Self::Push => "push",
            Self::Delete => "delete",
            Self::Restore => "restore",
        }
    }

    /// Reads what [`Action::name`] returns.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.name() == text)
    }

    fn bit(self) -> u8 {
        match self {
            Self::Pull => 1,
            Self::Push => 2,
            Self::Delete => 4,
            Self::Restore => 8,
        }
    }
}

impl Actions {
    /// Everything.
    pub const ALL: Self = Self(15);
    /// What a registry itself does: what `*` in a token or scope stands for.
    pub const OF_A_REGISTRY: Self = Self(7);

    /// Reads words; `*` is everything but `restore`, and words that mean nothing here are left out.
    pub fn of_words<'a>(words: impl IntoIterator<Item = &'a str>) -> Self {
        words.into_iter().fold(Self::default(), |actions, word| match word {
            "*" => actions.and(Self::OF_A_REGISTRY),
            word => Action::parse(word).map_or(actions, |action| actions.and(action.into())),
        })
    }

    /// Whether an action is in the set.
    pub fn has(self, action: Action) -> bool {
        self.0 & action.bit() != 0
    }

    /// Whether nothing is in the set.
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// Returns what is in either set.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns what is in both sets.
    #[must_use]
    pub fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the actions in the set.
    pub fn iter(self) -> impl Iterator<Item = Action> {
        Action::ALL.into_iter().filter(move |action| self.has(*action))
    }
}

impl From<Action> for Actions {
    fn from(action: Action) -> Self {
        Self(action.bit())
    }
}

impl FromIterator<Action> for Actions {
    fn from_iter<T: IntoIterator<Item = Action>>(actions: T) -> Self {
        actions.into_iter().fold(Self::default(), |set, action| set.and(action.into()))
    }
}

impl fmt::Display for Actions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, action) in self.iter().enumerate() {
            let comma = if number == 0 { "" } else { "," };
            write!(f, "{comma}{}", action.name())?;
        }
        Ok(())
    }
}
