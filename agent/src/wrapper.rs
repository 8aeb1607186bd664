//! `kybernate-runc`: an OCI runtime that is runc or crun, but for the containers that shall go on
//! where a checkpoint was taken.
//!
//! containerd starts it in place of runc (`options.BinaryName` of a runtime class). Of runc's command
//! line it looks at four commands and leaves the rest to the real runtime, which it becomes:
//!
//! - `create` of a pod's container whose pod says `restore.kybernate.io/CONTAINER: REFERENCE@DIGEST`
//!   becomes `restore`, with a dump that the node's agent has staged and judged: runc's, since only that
//!   restores;
//! - `start` of such a container does nothing: it runs;
//! - `kill` and `delete` first end what a killed restore has left.
//!
//! It pulls nothing, and reads nothing of an artifact.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use fs_err as fs;
use kybernate_spec::chain;

mod bundle;
mod call;
mod claim;
mod mark;
mod oom;
mod run;
mod settings;

use self::bundle::{Bundle, OnFailure, Wish};
use self::call::{Call, Create};
#[cfg(test)]
pub(crate) use self::claim::CLAIM_LIMIT;
use self::claim::{Answer, ClaimError, Dump, Subject, claim, settle};
use self::mark::{Mark, State};
use self::run::RunError;
use self::settings::Settings;
use crate::restore::noted::{self, AFRESH, Note};
use crate::{connections, criu_config};

