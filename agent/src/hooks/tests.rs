use std::path::Path;

use fs_err as fs;
use kybernate_packager::agent_api as api;

use super::*;
use crate::access::glob;
use crate::app::App;
use crate::config::ServeArgs;
use crate::operations::Subject;
use crate::patience::Patience;

fn hook(name: &str, when: When, script: &str) -> Hook {
    let command = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
    Hook { name: name.to_owned(), when, command, limit: Duration::from_secs(30) }
}

fn config(hook: Hook, container: &str, namespace: &str) -> HookConfig {
    let globs = |pattern: &str| vec![glob(pattern).unwrap()];
    let (containers, namespaces) = (globs(container), globs(namespace));
    HookConfig { hook, containers, namespaces, on_request: false }
}

fn hooks(chosen: Vec<Hook>) -> Hooks {
    Hooks::again(chosen, "default", "web")
}

/// An operation of an agent of its own.
async fn operation(root: &Path) -> Driver {
    let args = ServeArgs { root: Some(root.to_owned()), ..ServeArgs::default() };
    let app = App::new(args.validate().unwrap()).unwrap();
    app.operations.begin(Subject::example()).await.unwrap()
}

/// Returns the process that a script has written to `file`, once it has.
async fn noted(file: &Path) -> u32 {
    let mut patience = Patience::new(Duration::from_secs(20), Duration::from_millis(10));
    while patience.once_more().await {
        let text = fs::read_to_string(file).unwrap_or_default();
        if let Some(pid) = text.strip_suffix('\n').and_then(|text| text.parse().ok()) {
            return pid;
        }
    }
    panic!("{file:?} was not written");
}

/// Waits until a process has ended, whoever reaps it.
async fn ended(pid: u32) -> bool {
    let mut patience = Patience::new(Duration::from_secs(20), Duration::from_millis(10));
    while patience.once_more().await {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        if stat.rsplit(')').next().is_none_or(|rest| rest.is_empty() || rest.starts_with(" Z")) {
            return true;
        }
    }
    false
}

#[tokio::test]
async fn a_hook_knows_what_it_is_for_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let driver = operation(directory.path()).await;
    let file = directory.path().join("environment");
    let script = format!("env | sort > {}; pwd >> {0}", file.display());
    let before = hooks(vec![hook("tell", When::Before, &script)]);
    before.before(&driver, 42).await.unwrap();
    let told = fs::read_to_string(&file).unwrap();
    let ours: Vec<&str> = told.lines().filter(|line| !line.starts_with("PWD=")).collect();
    let id = driver.id();
    assert_eq!(
        ours,
        [
            "KYBERNATE_CONTAINER=web",
            "KYBERNATE_NAMESPACE=default",
            &format!("KYBERNATE_OPERATION={id}"),
            "KYBERNATE_PHASE=before",
            "KYBERNATE_PID=42",
            &format!("PATH={PATH}"),
            "/",
        ]
    );
    assert_eq!(driver.made(), []);
}

#[tokio::test]
async fn the_first_that_fails_refuses_and_says_why() {
    let directory = tempfile::tempdir().unwrap();
    let driver = operation(directory.path()).await;
    let file = directory.path().join("second");
    let told = hooks(vec![
        hook("first", When::Before, "echo it is; echo not flushed >&2; exit 3"),
        hook("second", When::Before, &format!("touch {}", file.display())),
    ]);
    let error = told.before(&driver, 1).await.unwrap_err();
    assert_eq!(error.to_string(), "hook \"first\" ended with exit status: 3: not flushed");
    assert!(!file.exists());
    let mut none = hook("none", When::Before, "");
    none.command = vec!["/nowhere/hook".to_owned()];
    let error = hooks(vec![none]).before(&driver, 1).await.unwrap_err();
    assert_eq!(error.to_string(), "hook \"none\" could not be started");
}

#[tokio::test]
async fn one_that_hangs_is_killed_with_what_it_has_started() {
    let directory = tempfile::tempdir().unwrap();
    let driver = operation(directory.path()).await;
    let file = directory.path().join("child");
    let script = format!("sleep 600 & echo $! > {}; wait", file.display());
    let mut hangs = hook("hangs", When::Before, &script);
    hangs.limit = Duration::from_secs(1);
    let error = hooks(vec![hangs]).before(&driver, 1).await.unwrap_err();
    assert_eq!(error.to_string(), "hook \"hangs\" did not end within 1s");
    assert!(ended(noted(&file).await).await);
}

#[tokio::test]
async fn one_of_a_checkpoint_that_is_given_up_is_killed() {
    let directory = tempfile::tempdir().unwrap();
    let driver = operation(directory.path()).await;
    let file = directory.path().join("child");
    let script = format!("sleep 600 & echo $! > {}; wait", file.display());
    let waits = hooks(vec![hook("waits", When::WhilePaused, &script)]);
    let pid = tokio::select! {
        ran = waits.while_paused(&driver, 1) => panic!("{ran:?}"),
        pid = noted(&file) => pid,
    };
    assert!(ended(pid).await);
}

#[tokio::test]
async fn what_a_hook_leaves_running_does_not_hold_it_up() {
    let directory = tempfile::tempdir().unwrap();
    let driver = operation(directory.path()).await;
    let file = directory.path().join("child");
    let script = format!("sleep 600 & echo $! > {}; echo said >&2; exit 1", file.display());
    let error = hooks(vec![hook("leaves", When::Before, &script)]).before(&driver, 1).await;
    assert!(error.unwrap_err().to_string().ends_with("exit status: 1: said"));
    let left = noted(&file).await;
    crate::process::kill(left).unwrap();
    assert!(ended(left).await);
}

#[tokio::test]
async fn what_fails_after_the_pause_is_told_and_the_rest_runs() {
    let directory = tempfile::tempdir().unwrap();
    let driver = operation(directory.path()).await;
    let file = directory.path().join("second");
    let after = hooks(vec![
        hook("first", When::After, "exit 1"),
        hook("second", When::After, &format!("touch {}", file.display())),
        hook("other", When::Failed, "exit 2"),
    ]);
    after.after(&driver).await;
    assert!(file.exists());
    let told: api::Operation = driver.to_api();
    assert_eq!(told.warnings, ["hook \"first\" ended with exit status: 1"]);
}

#[test]
fn hooks_are_for_the_containers_they_name_and_offered_ones_for_who_asks() {
    let mut offered = config(hook("offered", When::After, ""), "*", "*");
    offered.on_request = true;
    let all = [
        config(hook("all", When::Before, ""), "*", "*"),
        config(hook("databases", When::Before, ""), "db-*", "team"),
        offered,
    ];
    let chosen = |asked: &[&str], namespace: &str, container: &str| {
        let asked: Vec<String> = asked.iter().map(|&name| name.to_owned()).collect();
        let hooks = Hooks::choose(&all, &asked, namespace, container);
        hooks.map(|hooks| hooks.chosen.into_iter().map(|hook| hook.name).collect::<Vec<_>>())
    };
    assert_eq!(chosen(&[], "team", "db-1").unwrap(), ["all", "databases"]);
    assert_eq!(chosen(&[], "default", "db-1").unwrap(), ["all"]);
    assert_eq!(chosen(&["offered"], "team", "web").unwrap(), ["all", "offered"]);
    for not_offered in ["all", "databases", "none"] {
        assert!(chosen(&[not_offered], "team", "web").is_err(), "{not_offered}");
    }
}

#[test]
fn an_unreadable_word_is_no_phase() {
    assert_eq!("while_paused".parse(), Ok(When::WhilePaused));
    assert_eq!("paused".parse::<When>(), Err(()));
}
