//! Namespaces that somebody else made: runc hands them over to CRIU, if the dump asks for them.

use super::*;
use crate::gate::images::{NETWORK, Network, PIDS, Pids};

const KEYS: [(&str, &str); 2] = [("network", "extRootNetNS"), ("pid", "extRootPidNS")];

/// Images that say of the namespaces of `ids(0)` that they come from outside.
fn external(kind: &str, key: &str) -> (String, Vec<u8>) {
    let external = Some(key.to_owned());
    match kind {
        "network" => {
            ("netns-2.img".to_owned(), image(NETWORK, &[Network { external }.encode_to_vec()]))
        }
        _ => ("pidns-1.img".to_owned(), image(PIDS, &[Pids { external }.encode_to_vec()])),
    }
}

/// Judges a dump with one more image, for a container that joins these namespaces.
fn told(
    more: Option<(String, Vec<u8>)>,
    joined: &[&str],
    change: impl FnOnce(&mut Dump),
) -> String {
    let mut dump = Dump::default();
    change(&mut dump);
    let mut images = dump.images();
    images.extend(more);
    let summary = summarise(&images, &dump.others).unwrap();
    let joined_namespaces = joined.iter().map(ToString::to_string).collect();
    judge(&summary, &Expected { joined_namespaces, ..expected() }).join("; ")
}

#[test]
fn what_was_given_to_the_dump_must_be_given_to_the_new_container() {
    for (kind, key) in KEYS {
        assert_eq!(told(None, &[], |_| {}), "", "both have their own");
        assert_eq!(told(Some(external(kind, key)), &[kind], |_| {}), "", "both are given one");
        let lacks = told(Some(external(kind, key)), &[], |_| {});
        assert!(lacks.contains("joins none") && lacks.contains(&format!("{kind}:PATH")), "{lacks}");
        let alone = told(None, &[kind], |_| {});
        assert!(alone.contains(&format!("its {kind} namespace was its own")), "{alone}");
    }
}

#[test]
fn only_runcs_names_are_known() {
    for (kind, _) in KEYS {
        for key in ["", "extRootUtsNS", "pipe:[1]"] {
            let odd = told(Some(external(kind, key)), &[kind], |_| {});
            assert!(odd.contains(&format!("by the name {key:?}")), "{odd}");
        }
    }
    // What is said of a namespace that no process is in.
    let (_, content) = external("network", "extRootNetNS");
    assert_eq!(told(Some(("netns-9.img".to_owned(), content.clone())), &[], |_| {}), "");
    // What CRIU does not read, and another image of a name that begins so.
    assert_eq!(told(Some(("netns-02.img".to_owned(), content.clone())), &[], |_| {}), "");
    assert_eq!(told(Some(("netns-ct-2.img".to_owned(), content)), &[], |_| {}), "");
}

/// CRIU leaves such processes where it is itself, whatever it is handed over.
#[test]
fn the_hosts_own_network_comes_to_no_container_that_joins_another() {
    let at_home = |dump: &mut Dump| dump.ids.get_mut(&1).unwrap().network = Some(102);
    for more in [None, Some(external("network", "extRootNetNS"))] {
        let refused = told(more, &["network"], at_home);
        assert!(refused.contains("in the host's network namespace"), "{refused}");
    }
    let mut dump = Dump::default();
    at_home(&mut dump);
    let summary = summarise(&dump.images(), &dump.others).unwrap();
    let networks = || ["network".to_owned()].into();
    let nodes =
        Expected { host_namespaces: networks(), joined_namespaces: networks(), ..expected() };
    assert_eq!(judge(&summary, &nodes).join("; "), "", "its path is the node's own");
}
