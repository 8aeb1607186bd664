//! Agent and guardian die in one moment, so that nobody is left to let the source run.

use fs_err as fs;
use kybernate_conformance::command::wait_until;
use rustix::process::Signal;

use super::{END_LIMIT, MOMENTS, Place, SLACK, Way, catch, guards, is, processes, running, signal};
use crate::harness::{self, said, start};

impl Place<'_> {
    /// Kills the agent and its guardian in the middle of a pause, so that nobody is left to end it.
    fn abandoned(&mut self, tag: &str) {
        let tag = format!("deaths/both:{tag}-{}", self.node.name());
        let mut kyb = self.ask(&tag, &[]);
        assert!(catch(|| MOMENTS[6].1(&self.dump)), "no memory is written\n{}", self.told());
        let guardians = processes(self.node, guards);
        signal(&guardians, Signal::STOP);
        self.agent.take().unwrap().kill();
        signal(&guardians, Signal::KILL);
        kyb.kill().unwrap();
        kyb.wait().unwrap();
        assert!(
            !guardians.is_empty() && wait_until(SLACK, || processes(self.node, guards).is_empty())
        );
        // CRIU is not told of it, and ends.
        assert!(wait_until(END_LIMIT, || running(self.node, "criu").is_empty()));
        assert!(self.dump.froze(), "somebody was left\n{}", self.told());
    }
}

#[test]
fn a_source_whose_agent_and_guardian_died_together_is_the_first_thing_that_is_seen_to() {
    let mut scenario = start();
    harness::on_both(&mut scenario, |scenario, node, agent| {
        let mut place = Place::new(scenario, node, Some(agent), Way::default());
        let rescue = || node.output(&["kybernate-agent", "rescue"]).unwrap();
        // An agent that runs sees to everything itself.
        assert!(rescue().status.success());

        // Without any agent, and with a configuration that lets none start.
        place.abandoned("alone");
        let config = node.path("/etc/kybernate/agent.toml");
        let good = fs::read_to_string(&config).unwrap();
        fs::write(&config, format!("{good}\n[no such thing\n")).unwrap();
        let before = place.dump.counter();
        let rescued = rescue();
        assert!(rescued.status.success(), "{}", said(&rescued));
        assert!(said(&rescued).contains("while this container was paused"), "{}", said(&rescued));
        place.ticks(before, "rescued");
        assert!(is(node, "job", "RUNNING"), "containerd disagrees");
        fs::write(&config, &good).unwrap();
        place.start_agent();
        place.runs_on("the next agent");
        assert_eq!(place.dump.directory(), None, "a dump is left");

        // By an agent that gets no further than that: a tier's directory is somebody's.
        place.abandoned("first");
        let thesis = "/var/lib/theses";
        node.run(&["sh", "-c", &format!("mkdir {thesis}; touch {thesis}/mine.txt")]).unwrap();
        let tier = format!("[staging.nvme]\ndirectory = \"{thesis}\"\nbudget = \"1GiB\"\n");
        fs::write(&config, format!("{good}{tier}")).unwrap();
        let before = place.dump.counter();
        let failed = node.output(&["kybernate-agent", "serve"]).unwrap();
        assert_eq!(failed.status.code(), Some(1), "{}", said(&failed));
        assert!(said(&failed).contains("mine.txt"), "{}", said(&failed));
        place.ticks(before, "first of all");
        place.start_agent();
        place.runs_on("the last agent");
        assert_eq!(place.dump.directory(), None, "a dump is left");
    });
    scenario.end().unwrap();
}
