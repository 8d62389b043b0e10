//! Where backends are: names looked up again and again, literals never; the one writer of the addresses.
//!
//! Engines restart elsewhere under the same name. So a name is looked up at every `resolve_interval`, and at
//! once when a connection to it failed. An answer replaces the whole set, in the resolver's order; when an
//! address is gone from it, idle connections are dropped, while running streams end on their own. No answer
//! (NXDOMAIN, a resolver that is down) replaces nothing: the last good set stays in use and is marked.

use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::backend::supervise::{Watch, pause};
use crate::state::Backend;

/// Look-ups asked for by failed connections are at least this far apart.
const SHORTEST_PAUSE: Duration = Duration::from_millis(500);

/// What name resolution and the data path tell each other about one backend.
#[derive(Debug, Default)]
pub struct Resolution {
    wanted: Notify,
    failing: AtomicBool,
}

impl Resolution {
    /// Whether the last look-up failed, so that the addresses in use are of an earlier one.
    #[must_use]
    pub fn is_failing(&self) -> bool {
        self.failing.load(Relaxed)
    }
}

/// Asks for a look-up soon: a connection to the backend failed. Cheap, and nothing for a literal.
pub fn request_resolve(backend: &Backend) {
    backend.resolution.wanted.notify_one();
}

/// The address that `host` is, if it is one and not a name. IPv6 without brackets, with or without a zone.
#[must_use]
pub fn literal(host: &str, port: u16) -> Option<SocketAddr> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Some(SocketAddr::new(ip, port));
    }
    let (ip, zone) = host.split_once('%')?;
    let ip: Ipv6Addr = ip.parse().ok()?;
    let scope = zone.parse().ok().or_else(|| interface_index(zone))?;
    Some(SocketAddrV6::new(ip, port, 0, scope).into())
}

/// The index of a network interface, from its name.
fn interface_index(name: &str) -> Option<u32> {
    let plain = !name.is_empty() && name != "." && name != ".." && !name.contains('/');
    let text = plain
        .then(|| std::fs::read_to_string(format!("/sys/class/net/{name}/ifindex")).ok())
        .flatten()?;
    text.trim().parse().ok()
}

/// The answer to a look-up, some time.
pub type Answer<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'a>>;

/// Something that knows the addresses of names.
pub trait Lookup: Send + Sync + std::fmt::Debug {
    /// The addresses of `host`, each with `port`.
    fn lookup<'a>(&'a self, host: &'a str, port: u16) -> Answer<'a>;
}

/// The system's resolver: hosts file, DNS, whatever the machine is set up for.
#[derive(Clone, Copy, Debug)]
pub struct SystemLookup;

impl Lookup for SystemLookup {
    fn lookup<'a>(&'a self, host: &'a str, port: u16) -> Answer<'a> {
        Box::pin(async move { Ok(tokio::net::lookup_host((host, port)).await?.collect()) })
    }
}

/// Keeps the backend's addresses fresh for as long as its task lives.
pub(super) async fn run(watch: &Watch) {
    let backend = &watch.backend;
    let settings = &backend.settings;
    if let Some(addr) = literal(&settings.host, settings.port) {
        if backend.addrs.load().is_empty() {
            backend.addrs.store(Arc::new(vec![addr]));
        }
        watch.resolved.send_replace(1);
        return;
    }
    let mut plan = watch.plan.clone();
    loop {
        let began = Instant::now();
        let answer = watch.lookup.lookup(&settings.host, settings.port).await;
        take_answer(backend, answer);
        watch.resolved.send_modify(|answers| *answers += 1);
        let until_next = async {
            pause(
                &mut plan,
                began,
                1.0,
                |pool| pool.resolve_interval,
                |_| false,
            )
            .await;
        };
        let on_request = async {
            tokio::time::sleep_until(began + SHORTEST_PAUSE).await;
            backend.resolution.wanted.notified().await;
        };
        tokio::select! {
            () = until_next => {}
            () = on_request => {}
        }
    }
}

fn take_answer(backend: &Backend, answer: io::Result<Vec<SocketAddr>>) {
    let name = &backend.settings.name;
    let found = match answer {
        Ok(found) if !found.is_empty() => found,
        Ok(_) => return mark(backend, "the name has no address"),
        Err(error) => return mark(backend, &error.to_string()),
    };
    if backend.resolution.failing.swap(false, Relaxed) {
        tracing::info!(backend = name, "the backend's name resolves again");
    }
    let mut fresh: Vec<SocketAddr> = Vec::with_capacity(found.len());
    for addr in found {
        if !fresh.contains(&addr) {
            fresh.push(addr);
        }
    }
    let old = backend.addrs.load_full();
    if *old == fresh {
        return;
    }
    let lost = old.iter().any(|addr| !fresh.contains(addr));
    tracing::info!(backend = name, addrs = ?fresh, "the backend's addresses changed");
    backend.addrs.store(Arc::new(fresh));
    if lost {
        backend.drop_pooled();
    }
}

fn mark(backend: &Backend, why: &str) {
    if !backend.resolution.failing.swap(true, Relaxed) {
        tracing::warn!(
            backend = backend.settings.name,
            why,
            "the backend's name could not be resolved; its last addresses stay in use"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_are_told_from_names() {
        let addr = |text: &str| Some(text.parse::<SocketAddr>().unwrap());
        assert_eq!(literal("127.0.0.1", 80), addr("127.0.0.1:80"));
        assert_eq!(literal("::1", 9001), addr("[::1]:9001"));
        assert_eq!(literal("fe80::1%7", 80), addr("[fe80::1%7]:80"));
        for name in [
            "localhost",
            "engine.test",
            "1.2.3",
            "",
            "::1%",
            "fe80::1%../lo",
            "127.0.0.1%lo",
        ] {
            assert_eq!(literal(name, 80), None, "{name}");
        }
    }

    #[test]
    fn a_zone_may_be_an_interface_name() {
        let Some(SocketAddr::V6(addr)) = literal("fe80::1%lo", 80) else {
            panic!("the loopback interface is everywhere");
        };
        assert_ne!(addr.scope_id(), 0);
    }
}
