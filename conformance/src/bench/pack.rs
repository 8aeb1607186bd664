//! Figures of packing and unpacking: `kyb` beside what no program can beat, and beside `tar`, `cp`,
//! `oras` and `skopeo`, which move the same dump.
//!
//! Reading order: here is what is measured, in which order; [`dump`] writes the dumps, [`floor`] is
//! what nothing beats, [`tools`] runs programs and looks at their memory. Nothing is asserted on time;
//! that what comes out is what went in is.

mod dump;
mod floor;
mod tools;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use fs_err as fs;
use serde_json::Value;

use self::tools::{Ran, Tools};
use super::floors::Floors;
use super::registry::server::{Program, Server};
use super::registry::table::Table;

/// The columns.
const KYB: &str = "kyb";
const FLOOR: &str = "floor";
const MODEL: &str = "TCP + BLAKE3 + tmpfs";
const TAR: &str = "tar + oras";
const SKOPEO: &str = "skopeo";
const CP: &str = "cp -r";

/// One page in so many changes: 2 %.
const CHANGED: u64 = 50;

/// What to measure.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Plan {
    /// Memory of the dumped process, in MiB.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(3..))]
    mib: u32,
    /// How many small images the other dump has.
    #[arg(long, default_value_t = 20_000)]
    small: u32,
    /// How often everything is measured.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Where everything is read and written. On a tmpfs it is the programs that are measured, and
    /// not the disk.
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    home: PathBuf,
    /// Print every round's figures as JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// One round.
struct Round<'a> {
    plan: &'a Plan,
    number: u32,
    tools: Tools,
    /// Everything of this round; removed after it.
    home: PathBuf,
    server: &'a Server,
    floors: Floors,
    figures: Vec<(&'static str, String, f64)>,
}

/// Measures, and prints a table or JSON.
#[expect(clippy::print_stdout, reason = "the command's result")]
pub(crate) fn run(bin: &Path, cache: &Path, plan: &Plan) -> anyhow::Result<()> {
    let home = tempfile::Builder::new().prefix("kybernate-bench-").tempdir_in(&plan.home)?;
    let ours = Program::all(bin, cache).into_iter().find(Program::is_ours);
    let ours = ours.context("there is no registry of ours")?;
    let mut table = Table::default();
    let load = fs::read_to_string("/proc/loadavg")?;
    for number in 0..=plan.rounds {
        let home = home.path().join(number.to_string());
        fs::create_dir(&home)?;
        let server = ours.start(&home.join("registry"))?;
        let floors = Floors::measure(&home)?;
        let tools = Tools::new(bin, cache, &home);
        let mut round =
            Round { plan, number, tools, home, server: &server, floors, figures: Vec::new() };
        round.measure()?;
        let Round { home, figures, .. } = round;
        server.stop()?;
        fs::remove_dir_all(home)?;
        // A first round warms up: the first touch of memory costs several times the later ones.
        if number > 0 {
            // Ours first: the others are told as multiples of it.
            let (ours, others): (Vec<_>, Vec<_>) =
                figures.into_iter().partition(|(column, ..)| *column == KYB);
            for (column, name, value) in ours.into_iter().chain(others) {
                table.add(column, vec![(name, value)]);
            }
        }
        crate::cli::say(&format!("round {number}/{} is done", plan.rounds));
    }
    if plan.json {
        println!("{}", serde_json::to_string_pretty(&table.json())?);
    } else {
        let place = plan.home.display();
        let load = load.split(' ').next().unwrap_or_default();
        println!(
            "{} MiB process, a third each random, zero and repeating pages; everything in {place}; \
             {} rounds, median (least–most); load {load} before\n\n{}",
            plan.mib,
            plan.rounds,
            table.text()
        );
    }
    Ok(())
}

