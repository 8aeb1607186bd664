//! Key files and their passwords.

use std::ffi::OsString;
use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};

use kybernate_packager::key::{KeyError, KeyType, PublicKey, SigningKey};

use super::Failure;

/// Where cosign takes the password from.
const PASSWORD: &str = "COSIGN_PASSWORD";

/// Opens a private key on a thread where asking and deriving the key may take long.
pub(super) async fn open(path: &Path) -> Result<SigningKey, Failure> {
    let path = path.to_owned();
    blocking(move || SigningKey::from_file(&path, || password("Password of the key: "))).await
}

/// Reads public keys.
pub(super) async fn read(paths: &[PathBuf]) -> Result<Vec<PublicKey>, Failure> {
    let paths = paths.to_vec();
    blocking(move || paths.iter().map(|path| PublicKey::from_file(path)).collect()).await
}

/// Makes a key pair.
pub(super) async fn make(
    prefix: &Path,
    kind: KeyType,
) -> Result<(SigningKey, [PathBuf; 2]), Failure> {
    let prefix = prefix.to_owned();
    let password = tokio::task::spawn_blocking(new_password)
        .await
        .map_err(Failure::failed)?
        .map_err(Failure::failed)?
        .ok_or_else(|| {
            Failure::usage("the key needs a password: set COSIGN_PASSWORD, or run in a terminal")
        })?;
    blocking(move || {
        let key = SigningKey::generate_of(kind)?;
        let paths = key.write_files(&prefix, password.as_bytes())?;
        Ok((key, paths))
    })
    .await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, KeyError> + Send + 'static,
) -> Result<T, Failure> {
    let done = tokio::task::spawn_blocking(work).await.map_err(Failure::failed)?;
    Ok(done?)
}

fn password(prompt: &str) -> io::Result<Option<String>> {
    match given() {
        Some(password) => Ok(Some(password)),
        None if io::stdin().is_terminal() => rpassword::prompt_password(prompt).map(Some),
        None => Ok(None),
    }
}

fn new_password() -> io::Result<Option<String>> {
    if let Some(password) = given() {
        return Ok(Some(password));
    }
    let Some(password) = password("Password for the new key: ")? else { return Ok(None) };
    if rpassword::prompt_password("The same again: ")? == password {
        return Ok(Some(password));
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "the passwords differ"))
}

/// The password in the environment; never an argument, which every user of the machine can read.
fn given() -> Option<String> {
    std::env::var_os(PASSWORD).map(OsString::into_string).and_then(Result::ok)
}
