//! Which dumps CRIU may make a cgroup namespace for.

use super::*;
use crate::gate::images::{
    CGROUPS, Cgroup, CgroupSet, Cgroups, Hierarchy, Permissions, Place, Property,
};

/// What CRIU 4.2.1 wrote of a container of containerd's: set 1 is its own.
fn usual() -> Cgroups {
    let path = b"/default/job".to_vec();
    let property = |name: &str, value: &str| Property {
        name: name.into(),
        value: value.into(),
        permissions: Some(Permissions { mode: 0o100_644, uid: 0, gid: 0 }),
    };
    let cgroup = Cgroup {
        name: b"default/job".to_vec(),
        children: vec![],
        properties: vec![
            property("cgroup.subtree_control", ""),
            property("cgroup.max.descendants", "max"),
            property("cgroup.freeze", "1"),
            property("cgroup.type", "domain"),
        ],
        permissions: Some(Permissions { mode: 0o040_755, uid: 0, gid: 0 }),
    };
    let hierarchy = Hierarchy { names: vec![vec![]], cgroups: vec![cgroup], threaded: Some(false) };
    let place = Place { hierarchy: vec![], outside: u32::try_from(path.len()).ok(), path };
    Cgroups { sets: vec![CgroupSet { id: 2, places: vec![place] }], hierarchies: vec![hierarchy] }
}

/// Puts all threads of a dump into a set.
fn put(dump: &mut Dump, set: Option<u32>) {
    for core in dump.cores.values_mut() {
        core.thread.as_mut().unwrap().cgroups = set;
    }
}

fn summary(dump: &Dump, records: &[Vec<u8>]) -> Result<Summary, String> {
    let mut images = dump.images();
    images.push(("cgroup.img".to_owned(), image(CGROUPS, records)));
    summarise(&images, &dump.others)
}

/// Whether CRIU may make a namespace for a dump of one thread with this image.
fn own(image: &Cgroups) -> bool {
    let mut dump = Dump::default();
    put(&mut dump, image.sets.first().map(|set| set.id));
    summary(&dump, &[image.encode_to_vec()]).unwrap().own_cgroup.is_some()
}

#[test]
fn a_container_alone_in_its_cgroup_gets_a_namespace() {
    assert!(own(&usual()));
    let mut bare = usual();
    let hierarchy = &mut bare.hierarchies[0];
    hierarchy.threaded = None;
    let cgroup = &mut hierarchy.cgroups[0];
    (cgroup.properties, cgroup.permissions) = (vec![], None);
    assert!(own(&bare));
}

fn twice<T: Clone>(list: &mut Vec<T>) {
    list.push(list[0].clone());
}

#[test]
fn whoever_says_more_than_that_gets_none() {
    type Spoil = fn(&mut Cgroups);
    let set: [Spoil; 10] = [
        |image| image.sets.clear(),
        |image| twice(&mut image.sets),
        |image| {
            twice(&mut image.sets);
            image.sets[1].id = 3;
            image.sets[1].places[0].path = b"/default/jo2".to_vec();
        },
        |image| image.sets[0].id = 0,
        |image| image.sets[0].places.clear(),
        |image| twice(&mut image.sets[0].places),
        |image| image.sets[0].places[0].hierarchy = b"memory".to_vec(),
        // Then no namespace begins there, or further out.
        |image| image.sets[0].places[0].outside = None,
        |image| image.sets[0].places[0].outside = Some(8),
        // CRIU would not put the new root in place of these.
        |image| image.sets[0].places[0].path = b"/default/jo2".to_vec(),
    ];
    let hierarchies: [Spoil; 8] = [
        |image| image.hierarchies.clear(),
        |image| twice(&mut image.hierarchies),
        |image| image.hierarchies[0].names = vec![b"memory".to_vec()],
        |image| image.hierarchies[0].names.push(vec![]),
        |image| image.hierarchies[0].names.clear(),
        |image| image.hierarchies[0].threaded = Some(true),
        |image| image.hierarchies[0].cgroups.clear(),
        |image| twice(&mut image.hierarchies[0].cgroups),
    ];
    let cgroups: [fn(&mut Cgroup); 10] = [
        |cgroup| cgroup.name = b"default".to_vec(),
        |cgroup| cgroup.name = b"default/job\0".to_vec(),
        |cgroup| cgroup.name = b"../../etc".to_vec(),
        |cgroup| cgroup.name.clear(),
        |cgroup| cgroup.children = vec![vec![]],
        |cgroup| cgroup.permissions = Some(Permissions { mode: 0o040_777, uid: 0, gid: 0 }),
        |cgroup| cgroup.permissions = Some(Permissions { mode: 0o040_755, uid: 1000, gid: 0 }),
        |cgroup| cgroup.properties[0].name = b"memory.max".to_vec(),
        |cgroup| cgroup.properties[0].value = vec![b' '; 1 << 10],
        |cgroup| {
            cgroup.properties[0].permissions = Some(Permissions { mode: 0o666, uid: 0, gid: 0 });
        },
    ];
    for (number, spoil) in set.iter().chain(&hierarchies).enumerate() {
        let mut image = usual();
        spoil(&mut image);
        assert!(!own(&image), "{number}: {image:?}");
    }
    for (number, spoil) in cgroups.iter().enumerate() {
        let mut image = usual();
        spoil(&mut image.hierarchies[0].cgroups[0]);
        assert!(!own(&image), "{number}: {image:?}");
    }
}

#[test]
fn a_path_that_names_the_root_or_has_an_end_within_gets_none() {
    for path in ["/", "default/job", "/default/job\0", "/a\0b"] {
        let mut image = usual();
        let place = &mut image.sets[0].places[0];
        place.path = path.into();
        place.outside = Some(u32::try_from(path.find('\0').unwrap_or(path.len())).unwrap());
        image.hierarchies[0].cgroups[0].name = path.trim_start_matches('/').into();
        assert!(!own(&image), "{path:?}");
    }
}