impl Round<'_> {
    fn measure(&mut self) -> anyhow::Result<()> {
        let [one, two] = ["one", "two"].map(|name| self.home.join(name));
        let seed = u64::from(self.number);
        dump::write(&one, self.plan.mib, seed, None)?;
        dump::write(&two, self.plan.mib, seed, Some(CHANGED))?;
        self.layout(&one)?;
        self.increment_here()?;
        self.push(&one)?;
        self.increment_there()?;
        self.copy()?;
        fs::remove_dir_all(self.home.join("layout"))?;
        fs::remove_dir_all(&two)?;
        self.pull(&one)?;
        fs::remove_dir_all(&one)?;
        self.small()
    }

    /// Packs into an image layout.
    fn layout(&mut self, dump: &Path) -> anyhow::Result<()> {
        let floor = floor::pack(dump, &self.home.join("floor"))?;
        fs::remove_dir_all(self.home.join("floor"))?;
        self.add(FLOOR, "pack to a layout, s", floor.as_secs_f64());
        let ran = self.tools.kyb(&["pack", "one", "oci:layout:v1"])?;
        self.add(KYB, "pack to a layout, s", ran.seconds());
        self.add(KYB, "pack to a layout, resident MiB", ran.mib);
        let stored = number(&ran, "/sizes/pageBytes")?;
        self.add(KYB, "pages stored, MiB", stored / MIB);
        self.add(KYB, "pack to a layout, GB of dump/s", self.dump_gb() / ran.seconds());
        Ok(())
    }

    /// Packs the changed dump with the layout's checkpoint for its base.
    fn increment_here(&mut self) -> anyhow::Result<()> {
        let words = ["pack", "two", "oci:layout:v2", "--base", "oci:layout:v1"];
        let ran = self.tools.kyb(&words)?;
        self.increment("2 % changed, local base", &ran, "pack to a layout, s")
    }

    /// Packs into the registry, with page hashes; beside it, a tar is made and pushed.
    fn push(&mut self, dump: &Path) -> anyhow::Result<()> {
        let at = self.at("kyb:v1");
        let ran = self.tools.kyb(&["pack", "one", &at, "--page-hashes"])?;
        self.add(KYB, "pack and push, s", ran.seconds());
        self.add(KYB, "pack and push, resident MiB", ran.mib);
        if self.tools.has("oras") {
            let tar = self.tools.system("tar", &["-cf", "dump.tar", &name(dump)])?;
            let at = self.at("tar:v1");
            let words = ["push", "--plain-http", &at, "dump.tar:application/x-tar"];
            let ran = tar.then(self.tools.foreign("oras", &words)?);
            fs::remove_file(self.home.join("dump.tar"))?;
            self.add(TAR, "pack and push, s", ran.seconds());
            self.add(TAR, "pack and push, resident MiB", ran.mib);
        }
        Ok(())
    }

    /// Packs the changed dump with nothing of its base here but the page hashes.
    fn increment_there(&mut self) -> anyhow::Result<()> {
        let [base, at] = [self.at("kyb:v1"), self.at("kyb:v2")];
        let words = ["pack", "two", &at, "--base", &base, "--insecure-base", "--page-hashes"];
        let ran = self.tools.kyb(&words)?;
        self.increment("2 % changed, page hashes only", &ran, "pack and push, s")
    }

    fn increment(&mut self, what: &str, ran: &Ran, full: &str) -> anyhow::Result<()> {
        let of_full = |found: &&(&str, String, f64)| found.0 == KYB && found.1 == full;
        let full = self.figures.iter().find(of_full).map_or(f64::NAN, |found| found.2);
        let added = number(ran, "/bytesAdded")?;
        let stored = number(ran, "/sizes/pageBytes")?;
        self.add(KYB, &format!("{what}, s"), ran.seconds());
        self.add(KYB, &format!("{what}, % of the full pack's time"), 100.0 * ran.seconds() / full);
        self.add(KYB, &format!("{what}, % of the bytes"), 100.0 * added / stored);
        self.add(KYB, &format!("{what}, resident MiB"), ran.mib);
        Ok(())
    }

    /// Moves the layout's artifact into the registry.
    fn copy(&mut self) -> anyhow::Result<()> {
        let ran = self.tools.kyb(&["copy", "oci:layout:v1", &self.at("copy:v1")])?;
        self.add(KYB, "layout to registry, s", ran.seconds());
        self.add(KYB, "layout to registry, resident MiB", ran.mib);
        if self.tools.has("skopeo") {
            let to = format!("docker://{}", self.at("skopeo:v1"));
            let words = ["--insecure-policy", "copy", "--all", "--preserve-digests"];
            let words =
                [words.as_slice(), &["--dest-tls-verify=false", "oci:layout:v1", &to]].concat();
            let ran = self.tools.foreign("skopeo", &words)?;
            self.add(SKOPEO, "layout to registry, s", ran.seconds());
            self.add(SKOPEO, "layout to registry, resident MiB", ran.mib);
        }
        Ok(())
    }

    /// Pulls, verified, into a dump directory.
    fn pull(&mut self, dump: &Path) -> anyhow::Result<()> {
        const TIME: &str = "pull into a dump directory, s";
        let at = self.at("kyb:v1");
        let ran = self.tools.kyb(&["unpack", &at, "out", "--insecure-no-signature"])?;
        let inspected = self.tools.kyb(&["inspect", &at, "--facts-only"])?;
        let stored = number(&inspected, "/config/sizes/pageBytes")?;
        self.add(KYB, TIME, ran.seconds());
        self.add(KYB, "pull into a dump directory, resident MiB", ran.mib);
        self.add(KYB, "pull, GB of pages/s", stored / 1e9 / ran.seconds());
        self.add(KYB, "pull, GB of dump/s", self.dump_gb() / ran.seconds());
        let model = self.model()?.as_secs_f64() * stored / GIB;
        self.add(MODEL, TIME, model);
        same(dump, &self.home.join("out"))?;
        fs::remove_dir_all(self.home.join("out"))?;
        if self.tools.has("oras") {
            let words = ["pull", "--plain-http", &self.at("tar:v1"), "--output", "pulled"];
            let pulled = self.tools.foreign("oras", &words)?;
            let ran =
                pulled.then(self.tools.system("tar", &["-C", "pulled", "-xf", "pulled/dump.tar"])?);
            self.add(TAR, TIME, ran.seconds());
            self.add(TAR, "pull into a dump directory, resident MiB", ran.mib);
            fs::remove_dir_all(self.home.join("pulled"))?;
        }
        Ok(())
    }

    /// Packs and unpacks many small images.
    fn small(&mut self) -> anyhow::Result<()> {
        let dump = self.home.join("small");
        dump::write_small(&dump, self.plan.small, u64::from(self.number))?;
        let copied = self.tools.system("cp", &["-r", "small", "copied"])?;
        let packed = self.tools.kyb(&["pack", "small", "oci:layout:small"])?;
        let words = ["unpack", "oci:layout:small", "out", "--insecure-no-signature"];
        let unpacked = self.tools.kyb(&words)?;
        same(&dump, &self.home.join("out"))?;
        for (what, ran) in [("packed", packed), ("unpacked", unpacked)] {
            let name = format!("{} small images, {what}", self.plan.small);
            self.add(KYB, &format!("{name}, s"), ran.seconds());
            self.add(CP, &format!("{name}, s"), copied.seconds());
            self.add(KYB, &format!("{name}, resident MiB"), ran.mib);
        }
        Ok(())
    }

    /// Returns what one core needs for a GiB that comes over TCP, is proven and is written.
    fn model(&self) -> anyhow::Result<Duration> {
        let Floors(floors) = &self.floors;
        ["loopback TCP, both ends", "BLAKE3, one core", "write to tmpfs"]
            .into_iter()
            .map(|wanted| {
                let found = floors.iter().find(|(name, _)| *name == wanted);
                found.map(|(_, time)| *time).with_context(|| format!("no floor is called {wanted}"))
            })
            .sum()
    }

    fn at(&self, name: &str) -> String {
        format!("{}/bench/{name}", self.server.address)
    }

    fn dump_gb(&self) -> f64 {
        f64::from(self.plan.mib) * MIB / 1e9
    }

    fn add(&mut self, column: &'static str, name: &str, value: f64) {
        self.figures.push((column, name.to_owned(), value));
    }
}

const MIB: f64 = 1_048_576.0;
const GIB: f64 = 1024.0 * MIB;

/// Returns a number of what `kyb` printed.
fn number(ran: &Ran, pointer: &str) -> anyhow::Result<f64> {
    let told: Value = serde_json::from_str(&ran.out).context("kyb printed no JSON")?;
    let found = told.pointer(pointer).and_then(Value::as_f64);
    found.with_context(|| format!("kyb does not tell {pointer}"))
}

/// Fails unless both directories hold the same files.
fn same(one: &Path, other: &Path) -> anyhow::Result<()> {
    let mut files = 0_u64;
    for entry in fs::read_dir(one)? {
        let name = entry?.file_name();
        let hash = |directory: &Path| {
            let mut hasher = blake3::Hasher::new();
            std::io::copy(&mut fs::File::open(directory.join(&name))?, &mut hasher)?;
            anyhow::Ok(hasher.finalize())
        };
        ensure!(hash(one)? == hash(other)?, "{} has come back another", name.display());
        files += 1;
    }
    let found = u64::try_from(fs::read_dir(other)?.count())?;
    ensure!(found == files, "{found} files came back, {files} went");
    Ok(())
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
