use super::*;
use crate::config::{RegistryConfig, ServeArgs};

fn rule(who: &str, may: &[Right], namespaces: &[&str]) -> Rule {
    let namespaces = namespaces.iter().map(|name| glob(name).unwrap()).collect();
    Rule { who: who.parse().unwrap(), may: may.to_vec(), namespaces }
}

fn asker(caller: Caller) -> Asker {
    let operator = "certificate:spiffe://c.example/ns/*/operator";
    let rules = Rules::new(vec![
        rule("uid:1000", &[Right::Read, Right::Suspend], &["team-*"]),
        rule(operator, &[Right::Read, Right::Checkpoint], &["k8s.io"]),
        rule(operator, &[Right::Stage], &["*"]),
    ]);
    by(caller, rules)
}

fn by(caller: Caller, rules: Rules) -> Asker {
    let (callers, metrics) = (Arc::new(Callers::of(rules)), Metrics::default());
    Asker { caller, method: "GetNode", callers, metrics }
}

fn operator() -> Asker {
    let names = ["somebody", "spiffe://c.example/ns/kybernate/operator"];
    asker(Caller::Certificate(names.map(str::to_owned).to_vec()))
}

#[test]
fn what_no_rule_says_is_refused() {
    let user = asker(Caller::User(1000));
    let here = Place::Namespace("team-a");
    assert!(user.has(Right::Suspend, here) && user.has(Right::Read, Place::Anywhere));
    for (right, place) in [
        (Right::Checkpoint, here),
        (Right::Suspend, Place::Namespace("bank")),
        (Right::Suspend, Place::Namespace("")),
        (Right::Suspend, Place::Everywhere),
    ] {
        assert!(!user.has(right, place), "{right} {place}");
    }
    let named_as = Caller::Certificate(vec!["uid:1000".to_owned(), "1000".to_owned()]);
    for stranger in [Caller::User(1001), Caller::Nobody, named_as] {
        assert!(!asker(stranger).has(Right::Read, Place::Anywhere));
    }
    let told = user.may(Right::Restore, Place::Namespace("")).unwrap_err();
    assert_eq!(told.code(), tonic::Code::PermissionDenied);
    assert_eq!(
        told.message(),
        "uid:1000 may not restore in namespace \"default\": no [[caller]] of this node's \
         configuration says so"
    );
}

#[test]
fn root_of_this_machine_may_everything_and_no_certificate_is_root() {
    let root = asker(Caller::User(0));
    assert!(root.has(Right::Allow, Place::Everywhere) && root.must_be_root().is_ok());
    let all = Rules::new(vec![rule("certificate:*", &[Right::Allow], &["*"])]);
    let caller = Caller::Certificate(vec!["root".to_owned()]);
    let other = by(caller, all);
    assert!(other.has(Right::Allow, Place::Everywhere) && other.must_be_root().is_err());
}

#[test]
fn every_name_of_a_certificate_counts_and_every_namespace_is_a_star() {
    let operator = operator();
    assert!(operator.has(Right::Checkpoint, Place::Namespace("k8s.io")));
    assert!(!operator.has(Right::Checkpoint, Place::Everywhere));
    assert!(operator.has(Right::Stage, Place::Everywhere));
    assert!(operator.has(Right::Stage, Place::Namespace("")));
}

#[test]
fn a_directory_of_the_node_is_for_who_is_as_good_as_root() {
    let place = Place::Namespace("k8s.io");
    let operator = operator();
    for registry in ["registry.example.com/apps/web:v1", "no reference at all"] {
        operator.may_name(registry, place).unwrap();
    }
    let refused = operator.may_name("oci:/var/lib/kybernate/stage/x:1", place).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::PermissionDenied);
    assert!(refused.message().contains("may not allow"), "{refused}");
    let root = asker(Caller::User(0));
    root.may_name("oci:/srv/checkpoints:1", place).unwrap();
}

#[test]
fn the_nodes_password_is_shown_to_nobody_on_the_way() {
    let place = Place::Namespace("k8s.io");
    let registries = [("10.0.0.1:5000", true), ("registry.example.com", false)];
    let registries =
        registries.map(|(host, plain_http)| RegistryConfig { host: host.into(), plain_http });
    let config =
        Config { registries: registries.into(), ..ServeArgs::default().validate().unwrap() };
    let may = |asker: &Asker, reference, plain_http| {
        asker
            .may_reach((reference, plain_http), &config, place)
            .map_err(|told| told.message().to_owned())
    };
    let operator = operator();
    for (reference, plain_http) in [
        ("registry.example.com/apps/web:v1", false),
        ("10.0.0.1:5000/apps/web:v1", true),
        ("localhost:5000/apps/web:v1", true),
        ("no reference at all", true),
    ] {
        may(&operator, reference, plain_http).unwrap();
    }
    for reference in ["registry.example.com/apps/web:v1", "10.0.0.1/apps/web:v1"] {
        let told = may(&operator, reference, true).unwrap_err();
        assert!(told.contains(reference) && told.contains("[[registry]]"), "{told}");
        may(&asker(Caller::User(0)), reference, true).unwrap();
    }
    assert!(may(&operator, "oci:/srv/x:1", true).is_err());
}

#[test]
fn who_may_begin_an_operation_may_follow_and_end_it() {
    let operation = |kind: api::OperationKind, namespace: &str| api::Operation {
        kind: kind.into(),
        containerd_namespace: namespace.to_owned(),
        ..api::Operation::default()
    };
    let operator = operator();
    let stage = operation(api::OperationKind::Stage, "bank");
    assert!(operator.sees(&stage) && operator.may_change(&stage).is_ok());
    let restore = operation(api::OperationKind::Restore, "k8s.io");
    assert!(operator.sees(&restore) && operator.may_change(&restore).is_err());
    assert!(!operator.sees(&operation(api::OperationKind::Checkpoint, "bank")));
}

#[test]
fn callers_are_named_in_two_ways() {
    for wrong in ["", "root", "uid:", "uid:-1", "uid:a", "certificate:", "certificate:[", "user:1"]
    {
        wrong.parse::<Who>().unwrap_err();
    }
    assert!("write".parse::<Right>().is_err() && "Read".parse::<Right>().is_err());
}
