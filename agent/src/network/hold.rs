//! The agent's own lock: packets of some connections are dropped, and of nobody else's. It is for a
//! source that ends with its checkpoint and whose connections are to go on elsewhere. CRIU's lock ends
//! with its dump: what came then would be confirmed by the source, and lost; and what came after the
//! source's end would be answered that there is no such connection.
//!
//! A table for each operation, in the network namespace of the container. The kernel forgets what is in
//! it after a while, whoever has died; a restore into that namespace removes it before.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::{call, call_with, is_table, of};
use crate::connections::Ends;

/// How long connections are held for a restore after the source has ended. Their other ends give up
/// after about as long (`tcp_retries2` of tcp(7)).
pub(crate) const HOLD: Duration = Duration::from_mins(15);

/// How the tables are called; then follows the operation.
const TABLE: &str = "kybernate-";

/// The sets in a table, by family.
const SETS: [(&str, &str); 2] = [("four", "ipv4_addr"), ("six", "ipv6_addr")];

/// Drops the packets of connections for a time from now on, in the network namespace of `pid`.
pub(crate) async fn hold(
    pid: u32,
    operation: &str,
    ends: &[Ends],
    time: Duration,
) -> io::Result<()> {
    call_with(&of(pid), &["nft", "-f", "-"], &rules(operation, ends, time)).await.map(drop)
}

/// Lets them go on, if they are held.
pub(crate) async fn let_go(pid: u32, operation: &str) -> io::Result<()> {
    let table = format!("{TABLE}{operation}");
    match tables(pid).await {
        held if held.contains(&table) => delete(pid, &table).await,
        _ => Ok(()),
    }
}

/// Lets those go on that somebody has now who was restored: one of them is enough, since a checkpoint
/// comes back with all of its connections.
pub(crate) async fn hand_over(pid: u32, ends: &[Ends]) -> io::Result<()> {
    for table in tables(pid).await {
        let listed = call(&of(pid), &["nft", "-n", "list", "table", "inet", &table]).await?;
        let listed = held(&listed);
        if ends.iter().any(|(local, remote)| listed.contains(&(plain(*local), plain(*remote)))) {
            tracing::info!(pid, table, "connections go on where they were held");
            delete(pid, &table).await?;
        }
    }
    Ok(())
}

/// Where there is no such tool, nothing is held.
async fn tables(pid: u32) -> Vec<String> {
    let tables = call(&of(pid), &["nft", "list", "tables", "inet"]).await.unwrap_or_default();
    let named = tables.lines().filter_map(|line| line.strip_prefix("table inet "));
    named.filter(|name| is_table(name, TABLE)).map(str::to_owned).collect()
}

async fn delete(pid: u32, table: &str) -> io::Result<()> {
    match call(&of(pid), &["nft", "delete", "table", "inet", table]).await {
        // Somebody else was quicker.
        Err(_) if !tables(pid).await.iter().any(|left| left == table) => Ok(()),
        done => done.map(drop),
    }
}

/// Returns a table as `nft -f` reads it. Each connection is in it both ways.
fn rules(operation: &str, ends: &[Ends], time: Duration) -> String {
    let plain = ends.iter().map(|(local, remote)| (plain(*local), plain(*remote)));
    let both: Vec<Ends> = plain.flat_map(|(one, other)| [(one, other), (other, one)]).collect();
    let table = format!("table inet {TABLE}{operation}");
    let sets = SETS.iter().zip([true, false]).map(|((name, kind), v4)| {
        let element = |(from, to): &Ends| {
            let (from_port, to_port, time) = (from.port(), to.port(), time.as_secs());
            format!("{} . {from_port} . {} . {to_port} timeout {time}s", from.ip(), to.ip())
        };
        let elements = both.iter().filter(|(from, _)| from.is_ipv4() == v4).map(element);
        let elements = elements.collect::<Vec<_>>().join(", ");
        let elements = match &*elements {
            "" => String::new(),
            some => format!("elements = {{ {some} }}\n"),
        };
        let kind = format!("type {kind} . inet_service . {kind} . inet_service");
        format!("set {name} {{\n{kind}\nflags timeout\n{elements}}}\n")
    });
    let chains = ["input", "output"].iter().map(|hook| {
        format!(
            "chain {hook} {{\ntype filter hook {hook} priority -200\n\
             ip saddr . tcp sport . ip daddr . tcp dport @four drop\n\
             ip6 saddr . tcp sport . ip6 daddr . tcp dport @six drop\n}}\n"
        )
    });
    let within: String = sets.chain(chains).collect();
    // It takes the place of an earlier one in one step.
    format!("{table}\ndelete {table}\n{table} {{\n{within}}}\n")
}

/// Returns what a table holds, as `nft list` tells it.
fn held(listed: &str) -> Vec<Ends> {
    let parts = listed.split(|sign: char| ",{}=\n".contains(sign));
    let ends = |part: &str| {
        let mut words = part.split_whitespace();
        let ip = |word: Option<&str>| word?.parse::<IpAddr>().ok();
        let port = |word: Option<&str>| word?.parse::<u16>().ok();
        let from = SocketAddr::new(ip(words.next())?, port(words.nth(1))?);
        Some((from, SocketAddr::new(ip(words.nth(1))?, port(words.nth(1))?)))
    };
    parts.filter_map(ends).collect()
}

/// Returns an address as packets have it.
pub(super) fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_listed_is_what_was_held() {
        let ends = [("10.99.0.2:5000", "10.99.0.1:80"), ("[::1]:5000", "[fe80::1]:81")];
        let ends = ends.map(|(one, other)| (one.parse().unwrap(), other.parse().unwrap()));
        let text = rules("20260101-1", &ends, HOLD);
        assert!(text.contains("\ntable inet kybernate-20260101-1 {\n"), "{text}");
        let [four, six] = ends;
        assert_eq!(held(&text), [four, (four.1, four.0), six, (six.1, six.0)]);
        let listed = "set four {\n elements = { 10.99.0.1 . 80 . 10.99.0.2 . 5000 timeout 15m \
            expires 14m50s,\n 10.99.0.2 . 5000 . 10.99.0.1 . 80 timeout 15m expires 1s }\n}\n";
        assert_eq!(held(listed), [(four.1, four.0), four]);
        let mapped = ("[::ffff:10.99.0.2]:5000".parse().unwrap(), four.1);
        assert_eq!(held(&rules("x", &[mapped], HOLD)), [four, (four.1, four.0)]);
        assert_eq!(held(&rules("x", &[], HOLD)), []);
    }
}
