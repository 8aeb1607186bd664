//! What every reader must refuse. Each vector breaks one rule.

use super::artifact::Pool;

mod device;
mod documents;
mod layers;
mod pack;
mod page_index;
mod pages;

pub(super) fn add(pool: &mut Pool) -> anyhow::Result<()> {
    documents::add(pool)?;
    layers::add(pool)?;
    pack::add(pool)?;
    page_index::add(pool)?;
    pages::add(pool)?;
    device::add(pool)
}