#[test]
fn every_living_thread_is_in_the_set() {
    let records = [usual().encode_to_vec()];
    let own = |change: fn(&mut Dump)| {
        let mut dump = Dump::default();
        dump.tree[0].threads = vec![1, 7];
        dump.cores.insert(7, Core { process: None, ..core() });
        put(&mut dump, Some(2));
        change(&mut dump);
        summary(&dump, &records).unwrap().own_cgroup.is_some()
    };
    assert!(own(|_| {}));
    // CRIU has one more set for each process but the first.
    let mut many = usual();
    twice(&mut many.sets);
    many.sets[1].id = 3;
    let mut dump = Dump::default();
    dump.tree[0].threads = vec![1, 7];
    dump.cores.insert(7, Core { process: None, ..core() });
    put(&mut dump, Some(2));
    dump.cores.get_mut(&7).unwrap().thread.as_mut().unwrap().cgroups = Some(3);
    assert_eq!(summary(&dump, &[many.encode_to_vec()]).unwrap().own_cgroup, Some(2));
    for set in [Some(1), Some(3), None] {
        let mut dump = Dump::default();
        put(&mut dump, set);
        assert!(summary(&dump, &records).unwrap().own_cgroup.is_none(), "{set:?}");
    }
    assert!(
        !own(|dump| dump.cores.get_mut(&7).unwrap().thread.as_mut().unwrap().cgroups = Some(1))
    );
    // Older images have it with the process, and dead ones are nowhere.
    assert!(own(|dump| {
        put(dump, None);
        dump.cores.get_mut(&1).unwrap().process.as_mut().unwrap().cgroups = Some(2);
    }));
    assert!(own(|dump| {
        dump.tree.push(Process { pid: 9, ppid: 1, threads: vec![9] });
        let process = Some(ProcessCore { state: 6, ..ProcessCore::default() });
        dump.cores.insert(9, Core { process, ids: None, thread: None });
    }));
}

#[test]
fn without_anything_there_is_nothing_to_make() {
    let dump = Dump::default();
    assert!(summarise(&dump.images(), &dump.others).unwrap().own_cgroup.is_none());
    // As CRIU leaves it when it is in the container's cgroup itself.
    assert!(summary(&dump, &[]).unwrap().own_cgroup.is_none());
}

#[test]
fn who_is_told_nothing_is_led_nowhere_else() {
    type Spoil = fn(&mut Cgroups);
    let dump = Dump::default();
    let strays =
        |image: &Cgroups| summary(&dump, &[image.encode_to_vec()]).unwrap().stray_cgroup.is_some();
    let child = |name: &str, children: Vec<Vec<u8>>| {
        let name = name.into();
        Cgroup { name, children, properties: vec![], permissions: None }.encode_to_vec()
    };
    // As of version 1, with a cgroup within, and a process there.
    let mut usual = usual();
    twice(&mut usual.hierarchies);
    usual.hierarchies[1].names = vec![b"cpu".to_vec(), b"cpuacct".to_vec()];
    usual.hierarchies[0].cgroups[0].children = vec![child("inner", vec![child("most", vec![])])];
    twice(&mut usual.sets);
    usual.sets[1].places[0].path = b"/default/job/inner".to_vec();
    assert!(!strays(&usual));
    let mut alone = usual.clone();
    alone.hierarchies.clear();
    alone.sets.truncate(1);
    assert!(!strays(&alone), "nothing is made");

    let spoils: [Spoil; 9] = [
        |image| image.sets[1].places[0].path = b"/default/job/../../kubelet".to_vec(),
        |image| image.sets[1].places[0].path = b"/default/job2".to_vec(),
        |image| image.sets[1].places[0].path = b"/system.slice".to_vec(),
        |image| image.sets[1].places[0].hierarchy = b"../etc".to_vec(),
        |image| image.hierarchies[1].names[0] = b"a/b".to_vec(),
        |image| image.hierarchies[0].cgroups[0].name = b"../../root".to_vec(),
        |image| twice(&mut image.hierarchies[0].cgroups),
        |image| image.hierarchies[0].cgroups[0].properties[0].name = b"../x/memory.max".to_vec(),
        |image| image.hierarchies.clear(),
    ];
    for (number, spoil) in spoils.into_iter().enumerate() {
        let mut image = usual.clone();
        spoil(&mut image);
        assert!(strays(&image), "{number}");
    }
    for children in [vec![child("..", vec![])], vec![child("a", vec![child("b/../c", vec![])])]] {
        let mut image = usual.clone();
        image.hierarchies[0].cgroups[0].children = children;
        assert!(strays(&image));
    }
    let mut broken = usual.clone();
    broken.hierarchies[0].cgroups[0].children = vec![vec![0xff]];
    assert!(strays(&broken));
}

#[test]
fn what_criu_could_not_read_is_refused() {
    let refused = |records: &[Vec<u8>]| summary(&Dump::default(), records).unwrap_err();
    let record = usual().encode_to_vec();
    assert!(refused(&[record.clone(), record]).contains("one record"));
    assert!(refused(&[vec![0xff]]).contains("cgroup.img"));
    let mut beyond = usual();
    beyond.sets[0].places[0].outside = Some(13);
    assert!(refused(&[beyond.encode_to_vec()]).contains("beyond the end"));
    beyond.sets[0].places[0].path = b"/default\0job".to_vec();
    beyond.sets[0].places[0].outside = Some(12);
    assert!(refused(&[beyond.encode_to_vec()]).contains("beyond the end"));
}
