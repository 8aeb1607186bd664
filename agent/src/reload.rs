//! What is read again while the agent serves: who may ask, and whose checkpoints are restored, when
//! their files change and on SIGHUP. Certificates are looked at by whoever uses them. Everything else
//! waits for the next start.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use fs_err as fs;
use tokio::signal::unix::Signal;

use crate::access::Look;
use crate::app::App;

/// How often the configuration file is compared with what was read.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Mode of a socket that only root can use.
const ROOT: u32 = 0o600;

/// Of one that everybody can connect to, since the API asks who it is.
const EVERYBODY: u32 = 0o666;

/// Returns the mode that the socket has for the rules of now.
pub(crate) fn socket_mode(app: &App) -> u32 {
    if app.config.callers.current().has_users() { EVERYBODY } else { ROOT }
}

/// Looks for as long as tasks run.
pub(crate) fn follow(app: &Arc<App>, mut hangup: Signal) {
    let app = Arc::clone(app);
    app.tasks.clone().spawn(|cancel| async move {
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let look = tokio::select! {
                _tick = ticks.tick() => Look::IfChanged,
                Some(()) = hangup.recv() => Look::Always,
                () = cancel.cancelled() => return,
            };
            let app = Arc::clone(&app);
            if let Err(error) = tokio::task::spawn_blocking(move || again(&app, look)).await {
                tracing::error!(%error, "the configuration is not followed any more");
                return;
            }
        }
    });
}

/// Looks once. Blocks.
fn again(app: &App, look: Look) {
    if look == Look::Always {
        tracing::info!("SIGHUP: rules of callers and the trust policy are read again");
        drop(app.config.trust.current(&app.operations.metrics));
    }
    if !app.config.callers.look(look) {
        return;
    }
    let mode = std::fs::Permissions::from_mode(socket_mode(app));
    if let Err(error) = fs::set_permissions(&app.config.socket, mode) {
        tracing::error!(%error, "the socket does not let in whom the rules speak of");
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{Signal as Number, getpid, kill_process};
    use tokio::net::UnixListener;
    use tokio::signal::unix::{SignalKind, signal};

    use super::*;
    use crate::config::ServeArgs;
    use crate::patience::Patience;

    #[tokio::test]
    async fn the_socket_lets_in_whom_the_rules_of_now_speak_of() {
        let directory = tempfile::tempdir().unwrap();
        let (file, socket) = (directory.path().join("a.toml"), directory.path().join("a.sock"));
        let rule = "[[caller]]\nwho = 'uid:1'\nmay = ['read']\nnamespaces = ['*']\n";
        fs::write(&file, "").unwrap();
        let args = ServeArgs {
            config: Some(file.clone()),
            socket: Some(socket.clone()),
            root: Some(directory.path().join("root")),
            ..ServeArgs::default()
        };
        let app = App::new(args.validate().unwrap()).unwrap();
        let _listener = UnixListener::bind(&socket).unwrap();
        // From here on this process does not end by it.
        follow(&app, signal(SignalKind::hangup()).unwrap());
        for (text, mode) in [(rule, EVERYBODY), ("", ROOT)] {
            fs::write(&file, text).unwrap();
            kill_process(getpid(), Number::HUP).unwrap();
            let found = || fs::metadata(&socket).unwrap().permissions().mode() & 0o777;
            let mut looks = Patience::new(Duration::from_secs(30), Duration::from_millis(20));
            while found() != mode && looks.once_more().await {}
            assert_eq!((found(), socket_mode(&app)), (mode, mode));
        }
        assert!(app.tasks.shut_down(Duration::from_secs(5)).await);
    }
}
