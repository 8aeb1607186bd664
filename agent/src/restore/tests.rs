use super::*;

fn check(change: impl FnOnce(&mut api::RestoreRequest)) -> Result<Order, String> {
    let mut request = api::RestoreRequest {
        reference: "localhost:5000/web:1".to_owned(),
        allow: Some(api::Allowances::default()),
        ..api::RestoreRequest::default()
    };
    change(&mut request);
    Order::parse(request).map_err(|rejection| rejection.to_string())
}

fn allow(change: impl FnOnce(&mut api::Allowances)) -> Result<Order, String> {
    check(|request| change(request.allow.get_or_insert_default()))
}

#[test]
fn a_reference_is_enough() {
    let order = check(|_| {}).unwrap();
    assert_eq!((&*order.namespace, order.container), ("default", None));
}

#[test]
fn what_makes_no_sense_is_told() {
    assert!(check(|r| r.reference = "web".to_owned()).unwrap_err().contains("reference"));
    assert!(check(|r| r.name = "../x".to_owned()).unwrap_err().contains("no name"));
    assert!(check(|r| r.public_keys.push("x".to_owned())).is_err());
    assert!(allow(|a| a.capabilities.push("root".to_owned())).unwrap_err().contains("capability"));
    assert!(allow(|a| a.devices.push("/dev/../etc".to_owned())).unwrap_err().contains("device"));
    assert!(allow(|a| a.host_namespaces.push("user".to_owned())).unwrap_err().contains("user"));
    for (names, reason) in [
        (&["network:netns/pod"][..], "no absolute path"),
        (&["network:/run/../x"], "no absolute path"),
        (&["pid:/proc/1/ns/pid"], "is no namespace"),
        (&["network", "network:/run/netns/pod"], "one network only"),
        (&["network:/run/netns/a", "network:/run/netns/b"], "one network only"),
    ] {
        let names = names.iter().map(ToString::to_string).collect();
        let told = allow(|a| a.host_namespaces = names).unwrap_err();
        assert!(told.contains(reason), "{told}");
    }
    for limits in [
        api::Limits { memory_bytes: 4096, cpu_millis: 0 },
        api::Limits { memory_bytes: 0, cpu_millis: 1 },
    ] {
        assert!(check(|r| r.limits = Some(limits)).unwrap_err().contains("at least"));
    }
    for limits in [
        api::Limits { memory_bytes: u64::MAX, cpu_millis: 0 },
        api::Limits { memory_bytes: 0, cpu_millis: u32::MAX },
    ] {
        check(|r| r.limits = Some(limits)).unwrap_err();
    }
    let mount = api::Mount { source: "etc".to_owned(), ..api::Mount::default() };
    assert!(allow(|a| a.mounts.push(mount)).unwrap_err().contains("absolute"));
}

#[test]
fn a_network_may_be_named_by_its_path() {
    let names = ["uts", "network:/run/netns/pod"].map(str::to_owned);
    let order = allow(|a| a.host_namespaces = names.to_vec()).unwrap();
    assert_eq!(order.allow.network.as_deref(), Some("/run/netns/pod"));
    assert_eq!(order.allow.host_namespaces, ["uts"]);
}
