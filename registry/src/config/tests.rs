use clap::Parser as _;

use super::*;

fn serve(arguments: &[&str]) -> ServeArgs {
    let command = ["kybernate-registry", "serve"].iter().chain(arguments);
    let Command::Serve(serve) = Args::try_parse_from(command).unwrap().command;
    serve
}

#[test]
fn nothing_need_be_set() {
    let config = serve(&[]).validate().unwrap();
    assert_eq!(config.listen, "127.0.0.1:5000".parse().unwrap());
    assert_eq!(config.log_format, LogFormat::Text);
}

#[test]
fn everything_that_is_wrong_is_said_at_once() {
    let wrong = serve(&[
        "--root",
        "/dev/null",
        "--listen",
        "nowhere",
        "--log-format",
        "xml",
        "--log",
        "a=b=c",
    ])
    .validate()
    .unwrap_err();
    let told: Vec<_> = wrong.iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(told.join("\n"), @r#"
    --root "/dev/null" is not a directory
    --listen "nowhere" is not an address such as 127.0.0.1:5000
    --log-format "xml" is neither text nor json
    --log "a=b=c" is not a filter such as info or kybernate_registry=debug
    "#);
}
