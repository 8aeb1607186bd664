//! What a registry is told of the trace that a command is a part of.

use std::collections::BTreeSet;
use std::ffi::OsStr;

use crate::hostile::{Scripted, reply};
use crate::kyb::kyb_with;

const GIVEN: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// Runs a command in an environment, and returns what all its requests said, and what it told.
async fn told(server: &Scripted, variables: &[(&str, &str)]) -> (String, String) {
    let scratch = tempfile::tempdir().unwrap();
    let variables: Vec<_> =
        variables.iter().map(|(name, text)| (*name, OsStr::new(text))).collect();
    let reference = server.at("a/b:v1").to_string();
    let ran = kyb_with(scratch.path(), &variables, ["inspect", &reference]).await;
    ran.ended(1, "not found");
    let heads = server.take_heads();
    assert!(heads.len() > 2, "{heads:?}");
    let line = |head: &String| {
        let line = head.lines().find_map(|line| line.strip_prefix("traceparent: "));
        line.unwrap_or_else(|| panic!("{head}")).to_owned()
    };
    let said: BTreeSet<_> = heads.iter().map(line).collect();
    assert_eq!(said.len(), 1, "{said:?}");
    (said.into_iter().next().unwrap(), ran.told)
}

#[tokio::test]
async fn every_request_is_a_part_of_the_trace_in_the_environment_or_of_a_new_one() {
    let asks_for_a_token = |here: &str, head: &str| match head {
        head if head.starts_with("get /token") => reply("200 OK", "", r#"{"token":"t"}"#),
        head if head.contains("authorization: bearer t") => reply("404 Not Found", "", ""),
        _ => {
            let way = format!("WWW-Authenticate: Bearer realm=\"http://{here}/token\"\r\n");
            reply("401 Unauthorized", &way, "")
        }
    };
    let server = Scripted::start(asks_for_a_token).await;
    assert_eq!(told(&server, &[("TRACEPARENT", GIVEN)]).await.0, GIVEN);

    let (one, _) = told(&server, &[]).await;
    let (two, _) = told(&server, &[("TRACEPARENT", "")]).await;
    assert_ne!(one, two);
    let (three, warned) =
        told(&server, &[("TRACEPARENT", "00-nothing"), ("KYB_LOG", "info")]).await;
    assert!(three.starts_with("00-") && three.ends_with("-01") && three != GIVEN, "{three}");
    assert!(warned.contains("TRACEPARENT"), "{warned}");
    let trace = three.split('-').nth(1).unwrap();
    assert!(warned.contains(trace), "the log says which trace it is: {warned}");
}
