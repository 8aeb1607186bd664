//! The commands `gc`, `scrub` and `reindex`: what they ask for and what they print.

use std::io::{self, IsTerminal as _, Write};

use crate::admin::{self, AdminError, Reply, Request};
use crate::config::Config;
use crate::{gc, scrub};

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Done, and all is well.
    Good,
    /// Done, and content was found that is corrupt, missing or not to be read.
    Found,
    /// It was stopped before its end.
    Stopped,
}

/// Runs a command and prints what it does on `out`: lines of JSON or of text.
pub async fn maintain(
    config: &Config,
    request: &Request,
    json: bool,
    out: &mut impl Write,
) -> Result<Outcome, AdminError> {
    let progress = io::stderr().is_terminal() && !json;
    let mut told = |reply: &Reply| -> io::Result<()> {
        if json {
            serde_json::to_writer(&mut *out, reply)?;
            return writeln!(out);
        }
        match reply {
            Reply::Gc(event) => tell_gc(event, request, progress, out),
            Reply::Scrub(event) => tell_scrub(event, progress, out),
            Reply::Reindex(made) => writeln!(
                out,
                "{} repositories with {} tags, {} referrers, {} blobs and manifests",
                made.repositories, made.tags, made.referrers, made.links,
            ),
            Reply::Failed { .. } => Ok(()),
        }
    };
    let last = admin::run(config, request, &mut told).await?;
    out.flush()?;
    Ok(match last {
        Reply::Gc(gc::Event::Done(summary)) if !summary.stopped => Outcome::Good,
        Reply::Scrub(scrub::Event::Done(pass)) if pass.done && pass.has_found() => Outcome::Found,
        Reply::Scrub(scrub::Event::Done(pass)) if pass.done => Outcome::Good,
        Reply::Reindex(_) => Outcome::Good,
        _ => Outcome::Stopped,
    })
}

fn tell_gc(
    event: &gc::Event,
    request: &Request,
    progress: bool,
    out: &mut impl Write,
) -> io::Result<()> {
    let dry_run = matches!(request, Request::Gc { dry_run: true, .. });
    let would = if dry_run { "would be " } else { "" };
    match event {
        gc::Event::Condemned { repository, kind, digest } => {
            writeln!(out, "{would}condemned {} {repository}@{digest}", kind.name())
        }
        gc::Event::Revived { repository, kind, digest } => {
            writeln!(out, "{would}revived {} {repository}@{digest}", kind.name())
        }
        gc::Event::Purged { repository, kind, digest } => {
            writeln!(out, "{would}purged {} {repository}@{digest}", kind.name())
        }
        gc::Event::Removed { digest, bytes } => {
            writeln!(out, "{would}removed {digest}, {bytes} bytes")
        }
        gc::Event::Skipped { repository, reason } => {
            writeln!(out, "left alone {repository}: {reason}")
        }
        gc::Event::Progress { done, of } => {
            if progress {
                write!(io::stderr(), "\r{done} of {of} repositories")?;
            }
            Ok(())
        }
        gc::Event::Done(summary) => writeln!(
            out,
            "{} repositories in {} ms: {would}{} condemned, {} revived, {} purged; {} contents of \
             {} bytes {would}removed; {} repositories left alone",
            summary.repositories,
            summary.duration_ms,
            summary.condemned,
            summary.revived,
            summary.purged,
            summary.removed,
            summary.removed_bytes,
            summary.skipped,
        ),
    }
}

fn tell_scrub(event: &scrub::Event, progress: bool, out: &mut impl Write) -> io::Result<()> {
    match event {
        scrub::Event::Corrupt { digest } => writeln!(out, "corrupt {digest}, moved away"),
        scrub::Event::Repaired { digest } => {
            writeln!(out, "checksums of {digest} were wrong and are made anew")
        }
        scrub::Event::Unreadable { digest, reason } => writeln!(out, "{digest}: {reason}"),
        scrub::Event::Missing { digest, repository, manifest } if digest == manifest => {
            writeln!(out, "missing {repository}@{manifest}, a manifest")
        }
        scrub::Event::Missing { digest, repository, manifest } => {
            writeln!(out, "missing {digest}, which {repository}@{manifest} names")
        }
        scrub::Event::Progress(pass) => {
            if progress {
                write!(io::stderr(), "\r{} contents, {} bytes", pass.contents, pass.bytes)?;
            }
            Ok(())
        }
        scrub::Event::Done(pass) => writeln!(
            out,
            "{} contents of {} bytes read: {} corrupt, {} with wrong checksums; {} manifests: {} \
             that lack something; {} not to be read{}",
            pass.contents,
            pass.bytes,
            pass.corrupt,
            pass.repaired,
            pass.manifests,
            pass.incomplete,
            pass.unreadable,
            if pass.done { "" } else { "; stopped, the next run goes on from here" },
        ),
    }
}
