//! What was captured becomes an artifact in a registry.

use kybernate_packager::pack::{PackError, PackRequest, Packed, Runnable, pack};
use kybernate_packager::sign::sign;
use kybernate_packager::store::Store;
use kybernate_packager::verify::verify_signature;
use kybernate_spec::{Digest, Tag, chain};

use super::{COMMITTED, Captured, STOP_LIMIT, Taking, conclude};
use crate::checkpoint::base::Opened;
use crate::checkpoint::error::{CheckpointError, NO_IMAGE};
use crate::checkpoint::{After, Naming, Wish, facts, gpu};
use crate::operations::{Conclusion, OperationsError, Record, Tagging};

impl Taking<'_> {
    /// Packs, pushes, signs and, last of all, tags.
    pub(super) async fn publish(
        &mut self,
        store: &Store,
        captured: Captured,
    ) -> Result<Packed, CheckpointError> {
        let summary = self.restorable().await?;
        let image = facts::image(self.source, self.order).await?;
        if let Some(told) = gpu::warning(&summary.plugins, self.app.gpus.is_plugin()) {
            self.driver.note(|record| record.warnings.push(told));
        }
        let device = gpu::facts(&self.source.gpu, &summary.plugins).await;
        let device = device.map_err(CheckpointError::Stage)?;
        let mut config =
            facts::of(self.app, self.source, self.order, &summary, image.as_ref()).await;
        config.device = device;
        let request = PackRequest {
            dump: self.images(),
            config,
            image,
            rootfs_diff: Some(captured.rootfs),
            volumes: captured.volumes,
            runnable: self.order.runnable,
            subject: self.order.subject,
            base: None,
            page_hashes: self.order.page_hashes,
            resend: self.order.base == Wish::None,
            scratch: Some(self.directory.clone()),
        };
        let packed = self.pack(request, store).await?;
        let stops = self.order.after == After::Stop;
        if !packed.runnable && self.order.runnable != Runnable::Never {
            // Nobody could restore it: it takes nobody's place.
            if stops {
                return Err(CheckpointError::NoImage);
            }
            let told =
                format!("the checkpoint has no container image and cannot be restored: {NO_IMAGE}");
            self.driver.note(|record| record.warnings.push(told));
        }
        let (digest, base) = (packed.index.digest.clone(), packed.lineage.base.clone());
        let noted = |record: &mut Record| {
            record.digest = Some(digest);
            record.base = base;
        };
        self.driver.note(noted);
        let conclusion = conclude(&packed, &self.order.naming);
        let tag = match &self.order.naming {
            Naming::Signed(_, tag) | Naming::Unsigned(tag) => Some(tag),
            Naming::ByClient(tag) => stops.then_some(tag),
        };
        let (signed, ()) = tokio::join!(self.sign(store, &packed), self.will_tag(tag, &conclusion));
        signed?;
        if stops {
            self.stands_still().await?;
        }
        self.driver.commit(COMMITTED)?;
        // A source that is to be stopped must not come back between the tag and its end.
        if let Some(guardian) = self.guardian.as_mut().filter(|_| stops) {
            guardian.extend(STOP_LIMIT).await?;
        }
        if let Some(tag) = tag {
            self.driver.step("tag");
            store.tag(&packed.index, tag).await?;
            if stops {
                is_named(store, &packed.index.digest, tag).await?;
            }
        }
        self.stored(conclusion).await?;
        Ok(packed)
    }

    /// Signs it, where that is the agent's.
    async fn sign(&self, store: &Store, packed: &Packed) -> Result<(), CheckpointError> {
        if let Naming::Signed(key, _) = &self.order.naming {
            self.driver.step("sign");
            sign(store, &packed.index, &key.key).await?;
            if self.order.after == After::Stop {
                // A registry may have said so only, and nobody would restore it.
                let keys = [key.key.public().clone()];
                verify_signature(store, &packed.index.digest, &keys).await?;
            }
        }
        Ok(())
    }

    /// Writes down that it is about to have a tag: an agent that comes after us looks for it, since we may
    /// die before we hear that it is there.
    async fn will_tag(&self, tag: Option<&Tag>, conclusion: &Conclusion) {
        if tag.is_none() {
            return;
        }
        let (plain_http, stops) = (self.order.plain_http, self.order.after == After::Stop);
        let tagging = Tagging { plain_http, stops, conclusion: conclusion.clone() };
        if let Err(error) = self.driver.update(|record| record.tagging = Some(tagging)).await {
            tracing::error!(error = %chain(&error), "failed to keep an operation");
        }
    }

    /// Writes down that the checkpoint is stored: it is, whoever dies now.
    async fn stored(&self, conclusion: Conclusion) -> Result<(), OperationsError> {
        if self.order.after == After::Stop {
            // Nobody ends a source whose checkpoint the next agent would not know of.
            return self.driver.update(|record| record.stored = Some(conclusion)).await;
        }
        let kept = self.driver.update(|record| record.conclusion = Some(conclusion));
        if let Err(error) = kept.await {
            tracing::error!(error = %chain(&error), "failed to keep an operation");
        }
        Ok(())
    }

    /// Packs, as an increment where there is a base. One that nobody asked for and that is gone by now
    /// is no reason to have no checkpoint.
    async fn pack(&mut self, request: PackRequest, store: &Store) -> Result<Packed, PackError> {
        let progress = &self.driver.progress;
        let Some(Opened { base, is_wanted }) = self.base.take() else {
            return pack(request, store, progress).await;
        };
        let increment = PackRequest { base: Some(base), ..request.clone() };
        match pack(increment, store, progress).await {
            Err(error @ PackError::Base(_)) if !is_wanted => {
                let reason = chain(&error).to_string();
                tracing::warn!(reason, "everything is stored, since the last checkpoint is lost");
                pack(request, store, progress).await
            }
            done => done,
        }
    }
}

/// Makes sure that a tag leads to the checkpoint, before its source is ended: a registry may have said so
/// only.
async fn is_named(store: &Store, digest: &Digest, tag: &Tag) -> Result<(), CheckpointError> {
    let found = store.resolve_tag(tag).await.map_err(CheckpointError::Unnamed)?.descriptor.digest;
    if found == *digest { Ok(()) } else { Err(CheckpointError::Misnamed(tag.clone(), found)) }
}
