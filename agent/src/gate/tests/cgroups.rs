//! Which dumps CRIU may make a cgroup namespace for.

use kybernate_packager::criu::ImageReader;
use kybernate_packager::criu::cgroups::naming_none;

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
    summary(&dump, &[image.encode_to_vec()]).is_ok_and(|summary| summary.own_cgroup.is_some())
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
fn who_is_told_nothing_finds_each_set_and_no_cgroup() {
    let mut image = usual();
    twice(&mut image.sets);
    image.sets[1].id = 7;
    let mut dump = Dump::default();
    put(&mut dump, Some(7));
    let sets = summary(&dump, &[image.encode_to_vec()]).unwrap().cgroup_sets;
    assert_eq!(sets, [2, 7].into());
    let mut images = dump.images();
    images.push(("cgroup.img".to_owned(), naming_none(&sets).unwrap()));
    let again = summarise(&images, &dump.others).unwrap();
    assert_eq!((again.cgroup_sets, again.own_cgroup), (sets, None));
    let (_, written) = images.pop().unwrap();
    let mut records = ImageReader::new(&*written, CGROUPS).unwrap();
    let written: Cgroups = records.next_message().unwrap().unwrap();
    assert!(written.sets.iter().all(|set| set.places.is_empty()) && written.hierarchies.is_empty());
    assert_eq!(summary(&dump, &[]).unwrap().cgroup_sets, [].into());
}

#[test]
fn what_criu_could_not_read_is_refused() {
    let refused = |records: &[Vec<u8>]| summary(&Dump::default(), records).unwrap_err();
    let record = usual().encode_to_vec();
    assert!(refused(&[record.clone(), record]).contains("one record"));
    assert!(refused(&[vec![0xff]]).contains("cgroup.img"));
    let mut broken = usual();
    broken.hierarchies[0].cgroups[0].children = vec![vec![0xff]];
    assert!(refused(&[broken.encode_to_vec()]).contains("cannot be decoded"));
}

fn child(name: &str, children: Vec<Vec<u8>>) -> Vec<u8> {
    let name = name.into();
    Cgroup { name, children, properties: vec![], permissions: None }.encode_to_vec()
}

#[test]
fn what_leads_criu_beyond_its_memory_is_refused() {
    type Spoil = fn(&mut Cgroups);
    let long = |bytes| vec![b'a'; bytes];
    let refused = |image: &Cgroups| {
        summary(&Dump::default(), &[image.encode_to_vec()]).err().unwrap_or_default()
    };
    let spoils: [(&str, Spoil); 13] = [
        ("beyond the end", |image| image.sets[0].places[0].outside = Some(13)),
        ("beyond the end", |image| image.sets[0].places[0].outside = Some(u32::MAX)),
        // CRIU takes as much of the root's name as of the path.
        ("beyond the end", |image| image.hierarchies[0].cgroups[0].name = b"d".to_vec()),
        ("beyond the end", |image| image.hierarchies[0].cgroups[0].name.clear()),
        ("does not begin", |image| image.sets[0].places[0].path.clear()),
        ("does not begin", |image| image.sets[0].places[0].path = b"xdefault/job".to_vec()),
        ("an end within", |image| image.sets[0].places[0].path = b"/default\0job".to_vec()),
        ("an end within", |image| image.sets[0].places[0].hierarchy = b"\0".to_vec()),
        ("an end within", |image| image.hierarchies[0].names[0] = b"\0".to_vec()),
        ("an end within", |image| image.hierarchies[0].cgroups[0].name = b"default/job\0".to_vec()),
        ("an end within", |image| {
            image.hierarchies[0].cgroups[0].properties[0].name = b"cgroup.subtree_control\0".into();
        }),
        // CRIU would look for these for ever.
        ("no name", |image| image.hierarchies[0].names.push(b"cpu".to_vec())),
        ("no name", |image| image.hierarchies[0].names.clear()),
    ];
    for (number, (reason, spoil)) in spoils.into_iter().enumerate() {
        let mut image = usual();
        spoil(&mut image);
        let told = refused(&image);
        assert!(told.contains(reason), "{number}: {told:?}");
    }
    let mut nobody = usual();
    nobody.sets.clear();
    assert!(refused(&nobody).contains("nobody is in any"));
    for path in ["/proc/sys/kernel", "name=/proc/sys/kernel", "a/b", "..", "name=."] {
        let mut named = usual();
        named.hierarchies[0].names[0] = path.into();
        assert!(refused(&named).contains("is a path"), "{path}");
    }
    let mut names = usual();
    names.hierarchies[0].names = vec![long(4200), b"cpu".to_vec()];
    assert!(refused(&names).contains("names of a hierarchy"));
    let mut many = usual();
    many.hierarchies = vec![many.hierarchies[0].clone(); 65];
    assert!(refused(&many).contains("too many hierarchies"));
    let mut value = usual();
    value.hierarchies[0].cgroups[0].properties[0].value = long(257);
    assert!(refused(&value).contains("a property"), "it is written in pieces");
    value.hierarchies[0].cgroups[0].properties[0].value = long(256);
    value.hierarchies[0].cgroups[0].properties[1].value = long(1025);
    assert!(refused(&value).contains("a property"));
}

#[test]
fn paths_for_which_criu_has_no_room_are_refused() {
    let refused = |cgroup: Cgroup| {
        let mut image = usual();
        image.hierarchies[0].cgroups[0] = cgroup;
        image.sets[0].places[0].outside = None;
        summary(&Dump::default(), &[image.encode_to_vec()]).err().unwrap_or_default()
    };
    let nested = |name: &str, depth| {
        let encoded = (0..depth).fold(child(name, vec![]), |inner, _| child(name, vec![inner]));
        Cgroup::decode(&*encoded).unwrap()
    };
    assert_eq!(refused(nested(&"a".repeat(200), 8)), "");
    assert!(refused(nested(&"a".repeat(200), 11)).contains("too long"));
    assert!(refused(nested(&"a".repeat(5000), 0)).contains("too long"));
    assert_eq!(refused(nested("a", 64)), "");
    assert!(refused(nested("a", 65)).contains("too deep"));
}
