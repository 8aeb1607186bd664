//! Who dies while memory is copied before the pause (`--pre-copy`). Nothing is shown where the kernel
//! does not track which pages are written to; the emulated machine's kernel does (`emulated`).

use kybernate_conformance::machine::INSIDE;

use super::{Moment, Place, Victim, Way};
use crate::harness::start;
use crate::pre_copies::{OWN_OPTIONS, tracks};

/// What CRIU says in the first round.
pub(super) const LOG: &str = "work/round-1.log";

const SEIZES: Moment = ("a round stops it", |dump| dump.file_says(LOG, "Seized task"));
const WRITES: Moment = ("a round writes memory", |dump| dump.written_to("round-1") > 0);
const NEXT: Moment = ("the next round begins", |dump| dump.file("work/round-2.log").is_some());

#[test]
fn the_source_runs_on_whoever_dies_in_a_round() {
    let mut scenario = start();
    let agent = scenario.agent_b.take();
    let b = &scenario.testbed.b;
    if !tracks(b) {
        assert!(std::env::var_os(INSIDE).is_none(), "the emulated machine tracks no pages");
        println!("SKIPPED: this kernel does not track written pages");
        scenario.end().unwrap();
        return;
    }
    let way = Way { options: OWN_OPTIONS, words: &["--pre-copy"] };
    let mut place = Place::new(&scenario, b, agent, way);
    for (victim, moment) in [
        (Victim::Criu, WRITES),
        (Victim::OnlyHungCriu, SEIZES),
        (Victim::HungCriu, SEIZES),
        (Victim::AgentForGood, WRITES),
        (Victim::Agent, NEXT),
    ] {
        place.kills(victim, moment);
    }
    place.ends();
    drop(place);
    scenario.end().unwrap();
}
