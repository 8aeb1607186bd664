//! The records of CRIU's images.

use std::io::Read;

use kybernate_packager::criu::{ImageError, ImageReader, Magic};

use super::summary::SummaryError;

/// Why an image is not read.
pub(super) enum Failure {
    Image(ImageError),
    Other(SummaryError),
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Self {
        Self::Image(error)
    }
}

impl From<SummaryError> for Failure {
    fn from(error: SummaryError) -> Self {
        Self::Other(error)
    }
}

/// Reads the only record of an image.
pub(super) fn one<M: prost::Message + Default>(
    content: impl Read,
    magic: Magic,
) -> Result<M, Failure> {
    let missing = || SummaryError::Contradiction("an image must have one record".to_owned());
    Ok(maybe_one(content, magic)?.ok_or_else(missing)?)
}

/// Reads the only record of an image that may be empty.
pub(super) fn maybe_one<M: prost::Message + Default>(
    content: impl Read,
    magic: Magic,
) -> Result<Option<M>, Failure> {
    let mut reader = ImageReader::new(content, magic)?;
    let first = reader.next_message()?;
    match reader.next_message::<M>()? {
        None => Ok(first),
        Some(_) => {
            Err(SummaryError::Contradiction("an image must have one record".to_owned()).into())
        }
    }
}

pub(super) fn each<M: prost::Message + Default>(
    content: impl Read,
    magic: Magic,
    mut take: impl FnMut(M) -> Result<(), SummaryError>,
) -> Result<(), Failure> {
    let mut reader = ImageReader::new(content, magic)?;
    while let Some(message) = reader.next_message()? {
        take(message)?;
    }
    Ok(())
}

/// Reads the first record of an image, and passes over what comes behind it.
pub(super) fn first<M: prost::Message + Default>(
    mut content: impl Read,
    magic: Magic,
) -> Result<M, Failure> {
    let first = ImageReader::new(&mut content, magic)?.next_message()?;
    let missing = || SummaryError::Contradiction("an image must have a record".to_owned());
    std::io::copy(&mut content, &mut std::io::sink()).map_err(ImageError::from)?;
    Ok(first.ok_or_else(missing)?)
}
