//! The rules as the configuration file says them now: it is read again when it changes, and when
//! somebody asks for it (SIGHUP).

use std::fmt;
use std::io::{self, Read as _};
use std::sync::{Arc, Mutex, PoisonError};

use fs_err as fs;
use kybernate_spec::chain;

use super::Rules;
use crate::config::ServeArgs;

/// Most bytes of a configuration file that are compared: thousands of rules.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Who may ask, as the last good file says.
pub struct Callers {
    /// How the configuration was read; nothing where it never changes.
    source: Option<ServeArgs>,
    // Held for an assignment only, never across an `.await` or while a file is read.
    rules: Mutex<Arc<Rules>>,
    // Held while files are read, on threads that may block, so that they are read once at a time.
    seen: Mutex<Option<Vec<u8>>>,
}

impl fmt::Debug for Callers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callers").field("rules", &self.current()).finish_non_exhaustive()
    }
}

/// Whether the file counts whatever it was before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// Only when it has changed.
    IfChanged,
    /// Also when only what it names may have changed: keys, certificates.
    Always,
}

impl Callers {
    /// Rules that stay as they are.
    pub fn of(rules: Rules) -> Self {
        Self { source: None, rules: Mutex::new(Arc::new(rules)), seen: Mutex::default() }
    }

    /// Rules that came from where `source` says.
    pub(crate) fn from(source: ServeArgs, rules: Rules) -> Self {
        let seen = Mutex::new(content(&source).ok());
        Self { source: Some(source), seen, ..Self::of(rules) }
    }

    /// Returns the rules.
    pub(crate) fn current(&self) -> Arc<Rules> {
        Arc::clone(&self.rules.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads the file again. What is wrong with it is logged, and what it said before stays in
    /// force. Returns whether it says something new. Blocks.
    pub(crate) fn look(&self, look: Look) -> bool {
        let Some(source) = &self.source else { return false };
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let now = content(source).ok();
        if look == Look::IfChanged && *seen == now {
            return false;
        }
        *seen = now;
        match source.clone().validate() {
            Ok(config) => {
                let rules = config.callers.current();
                tracing::info!(rules = rules.0.len(), "the [[caller]] rules were read again");
                *self.rules.lock().unwrap_or_else(PoisonError::into_inner) = rules;
                true
            }
            Err(wrong) => {
                for mistake in wrong {
                    tracing::error!(
                        mistake = %chain(&mistake),
                        "the [[caller]] rules were not read again: what they said before stays in force"
                    );
                }
                false
            }
        }
    }
}

fn content(source: &ServeArgs) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    fs::File::open(source.file())?.take(FILE_BYTES_MAX).read_to_end(&mut content)?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::super::{Caller, Place, Right};
    use super::*;

    fn may(callers: &Callers, uid: u32) -> bool {
        callers.current().say(&Caller::User(uid), Right::Read, Place::Anywhere)
    }

    #[test]
    fn a_changed_file_counts_and_a_broken_one_never() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("agent.toml");
        let rule = |uid: u32| {
            format!("[[caller]]\nwho = 'uid:{uid}'\nmay = ['read']\nnamespaces = ['*']\n")
        };
        fs::write(&file, rule(1)).unwrap();
        let args = ServeArgs { config: Some(file.clone()), ..ServeArgs::default() };
        let callers = args.validate().unwrap().callers;
        assert!(may(&callers, 1) && !callers.look(Look::IfChanged));
        fs::write(&file, rule(2)).unwrap();
        assert!(callers.look(Look::IfChanged) && may(&callers, 2) && !may(&callers, 1));
        // Nor does anything of a file count that says something wrong elsewhere.
        for broken in ["[[caller]]\nwho = 3\n".to_owned(), format!("no_setting = 1\n{}", rule(3))] {
            fs::write(&file, broken).unwrap();
            assert!(!callers.look(Look::IfChanged) && may(&callers, 2) && !may(&callers, 3));
        }
        fs::remove_file(&file).unwrap();
        assert!(!callers.look(Look::IfChanged) && may(&callers, 2));
        fs::write(&file, rule(2)).unwrap();
        assert!(callers.look(Look::IfChanged) && !callers.look(Look::IfChanged));
        assert!(callers.look(Look::Always) && may(&callers, 2));
    }
}
