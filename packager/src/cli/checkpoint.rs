//! `kyb checkpoint`

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use kybernate_packager::agent_api::{
    AfterCheckpoint, CheckpointRequest, GetNodeRequest, Operation, ReportTaggedRequest, Runnable,
};
use kybernate_packager::key::SigningKey;
use kybernate_packager::sign::sign;
use kybernate_spec::{Digest, Location, Reference, Tag};
use serde_json::json;

use super::agent::{AgentSocket, refused, time_out, times};
use super::identifier::identifier;
use super::pack::When;
use super::preflight::Policy;
use super::{Connection, Failure, keys, tag_for};
use crate::terminal::{Terminal, bytes};

/// Take a checkpoint of a running container.
///
/// This node's agent dumps the container, packs it, pushes it and signs it; the tag comes last. The
/// container is paused only while it is dumped. The operation is the agent's: Ctrl-C cancels it, a
/// second Ctrl-C leaves it to the agent, and it goes on when this command is killed.
#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "each is a switch of its own")]
#[command(after_help = "Example:\n  \
    kyb checkpoint job registry.example.com/team/job:v1 --sign-key team.key")]
pub(super) struct Checkpoint {
    /// containerd's id of the container.
    #[arg(value_parser = identifier)]
    container: String,
    /// Where the checkpoint goes.
    #[arg(value_name = "REF")]
    reference: Location,
    /// Let the container run on (the default).
    #[arg(long, conflicts_with = "stop")]
    leave_running: bool,
    /// Stop the container once the checkpoint is stored.
    #[arg(long)]
    stop: bool,
    /// The agent's key of this name, or a private key FILE that this command signs with. Without
    /// it, the agent's only key.
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "unsigned",
        value_parser = clap::builder::NonEmptyStringValueParser::new())]
    sign_key: Option<String>,
    /// Do not sign.
    #[arg(long)]
    unsigned: bool,
    /// containerd's namespace.
    #[arg(long, default_value = "default", value_parser = identifier)]
    namespace: String,
    /// Whether the runnable image is part of it.
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    runnable: When,
    /// Do not let it hang under its source image.
    #[arg(long)]
    no_subject: bool,
    /// An earlier checkpoint of the same container, in a registry: what has not changed is not
    /// stored again. Without it, the last one in this repository that the agent took of the
    /// container, or restored it from.
    ///
    /// It must carry page hashes, and be signed by a key of this node's agent or by one that its
    /// trust policy accepts.
    #[arg(long, value_name = "REF")]
    base: Option<Location>,
    /// Store everything, whatever earlier checkpoints there are, and send it also where the registry
    /// says that it has it: it may have rotted there unnoticed.
    #[arg(long, conflicts_with = "base")]
    full: bool,
    /// Store a hash of each page too (0.4 %), so that a later checkpoint can take this one for its
    /// base. Agents do so by themselves, unless their configuration says otherwise.
    #[arg(long)]
    page_hashes: bool,
    /// Longest pause, from 1s to 1h: after that the container runs on, whatever has happened. By default
    /// what the agent's configuration says (`pause_deadline`), 60s where it says nothing.
    #[arg(long, value_name = "TIME", value_parser = pause)]
    pause_deadline: Option<Duration>,
    /// Cancel the checkpoint when it takes longer than this.
    #[arg(long, value_name = "TIME", value_parser = time_out)]
    timeout: Option<u32>,
    /// Refuse every restore of it later than this after the dump (`notAfter`), as for what must not
    /// come back with credentials that are old by then.
    #[arg(long, value_name = "TIME", value_parser = time_out)]
    valid_for: Option<u32>,
    #[command(flatten)]
    policy: Policy,
    #[command(flatten)]
    connection: Connection,
    /// Run a hook that the agent's configuration offers (`on_request`).
    #[arg(long = "hook", value_name = "NAME")]
    hooks: Vec<String>,
    #[command(flatten)]
    agent: AgentSocket,
}

/// Reads how long the pause may last. The agent counts whole seconds.
fn pause(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(time) if (Duration::from_secs(1)..=Duration::from_hours(1)).contains(&time) => {
            Ok(Duration::from_secs(time.as_secs() + u64::from(time.subsec_nanos() > 0)))
        }
        Ok(_) => Err("it must be from 1s to 1h".to_owned()),
        Err(error) => Err(format!("it must be a time like \"60s\": {error}")),
    }
}

/// Who signs.
enum Signer {
    Agent(String),
    Us(Box<SigningKey>),
    Nobody,
}

