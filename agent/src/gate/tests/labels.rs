//! Profiles and labels of security modules: CRIU sets what the images say.

use super::*;
use crate::gate::images::{DESCRIPTORS, Descriptor};

const PROFILE: &str = "cri-containerd.apparmor.d";
const LABEL: &str = "system_u:system_r:container_t:s0:c1,c2";
const FILES_LABEL: &str = "system_u:object_r:container_file_t:s0:c1,c2";

/// Compares a profile in a dump with that of a new container, under a security module.
fn compare(lsm: i32, dumped: Option<&str>, given: Option<&str>) -> String {
    check(|dump, expected| {
        dump.inventory.lsm = Some(lsm);
        credentials(dump).lsm_profile = dumped.map(str::to_owned);
        (expected.lsm, expected.lsm_profile) = (lsm, given.map(str::to_owned));
    })
}

#[test]
fn a_profile_must_be_that_of_the_new_container() {
    for (lsm, profile) in [(APPARMOR, PROFILE), (SELINUX, LABEL)] {
        assert_eq!(compare(lsm, Some(profile), Some(profile)), "");
    }
    assert_eq!(compare(APPARMOR, None, None), "");
    assert_eq!(compare(APPARMOR, Some("unconfined"), None), "");
    for (lsm, dumped, given, told) in [
        (
            APPARMOR,
            Some(PROFILE),
            None,
            "profile \"cri-containerd.apparmor.d\", and the new \
          container has no security profile",
        ),
        (
            APPARMOR,
            Some("local"),
            Some(PROFILE),
            "profile \"local\", and the new container has the \
          security profile \"cri-containerd.apparmor.d\"",
        ),
        // CRIU would leave its own, which is none.
        (APPARMOR, None, Some(PROFILE), "no security profile, and the new container has the"),
        (APPARMOR, Some("unconfined"), Some(PROFILE), "no security profile, and"),
        // It is what CRIU would tell the kernel.
        (APPARMOR, Some("cri-containerd.apparmor.d (enforce)"), Some(PROFILE), "(enforce)\", and"),
        (SELINUX, Some(LABEL), Some("system_u:system_r:container_t:s0:c3,c4"), "c3,c4\" (a Pod's"),
        (SELINUX, Some(LABEL), None, "container has no security profile"),
    ] {
        let found = compare(lsm, dumped, given);
        assert!(found.contains(told), "{told:?} is not in {found:?}");
    }
}

#[test]
fn a_profile_is_of_every_thread() {
    assert_refused("\"other\"", |dump, expected| {
        dump.inventory.lsm = Some(APPARMOR);
        credentials(dump).lsm_profile = Some(PROFILE.to_owned());
        (expected.lsm, expected.lsm_profile) = (APPARMOR, Some(PROFILE.to_owned()));
        dump.tree[0].threads = vec![1, 7];
        let mut thread = dump.cores[&1].clone();
        let credentials = thread.thread.as_mut().unwrap().credentials.as_mut().unwrap();
        (thread.process, credentials.lsm_profile) = (None, Some("other".to_owned()));
        dump.cores.insert(7, thread);
    });
}

/// What the gate says of a dump under `SELinux` with the container's own label.
fn labelled(spoil: impl FnOnce(&mut Dump), socket: Option<&str>) -> String {
    let mut dump = Dump::default();
    dump.inventory.lsm = Some(SELINUX);
    credentials(&mut dump).lsm_profile = Some(LABEL.to_owned());
    spoil(&mut dump);
    let mut images = dump.images();
    let descriptors = [Descriptor::default(), Descriptor { label: socket.map(str::to_owned) }];
    let descriptors = descriptors.map(|one| one.encode_to_vec());
    images.push(("fdinfo-2.img".to_owned(), image(DESCRIPTORS, &descriptors)));
    let expected = Expected {
        lsm: SELINUX,
        lsm_profile: Some(LABEL.to_owned()),
        lsm_files: Some(FILES_LABEL.to_owned()),
        ..expected()
    };
    judge(&summarise(&images, &[]).unwrap(), &expected).join("; ")
}

#[test]
fn labels_of_sockets_are_the_containers() {
    assert_eq!(labelled(|_| {}, Some(LABEL)), "");
    let found = labelled(|_| {}, Some("a:b:host_t:s0"));
    assert!(found.contains("sockets with the security label \"a:b:host_t:s0\""), "{found}");
    let made = |label: &str| {
        let label = Some(label.to_owned());
        labelled(|dump| credentials(dump).lsm_socket = label, None)
    };
    assert_eq!(made(LABEL), "");
    assert!(made("a:b:host_t:s0").contains("\"a:b:host_t:s0\" to sockets"));
}

#[test]
fn labels_of_mounts_are_the_containers() {
    let mounted = |options: &str| {
        let options = options.to_owned();
        let mount = Mount { options, ..mount(20, 1, 5, "/tmp") };
        labelled(|dump| dump.mounts.push(mount), None)
    };
    assert_eq!(mounted("rw,seclabel,size=64k"), "");
    assert_eq!(mounted(&format!("rw,context=\"{FILES_LABEL}\",size=64k")), "");
    for name in ["context", "fscontext", "defcontext", "rootcontext"] {
        let found = mounted(&format!("size=64k,{name}=\"a:b:host_t:s0:c5,c6\",mode=755"));
        assert!(
            found.contains("on \"/tmp\" have the security label \"a:b:host_t:s0:c5,c6\""),
            "{found}"
        );
        let found = mounted(&format!("{name}=a:b:host_t:s0"));
        assert!(found.contains("\"a:b:host_t:s0\""), "{found}");
    }
}