/// Why a container was not created.
#[derive(Debug, thiserror::Error)]
enum WrapperError {
    #[error("failed to read the settings")]
    Settings(#[source] io::Error),
    #[error("failed to find the real runtime")]
    Runtime(#[source] io::Error),
    #[error("failed to become {0}")]
    Become(String, #[source] io::Error),
    #[error("{0}")]
    Wish(String),
    #[error("failed to restore from {reference}")]
    Claim {
        reference: String,
        #[source]
        source: ClaimError,
    },
    #[error("failed to restore from {reference}")]
    Run {
        reference: String,
        #[source]
        source: RunError,
    },
    #[error("failed to restore from {reference}: {why}")]
    Cancelled { reference: String, why: String },
    #[error("failed to prepare the restore")]
    Prepare(#[source] io::Error),
    #[error(
        "{error}; what it was given for that may still be there, so it does not start afresh (where that \
         does not change with the next try, delete the pod)"
    )]
    Left {
        error: String,
        #[source]
        why: Option<ClaimError>,
    },
    #[error("failed to end what an earlier restore has left")]
    Clean(#[source] io::Error),
    #[error("failed to note that the container begins")]
    Begin(#[source] io::Error),
}

impl WrapperError {
    /// Whether a fresh start is no way around it, whatever the pod says of failures: nobody has vouched
    /// for what it would start from, or the agent says so.
    fn forbids_fresh(&self) -> bool {
        match self {
            Self::Claim { source: ClaimError::Refused { rule, .. }, .. } => {
                rule == "signature" || rule == "integrity"
            }
            Self::Claim { source: ClaimError::Final(_), .. } => true,
            _ => false,
        }
    }
}

/// Does what runc's command line says. Returns only when something failed or nothing is left to do.
pub fn run(words: &[OsString]) -> ExitCode {
    let call = Call::parse(words);
    let opened = Wrapper::open(call.as_ref());
    match opened.and_then(|wrapper| wrapper.run(words, call.as_ref())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tell(call.as_ref(), &format!("kybernate-runc: {}", chain(&error)));
            ExitCode::FAILURE
        }
    }
}

/// How a restore went.
enum Outcome {
    Restored,
    /// It is to be started as any other container.
    Fresh,
    Failed(WrapperError),
}

struct Wrapper {
    settings: Settings,
    runtime: PathBuf,
}

impl Wrapper {
    /// Reads the settings. A mistake in them lets nothing new begin, but what runs can be looked at
    /// and ended all the same.
    fn open(call: Option<&Call<'_>>) -> Result<Self, WrapperError> {
        let creates = call.is_some_and(|call| call.command == "create");
        let settings = match Settings::read() {
            Err(error) if creates => return Err(WrapperError::Settings(error)),
            read => read.unwrap_or_default(),
        };
        let runtime = settings.runtime().map_err(WrapperError::Runtime)?;
        Ok(Self { settings, runtime })
    }

    fn run(&self, words: &[OsString], call: Option<&Call<'_>>) -> Result<(), WrapperError> {
        let command = call.and_then(|call| call.command.to_str());
        match (call, command) {
            (Some(call), Some("create")) => match call.create() {
                Some(create) => self.create(words, call, &create),
                None => self.pass(words),
            },
            (Some(call), Some("start")) => {
                if self.started(call)? {
                    return Ok(());
                }
                self.pass(words)
            }
            (Some(call), Some(command @ ("kill" | "delete"))) => {
                self.end_interrupted(call, command)?;
                self.pass(words)
            }
            _ => self.pass(words),
        }
    }

    /// Becomes the real runtime, by the name that it has: some of what it says begins with that.
    fn pass(&self, words: &[OsString]) -> Result<(), WrapperError> {
        let mut command = Command::new(&self.runtime);
        if let Some(name) = self.runtime.file_name() {
            command.arg0(name);
        }
        let error = command.args(words).exec();
        Err(WrapperError::Become(self.runtime.display().to_string(), error))
    }

    fn create(
        &self,
        words: &[OsString],
        call: &Call<'_>,
        create: &Create,
    ) -> Result<(), WrapperError> {
        // What is wrong with a bundle is the runtime's to say.
        let Ok(mut bundle) = Bundle::read(&create.bundle) else { return self.pass(words) };
        let Some(wish) = bundle.wish().map_err(WrapperError::Wish)? else {
            self.begins_with_all(call, &bundle)?;
            self.give_options(call, create, &mut bundle);
            return self.pass(words);
        };
        let error = match self.restore(call, create, &mut bundle, &wish)? {
            Outcome::Restored => return Ok(()),
            Outcome::Fresh => {
                self.give_options(call, create, &mut bundle);
                return self.pass(words);
            }
            Outcome::Failed(error) => error,
        };
        if wish.on_failure == OnFailure::Cold && !error.forbids_fresh() {
            if self.was_given(call, create, &bundle) {
                return Err(left(&error, None));
            }
            tell(Some(call), &format!("kybernate-runc: started afresh: {}", chain(&error)));
            self.will_begin_afresh(call, create, &bundle)?;
            self.give_options(call, create, &mut bundle);
            return self.pass(words);
        }
        Err(error)
    }

    /// Gives a pod's container a file with CRIU's options, so that each checkpoint of it can have
    /// options of its own. A container without one runs as well.
    fn give_options(&self, call: &Call<'_>, create: &Create, bundle: &mut Bundle) {
        let file = self.options(call, &create.id);
        // One that was to be restored has one already, which may be gone.
        if !bundle.is_container() || bundle.has_criu_config_but(&file) {
            return;
        }
        let given = criu_config::write_created(&file)
            .and_then(|()| bundle.set_criu_config(&file.display().to_string()));
        if let Err(error) = given {
            let text = "no checkpoint of it can close its connections";
            tell(Some(call), &format!("kybernate-runc: {text}: {error}"));
        }
    }

    /// Returns where a container's file with CRIU's options is.
    fn options(&self, call: &Call<'_>, id: &str) -> PathBuf {
        criu_config::given(&self.settings.volumes, call.namespace(), id)
    }

    /// Restores a container. An error is none that a fresh start would get around.
    fn restore(
        &self,
        call: &Call<'_>,
        create: &Create,
        bundle: &mut Bundle,
        wish: &Wish,
    ) -> Result<Outcome, WrapperError> {
        let mark = Mark::of(&self.settings, call, &create.id);
        let cgroup = bundle.cgroup();
        if call.root.join(&create.id).exists() && self.is_restored(call, &create.id) {
            // The runtime says that it exists.
            return Ok(Outcome::Fresh);
        }
        self.end(call, &create.id, &mark)?;
        let subject = Subject { namespace: call.namespace(), container: &create.id };
        let reference = wish.reference.clone();
        let dump = match claim(&self.settings, subject, &reference, bundle) {
            Ok(Answer::Restore(dump)) => dump,
            Ok(Answer::Fresh(why)) => {
                tell(Some(call), &format!("kybernate-runc: started afresh: {why}"));
                return Ok(Outcome::Fresh);
            }
            Err(source) => {
                let is_late = matches!(source, ClaimError::Late(_));
                let error = WrapperError::Claim { reference, source };
                if is_late {
                    // It takes away again what it has put into the pod by now, if it had begun.
                    match settle(&self.settings, subject, &chain(&error).to_string()) {
                        Ok(_) | Err(ClaimError::Failed(_)) => {}
                        Err(why) => return Err(left(&error, Some(why))),
                    }
                }
                return Ok(Outcome::Failed(error));
            }
        };
        let network = bundle.network();
        let begun = State::begun(cgroup.clone(), network);
        match self.run_restore((call, create), (bundle, &reference), (&dump, &mark, &begun)) {
            Ok(()) => {
                if let Err(error) = adjust(cgroup.as_deref(), create, bundle) {
                    let text = "the kernel may end its processes sooner or later than a new Pod's";
                    tell(Some(call), &format!("kybernate-runc: {text}: {error}"));
                }
                if let Err(error) = hand_over(cgroup.as_deref()) {
                    let text = "its TCP connections are still held";
                    tell(Some(call), &format!("kybernate-runc: {text}: {error}"));
                }
                // The agent finds out by what we have noted, when it is asked again.
                if let Err(error) = settle(&self.settings, subject, "") {
                    tell(Some(call), &format!("kybernate-runc: {}", chain(&error)));
                }
                Ok(Outcome::Restored)
            }
            Err(error) => {
                let ended = self.end(call, &create.id, &mark);
                // Also where something of it is left, which the agent's end of it does not touch.
                let settled = settle(&self.settings, subject, &chain(&error).to_string());
                ended?;
                let error = match settled.map_err(|why| left(&error, Some(why)))? {
                    Some(why) => WrapperError::Cancelled { reference, why },
                    None => error,
                };
                Ok(Outcome::Failed(error))
            }
        }
    }

    /// Has the runtime restore, and notes that it did.
    fn run_restore(
        &self,
        (call, create): (&Call<'_>, &Create),
        (bundle, reference): (&mut Bundle, &str),
        (dump, mark, begun): (&Dump, &Mark, &State),
    ) -> Result<(), WrapperError> {
        mark.write(begun).map_err(WrapperError::Prepare)?;
        bundle.set_criu_config(&dump.criu_config).map_err(WrapperError::Prepare)?;
        let permit = |mode| bundle.permit_root(mode).map_err(WrapperError::Prepare);
        let had = dump.root_mode.map(permit).transpose()?;
        let restored = run::restore(&self.runtime, call, create, dump);
        let reference = || reference.to_owned();
        let restored =
            restored.map_err(|source| WrapperError::Run { reference: reference(), source });
        let noted = restored.and_then(|()| {
            let note = dump.note();
            let unstarted = Some(note.clone());
            let begun = State { network: None, ..begun.clone() };
            let restored = State { restored: true, unstarted, ..begun };
            mark.write(&restored).map_err(WrapperError::Prepare)?;
            note.write().map_err(WrapperError::Prepare)
        });
        if noted.is_err() {
            // It was not, whatever was written by then.
            dump.note().remove().map_err(WrapperError::Prepare)?;
            // What starts afresh is the image's.
            had.map(permit).transpose()?;
        }
        noted
    }

    /// Whether a container runs already, since it was restored.
    fn is_restored(&self, call: &Call<'_>, id: &str) -> bool {
        let state = Mark::of(&self.settings, call, id).read().ok().flatten();
        state.is_some_and(|state| state.restored)
    }

    /// Has a container that could not be restored noted as begun when it is started: what it does from
    /// then on is not to be undone by a restore when it is created again.
    fn will_begin_afresh(
        &self,
        call: &Call<'_>,
        create: &Create,
        bundle: &Bundle,
    ) -> Result<(), WrapperError> {
        let Some(name) = bundle.note() else { return Ok(()) };
        let file = self.noted(call, &name);
        let afresh = Some(Note { file, operation: AFRESH.to_owned() });
        let state = State { afresh, ..State::begun(None, None) };
        Mark::of(&self.settings, call, &create.id).write(&state).map_err(WrapperError::Begin)
    }

    /// Returns where something is noted about a container, by its pod's name for it or its id.
    fn noted(&self, call: &Call<'_>, name: &str) -> PathBuf {
        self.settings.restored.join(call.namespace()).join(name)
    }

    /// Whether something of a restore may be in the directories of its pod: the agent has noted that before
    /// it put it there, and may have ended.
    fn was_given(&self, call: &Call<'_>, create: &Create, bundle: &Bundle) -> bool {
        let names = bundle.note().into_iter().chain([create.id.clone()]);
        let mut given = names.map(|name| noted::given(&self.noted(call, &name)));
        given.any(|file| file.try_exists().unwrap_or(true))
    }

    /// Notes that a container that nobody wants to be restored has what lies in its pod's directories.
    fn begins_with_all(&self, call: &Call<'_>, bundle: &Bundle) -> Result<(), WrapperError> {
        let Some(name) = bundle.note() else { return Ok(()) };
        noted::is_owned(&self.noted(call, &name)).map_err(WrapperError::Begin)
    }

    /// Notes that somebody has a container from now on. Where that fails it is not started: `delete` of a
    /// restored one would take back what says that it was restored, and one that begins afresh would be
    /// restored when it is created again. Returns whether it runs already.
    fn started(&self, call: &Call<'_>) -> Result<bool, WrapperError> {
        let Some(id) = call.id() else { return Ok(false) };
        let mark = Mark::of(&self.settings, call, id);
        // One that cannot be read is no restored one's, as far as anybody knows.
        let Some(state) = mark.read().ok().flatten() else { return Ok(false) };
        if let Some(note) = &state.afresh {
            note.write().and_then(|()| mark.remove()).map_err(WrapperError::Begin)?;
        }
        let runs = state.restored;
        if let Some(note) = &state.unstarted {
            let started = State { unstarted: None, ..state.clone() };
            mark.write(&started).map_err(WrapperError::Clean)?;
            // Until then nobody has begun with what it was given, whatever becomes of it.
            noted::is_owned(&note.file).map_err(WrapperError::Begin)?;
        }
        Ok(runs)
    }

    /// Before `kill` and `delete`: ends what a restore has left whose wrapper was killed.
    fn end_interrupted(&self, call: &Call<'_>, command: &str) -> Result<(), WrapperError> {
        let Some(id) = call.id() else { return Ok(()) };
        let mark = Mark::of(&self.settings, call, id);
        match mark.read() {
            Ok(None) => Ok(()),
            Ok(Some(State { restored: true, .. } | State { afresh: Some(_), .. }))
                if command == "kill" =>
            {
                Ok(())
            }
            Ok(Some(State { afresh: Some(_), .. })) => mark.remove().map_err(WrapperError::Clean),
            Ok(Some(State { restored: true, unstarted, cgroup, .. })) => {
                // Nobody has had it. Whoever deletes it by force ends it next.
                let ends = call.is_forced() || run::is_empty(cgroup.as_deref());
                let taken_back = unstarted.filter(|_| ends).map_or(Ok(()), |note| note.remove());
                taken_back.and_then(|()| mark.remove()).map_err(WrapperError::Clean)
            }
            Ok(Some(_)) | Err(_) => self.end(call, id, &mark),
        }?;
        if command == "delete" {
            // The agent removes what is left, and what it has put there itself. Not before: a CRIU that
            // does not find its file goes on without it, by what the images say.
            let file = self.options(call, id);
            fs::remove_file(&file).unwrap_or_default();
            file.parent().map_or(Ok(()), fs::remove_dir).unwrap_or_default();
        }
        Ok(())
    }

    /// Ends what a restore has left that did not come to its end, if there is a mark of one.
    fn end(&self, call: &Call<'_>, id: &str, mark: &Mark) -> Result<(), WrapperError> {
        let Some(state) = mark.read().map_err(WrapperError::Clean)? else { return Ok(()) };
        if state.afresh.is_some() {
            return mark.remove().map_err(WrapperError::Clean);
        }
        run::clean(&self.runtime, call, id, &state).map_err(WrapperError::Clean)?;
        mark.remove().map_err(WrapperError::Clean)
    }
}

/// What the agent has put into a pod's directories is not known to be gone: nothing is to start in its place.
fn left(error: &WrapperError, why: Option<ClaimError>) -> WrapperError {
    WrapperError::Left { error: chain(error).to_string(), why }
}

/// Lets the connections go on that were held for a container.
fn hand_over(cgroup: Option<&str>) -> io::Result<()> {
    let Some(cgroup) = cgroup else { return Ok(()) };
    wait_for(connections::hand_over(cgroup))
}

/// Gives the restored processes what those of the new container have.
fn adjust(cgroup: Option<&str>, create: &Create, bundle: &Bundle) -> io::Result<()> {
    let (Some(cgroup), Some(adjustment)) = (cgroup, bundle.oom()) else { return Ok(()) };
    let first = create.pid_file.as_ref().and_then(|file| fs::read_to_string(file).ok());
    oom::adjust(cgroup, first.and_then(|pid| pid.trim().parse().ok()), adjustment)
}

/// Does what waits, on this thread.
fn wait_for(work: impl Future<Output = io::Result<()>>) -> io::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

/// Says what is wrong where containerd looks for it: the last error of the log becomes the message of
/// the failed container. Also on standard error.
fn tell(call: Option<&Call<'_>>, text: &str) {
    // Nobody is left to tell when this fails.
    let _ignored = writeln!(io::stderr(), "{text}");
    let Some((log, is_json)) = call.and_then(|call| call.log.as_ref()) else { return };
    let line = if *is_json {
        let time = jiff::Timestamp::now().to_string();
        serde_json::json!({ "level": "error", "msg": text, "time": time }).to_string()
    } else {
        format!("level=error msg={text:?}")
    };
    let _ignored = append(log, &line);
}

fn append(log: &Path, line: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().create(true).append(true).open(log)?;
    writeln!(file, "{line}")
}
