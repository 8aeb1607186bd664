use super::*;
use crate::gate::images::{InetSocket, NetlinkSocket};

fn inet(kind: u32) -> File {
    File { kind: 4, id: 7, inet: Some(InetSocket { kind }), ..File::default() }
}

fn netlink(protocol: u32, groups: &[u32]) -> File {
    let groups = groups.to_vec();
    let netlink = Some(NetlinkSocket { protocol, groups, ..NetlinkSocket::default() });
    File { kind: 13, id: 7, netlink, ..File::default() }
}

/// CRIU makes it, and the process has it.
#[test]
fn sockets_that_not_everybody_makes_need_the_new_containers_capabilities() {
    let packets = File { kind: 10, id: 7, ..File::default() };
    // Raw, and a way to packets that is older than theirs.
    for file in [packets, inet(3), inet(10)] {
        let with = |dump: &mut Dump| dump.files.push(file.clone());
        assert_refused(
            "sockets for which the new container lacks CAP_NET_RAW",
            |dump, expected| {
                with(dump);
                expected.capabilities.remove("CAP_NET_RAW");
            },
        );
        assert_eq!(check(|dump, _| with(dump)), "");
    }
    // Of netfilter, of IPsec.
    for protocol in [12, 6] {
        let with = |dump: &mut Dump| dump.files.push(netlink(protocol, &[0, 4]));
        assert_refused("sockets for which the new container lacks CAP_NET_ADMIN", |dump, _| {
            with(dump);
        });
        assert_eq!(
            check(|dump, expected| {
                with(dump);
                expected.capabilities.insert("CAP_NET_ADMIN".to_owned());
            }),
            ""
        );
    }
    assert_refused("sockets for which the new container lacks CAP_AUDIT_READ", |dump, _| {
        dump.files.push(netlink(9, &[1]));
    });
    // Whom only an administrator connects to.
    for (protocol, to_port, to_groups, is_refused) in
        [(0, 7, 0, true), (0, 0, 1, true), (2, 7, 1, false)]
    {
        let told = check(|dump, _| {
            let netlink = NetlinkSocket { protocol, to_port, to_groups, groups: Vec::new() };
            dump.files.push(File { kind: 13, id: 7, netlink: Some(netlink), ..File::default() });
        });
        assert_eq!(told.contains("CAP_NET_ADMIN"), is_refused, "{protocol} {to_port} {to_groups}");
    }
    for file in
        [inet(1), inet(2), netlink(0, &[1]), netlink(16, &[4]), netlink(4, &[]), netlink(9, &[0])]
    {
        assert_eq!(check(|dump, _| dump.files.push(file.clone())), "");
    }
}
