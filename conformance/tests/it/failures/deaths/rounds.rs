//! Who dies while memory is copied before the pause (`--pre-copy`), where the kernel tracks which pages
//! are written to, as the emulated machine's does (`emulated`).

use kybernate_conformance::scenario::Scenario;

use super::{Moment, Place, Victim, Way};
use crate::pre_copies::OWN_OPTIONS;

/// What CRIU says in the first round.
pub(super) const LOG: &str = "work/round-1.log";

const SEIZES: Moment = ("a round stops it", |dump| dump.file_says(LOG, "Seized task"));
const WRITES: Moment = ("a round writes memory", |dump| dump.written_to("round-1") > 0);
const NEXT: Moment = ("the next round begins", |dump| dump.file("work/round-2.log").is_some());

pub(crate) fn the_source_runs_on_whoever_dies_in_a_round(scenario: &mut Scenario) {
    let agent = scenario.agent_b.take();
    // Little, for a machine that is slow.
    let way = Way { mib: 24, options: OWN_OPTIONS, words: &["--pre-copy"] };
    let mut place = Place::new(scenario, &scenario.testbed.b, agent, way);
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
}
