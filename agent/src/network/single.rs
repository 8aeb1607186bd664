//! CRIU's lock where it shares its network with what it dumps, the node's own: no chain, but a rule for
//! each way of each connection (`criu/netfilter.c`).

use std::io;
use std::net::{IpAddr, SocketAddr};

use super::hold::plain;
use super::{IPTABLES, call, of};
use crate::connections::Ends;

/// Packets with this mark are CRIU's own (`SOCCR_MARK`).
const MARK: &str = "! --mark 0xc114";

/// Removes the rules of some connections, and nobody else's: other CRIUs may be at work.
pub(crate) async fn unlock_each(pid: u32, ends: &[Ends]) -> io::Result<()> {
    for tool in IPTABLES {
        // Where a tool is not installed, CRIU had none to lock with either.
        let rules = call(&of(pid), &[tool, "-w", "2", "-S"]).await.unwrap_or_default();
        for rule in rules.lines().filter(|rule| is_of(rule, ends)) {
            tracing::warn!(pid, tool, rule, "removing a lock of a CRIU that did not end well");
            let rule = rule.strip_prefix("-A ").unwrap_or_default();
            let words = ["-w", "2", "-D"].into_iter().chain(rule.split_whitespace());
            let words: Vec<&str> = [tool].into_iter().chain(words).collect();
            call(&of(pid), &words).await?;
        }
    }
    Ok(())
}

/// Whether a rule, as `iptables -S` tells it, is CRIU's and drops packets of one of these.
fn is_of(rule: &str, ends: &[Ends]) -> bool {
    // CRIU comments nothing, and a comment would be read as options.
    let is_plain = !rule.contains(['"', '\'', '\\']);
    if !is_plain || !rule.starts_with("-A ") || !rule.contains(MARK) || !rule.ends_with("-j DROP") {
        return false;
    }
    let words: Vec<&str> = rule.split_whitespace().collect();
    let after = |name: &str| {
        words
            .iter()
            .zip(words.iter().skip(1))
            .find(|(word, _)| **word == name)
            .map(|(_, next)| *next)
    };
    let address = |ip: &str, port: &str| {
        let ip: IpAddr = after(ip)?.split('/').next()?.parse().ok()?;
        Some(SocketAddr::new(ip, after(port)?.parse().ok()?))
    };
    let (Some(from), Some(to)) = (address("-s", "--sport"), address("-d", "--dport")) else {
        return false;
    };
    let mut plain = ends.iter().map(|(one, other)| (plain(*one), plain(*other)));
    plain.any(|(one, other)| (from, to) == (one, other) || (from, to) == (other, one))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_of_others_stay() {
        let ends: Ends = ("10.99.0.2:5000".parse().unwrap(), "10.99.0.1:7000".parse().unwrap());
        let rule = "-A INPUT -s 10.99.0.1/32 -d 10.99.0.2/32 -p tcp -m mark ! --mark 0xc114 -m tcp \
            --sport 7000 --dport 5000 -j DROP";
        assert!(is_of(rule, &[ends]) && is_of(rule, &[(ends.1, ends.0)]));
        let mapped = ("[::ffff:10.99.0.2]:5000".parse().unwrap(), ends.1);
        assert!(is_of(rule, &[mapped]));
        assert!(!is_of(rule, &[]) && !is_of(&rule.replace("5000", "5001"), &[ends]));
        assert!(!is_of(&rule.replace("0xc114", "0x1"), &[ends]));
        assert!(!is_of(&rule.replace(" -j", " --comment \"x -t nat\" -j"), &[ends]));
        assert!(!is_of("-A INPUT -j CRIU", &[ends]) && !is_of("-P INPUT ACCEPT", &[ends]));
    }
}