impl Checkpoint {
    pub(super) async fn run(self, terminal: &Terminal) -> Result<(), Failure> {
        let tag = tag_for(&self.reference)?;
        let Location::Registry(reference) = &self.reference else {
            return Err(Failure::usage("the agent pushes to registries, not to layouts"));
        };
        let plain_http = self.connection.is_plain(reference);
        match &self.base {
            Some(Location::Layout(_)) => {
                let text = "the agent takes a base from registries, not from layouts";
                return Err(Failure::usage(text));
            }
            Some(Location::Registry(base)) if self.connection.is_plain(base) != plain_http => {
                let text = "the agent speaks to the registries of REF and --base in one way: both \
                            over TLS, or both with --plain-http";
                return Err(Failure::usage(text));
            }
            Some(Location::Registry(_)) | None => {}
        }
        let mut client = self.agent.connect().await?;
        let signer = match (&self.sign_key, self.unsigned) {
            (_, true) => Signer::Nobody,
            (Some(key), _) if is_file(key) => {
                Signer::Us(Box::new(keys::open(Path::new(key)).await?))
            }
            (Some(name), _) => Signer::Agent(name.clone()),
            (None, _) => {
                let node = client.get_node(GetNodeRequest {}).await.map_err(refused)?.into_inner();
                Signer::Agent(only_key(node.sign_keys)?)
            }
        };
        let tagged = Reference { tag: Some(tag.clone()), ..reference.clone() };
        let request = self.request(&tagged, &signer)?;
        let begun = client.checkpoint(request).await.map_err(refused)?.into_inner();
        let done = self.agent.follow(terminal, begun).await?;
        if let Signer::Us(key) = &signer {
            // Whatever ends us from here on, people must know what there is.
            let untagged = Reference { tag: None, ..reference.clone() };
            let digest = &done.digest;
            let tags = if self.stop { "it has its tag" } else { "the tag is not written" };
            terminal.note(format!(
                "{digest} is pushed, but not signed, and {tags} ({tag}): {untagged}@{digest} is its \
                 name for kyb sign and kyb copy"
            ));
            self.sign(&done, key, &tag).await?;
            terminal.note(String::new());
            let request = ReportTaggedRequest { operation_id: done.id.clone() };
            if let Err(status) = client.report_tagged(request).await {
                let text = status.message();
                tracing::warn!(text, "the agent does not know that the checkpoint has its tag");
            }
        }
        tell(terminal, &done, &signer)
    }

    /// Signs what the agent has pushed, and tags it.
    async fn sign(&self, done: &Operation, key: &SigningKey, tag: &Tag) -> Result<(), Failure> {
        let digest: Digest = done.digest.parse().map_err(Failure::failed)?;
        let store = self.connection.open(&self.reference).await?;
        let index = store.manifest(&digest).await?.descriptor;
        sign(&store, &index, key).await?;
        Ok(store.tag(&index, tag).await?)
    }

    fn request(
        &self,
        reference: &Reference,
        signer: &Signer,
    ) -> Result<CheckpointRequest, Failure> {
        let after = if self.stop { AfterCheckpoint::Stop } else { AfterCheckpoint::LeaveRunning };
        let runnable = match self.runnable {
            When::Auto => Runnable::Auto,
            When::Always => Runnable::Always,
            When::Never => Runnable::Never,
        };
        Ok(CheckpointRequest {
            container: self.container.clone(),
            containerd_namespace: self.namespace.clone(),
            reference: reference.to_string(),
            after: after.into(),
            sign_key: match signer {
                Signer::Agent(name) => name.clone(),
                Signer::Us(_) | Signer::Nobody => String::new(),
            },
            runnable: runnable.into(),
            no_subject: self.no_subject,
            plain_http: self.connection.is_plain(reference),
            pause_deadline_seconds: u32::try_from(
                self.pause_deadline.unwrap_or_default().as_secs(),
            )
            .map_err(Failure::usage)?,
            unsigned: matches!(signer, Signer::Nobody),
            base: self.base.as_ref().map(ToString::to_string).unwrap_or_default(),
            page_hashes: self.page_hashes,
            timeout_seconds: self.timeout.unwrap_or_default(),
            tcp: self.policy.tcp().into(),
            file_locks: self.policy.file_locks().into(),
            hooks: self.hooks.clone(),
            pre_copy: self.policy.pre_copy,
            full: self.full,
            capture_mounts: self.policy.capture_mounts.clone(),
            valid_seconds: self.valid_for.unwrap_or_default(),
        })
    }
}

/// Whether a key is a file: its name has a slash, or there is such a file.
fn is_file(key: &str) -> bool {
    key.contains('/') || PathBuf::from(key).is_file()
}

fn only_key(mut names: Vec<String>) -> Result<String, Failure> {
    match (names.pop(), names.is_empty()) {
        (Some(name), true) => Ok(name),
        (None, _) => Err(Failure::usage(
            "the agent has no key: give a key FILE with --sign-key, or say --unsigned",
        )),
        (Some(_), false) => {
            Err(Failure::usage("the agent has more than one key: choose one with --sign-key"))
        }
    }
}

fn tell(terminal: &Terminal, done: &Operation, signer: &Signer) -> Result<(), Failure> {
    let sizes = done.sizes.unwrap_or_default();
    let made_by = match signer {
        Signer::Agent(name) => format!("signed with the agent's key {name}"),
        Signer::Us(key) => format!("signed by {}", key.public().hint()),
        Signer::Nobody => "not signed".to_owned(),
    };
    let facts = json!({
        "operation": done.id,
        "container": done.container,
        "reference": done.reference,
        "digest": done.digest,
        "base": (!done.base.is_empty()).then_some(&done.base),
        "signed": !matches!(signer, Signer::Nobody),
        "pausedMicroseconds": done.paused_microseconds,
        "timesMicroseconds": times(done),
        "warnings": done.warnings,
        "sizes": {
            "dumpBytes": sizes.dump_bytes,
            "pageBytes": sizes.page_bytes,
            "transferredBytes": sizes.transferred_bytes,
        },
    });
    let base = match &*done.base {
        "" => String::new(),
        base => format!("\n           an increment of {base}"),
    };
    let paused = match Duration::from_micros(done.paused_microseconds) {
        Duration::ZERO => String::new(),
        time => format!("\n           paused for {:.2} s", time.as_secs_f64()),
    };
    let text = format!(
        "checkpoint {}\n           {} of dump, {} of pages stored, {} sent; {made_by}{base}{paused}",
        done.digest,
        bytes(sizes.dump_bytes),
        bytes(sizes.page_bytes),
        bytes(sizes.transferred_bytes),
    );
    terminal.print(&facts, &text).map_err(Failure::failed)
}
