//! What people and scripts see: results on stdout, progress and complaints on stderr.

use std::io::{IsTerminal as _, StdoutLock, Write as _};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};
use kybernate_packager::progress::{Progress, Snapshot};
use serde::Serialize;

use crate::cli::{Failure, Page, Sheet};
use crate::interrupt::Interrupts;

/// How often a bar is drawn.
const TICK: Duration = Duration::from_millis(100);

/// Where output goes.
#[derive(Debug)]
pub(crate) struct Terminal {
    json: bool,
    bars: bool,
    /// What a failure from now on leaves behind. Held for an assignment only.
    note: Mutex<String>,
    /// Whether somebody has closed the other end of stdout.
    unread: AtomicBool,
    interrupts: Interrupts,
}

/// Shows one operation: a bar on a terminal, a line per finished step elsewhere.
#[derive(Debug)]
pub(crate) struct Display {
    bar: Option<ProgressBar>,
    told: usize,
    waits_for: String,
    warned: usize,
}

impl Terminal {
    /// Looks at what kind of place stderr is.
    pub(crate) fn new(json: bool) -> Self {
        let (bars, interrupts) = (std::io::stderr().is_terminal(), Interrupts::new());
        Self { json, bars, note: Mutex::default(), unread: AtomicBool::new(false), interrupts }
    }

    /// Whether a result could not be printed because nobody reads it any more, as after
    /// `kyb ps | head`. That is no failure to speak of.
    pub(crate) fn is_unread(&self) -> bool {
        self.unread.load(Ordering::Relaxed)
    }

    /// Whether results are printed as JSON.
    pub(crate) const fn is_json(&self) -> bool {
        self.json
    }

    /// Returns who is told when somebody presses Ctrl-C.
    pub(crate) const fn interrupts(&self) -> &Interrupts {
        &self.interrupts
    }

    /// Prints a result: `text` for people, or `value` as one JSON document.
    pub(crate) fn print(&self, value: &impl Serialize, text: &str) -> std::io::Result<()> {
        self.write(|out| {
            if self.json {
                serde_json::to_writer_pretty(&mut *out, value)?;
                return writeln!(out);
            }
            writeln!(out, "{}", plain(text.trim_end()))
        })
    }

    /// Prints one of many results: a line of `text` for people, or `value` as JSON in one line.
    pub(crate) fn print_line(&self, value: &impl Serialize, text: &str) -> std::io::Result<()> {
        self.write(|out| {
            if self.json {
                serde_json::to_writer(&mut *out, value)?;
                return writeln!(out);
            }
            writeln!(out, "{}", plain(text.trim_end()))
        })
    }

    /// Prints a script of our own making as it is, or `value` as one JSON document.
    pub(crate) fn print_script(&self, value: &impl Serialize, script: &str) -> std::io::Result<()> {
        if self.json {
            return self.print(value, "");
        }
        self.write(|out| out.write_all(script.as_bytes()))
    }

    /// Prints a result: `page` for people, or `value` as one JSON document.
    pub(crate) fn print_page(&self, value: &impl Serialize, page: &Page) -> std::io::Result<()> {
        if self.json {
            return self.print(value, "");
        }
        let text = page.render(sheet());
        self.write(|out| writeln!(out, "{}", text.trim_end()))
    }

    /// Writes to stdout, all of it, and remembers when nobody reads it.
    fn write(
        &self,
        write: impl FnOnce(&mut StdoutLock<'_>) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        let written = write(&mut out).and_then(|()| out.flush());
        let closed = |error: &std::io::Error| error.kind() == std::io::ErrorKind::BrokenPipe;
        if written.as_ref().is_err_and(closed) {
            self.unread.store(true, Ordering::Relaxed);
        }
        written.map_err(|error| {
            std::io::Error::new(error.kind(), format!("failed to write to stdout: {error}"))
        })
    }

    /// Says why it did not work: to people on stderr, to scripts as the only document on stdout.
    pub(crate) fn fail(&self, failure: &Failure) {
        if matches!(failure, Failure::Answered(..)) {
            return;
        }
        let note = self.note.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if !matches!(failure, Failure::Shown(_)) {
            say(&failure.to_string());
        }
        if !note.is_empty() {
            say(&note);
        }
        if self.json {
            // When that fails, the exit code is all there is left.
            let _written = self.print(&failure.told(&note), "");
        }
    }

    /// Says what will be there should the command fail or be interrupted from now on; nothing when
    /// empty.
    pub(crate) fn note(&self, text: String) {
        *self.note.lock().unwrap_or_else(PoisonError::into_inner) = text;
    }

    /// Begins to show an operation.
    pub(crate) fn display(&self) -> Display {
        let bar = self.bars.then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            bar.set_style(style("{spinner} {msg:12} {elapsed}"));
            bar
        });
        Display { bar, told: 0, waits_for: String::new(), warned: 0 }
    }

    /// Runs `work` and shows how far it is.
    pub(crate) async fn show<T>(&self, progress: &Progress, work: impl Future<Output = T>) -> T {
        let mut display = self.display();
        let mut work = pin!(work);
        let mut ticks = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                done = &mut work => {
                    progress.finish();
                    display.update(&progress.snapshot());
                    display.end();
                    return done;
                }
                _ = ticks.tick() => display.update(&progress.snapshot()),
            }
        }
    }
}

impl Display {
    /// Shows how things stand.
    pub(crate) fn update(&mut self, now: &Snapshot) {
        let Some(bar) = &self.bar else {
            for (step, time) in now.times.iter().skip(self.told) {
                say(&format!("{step}: {:.2} s", time.as_secs_f64()));
            }
            self.told = now.times.len().max(self.told);
            return;
        };
        bar.set_message(now.step);
        if now.total > 0 && bar.length().is_none() {
            bar.set_style(style(
                "{spinner} {msg:12} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {elapsed}",
            ));
        }
        if now.total > 0 {
            bar.set_length(now.total);
            bar.set_position(now.done);
        } else {
            bar.tick();
        }
    }

    /// Says what it waits for, once; nothing when empty.
    pub(crate) fn waits_for(&mut self, what: &str) {
        if self.waits_for == what {
            return;
        }
        what.clone_into(&mut self.waits_for);
        let text = match what {
            "" => "waits no longer".to_owned(),
            what => format!("waits for {what}"),
        };
        self.say(&text);
    }

    /// Says each warning, once.
    pub(crate) fn warnings(&mut self, all: &[String]) {
        for warning in all.iter().skip(self.warned) {
            self.say(&format!("warning: {warning}"));
        }
        self.warned = all.len().max(self.warned);
    }

    /// Says something beside the bar.
    pub(crate) fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| say(text)),
            None => say(text),
        }
    }

    /// Clears the bar.
    pub(crate) fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Writes bytes the way people read them.
pub(crate) fn bytes(bytes: u64) -> String {
    HumanBytes(bytes).to_string()
}

/// Takes the sting out of text that others wrote: a name must not move the cursor.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { '\u{fffd}' } else { c }).collect()
}

/// Looks at what kind of place stdout is: how wide, and whether it shows colours that nobody has
/// asked to leave out (no-color.org).
fn sheet() -> Sheet {
    if !std::io::stdout().is_terminal() {
        return Sheet::default();
    }
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    let (_rows, columns) = console::Term::stdout().size();
    Sheet { columns: Some(columns.into()), colours: !set("NO_COLOR") && !dumb }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_malformed| ProgressStyle::default_spinner())
}

/// Writes a line to stderr. When that fails, nobody is left to tell.
pub(crate) fn say(text: &str) {
    let _written = writeln!(std::io::stderr().lock(), "{}", plain(text));
}
