//! Checks that concern the settings as a whole, wherever they came from: file, flags or both.

use std::net::{IpAddr, SocketAddr};

use prefixlb_common::ledger::LEDGER_SLOTS;

use super::place::Step;
use super::settings::{PoolSettings, Settings};

/// What is wrong with the whole, and which setting to look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub(super) path: Vec<Step<'static>>,
    /// One sentence.
    pub message: String,
}

fn fault<const N: usize>(path: [Step<'static>; N], message: String) -> Result<(), Fault> {
    let path = path.to_vec();
    Err(Fault { path, message })
}

/// Judges the whole.
pub fn check(settings: &Settings) -> Result<(), Fault> {
    addresses(settings)?;
    pools(&settings.pools)
}

const ADMIN: [Step<'static>; 2] = [Step::Key("admin"), Step::Key("listen")];

fn addresses(settings: &Settings) -> Result<(), Fault> {
    let listen = &settings.listen;
    if listen.is_empty() {
        return fault(
            [Step::Key("listen")],
            "listen is empty: name at least one address".into(),
        );
    }
    for (index, address) in listen.iter().enumerate() {
        if let Some(other) = listen[..index]
            .iter()
            .find(|other| clash(**other, *address))
        {
            return fault(
                [Step::Key("listen"), Step::Item(index)],
                format!("listen: {address} clashes with {other}: choose another port"),
            );
        }
    }
    let admin = &settings.admin;
    if let Some(other) = listen.iter().find(|other| clash(**other, admin.listen)) {
        return fault(
            ADMIN,
            format!(
                "admin.listen {} clashes with listen {other}: choose another port",
                admin.listen
            ),
        );
    }
    if !admin.listen.ip().is_loopback() && admin.token.is_none() {
        return fault(
            ADMIN,
            format!(
                "admin.listen {} is not a loopback address: set admin.token, or listen on 127.0.0.1",
                admin.listen
            ),
        );
    }
    Ok(())
}

/// Whether two listeners would get in each other's way. Port 0 is any free port and never does; `[::]` takes
/// IPv4 connections too.
fn clash(a: SocketAddr, b: SocketAddr) -> bool {
    let covers =
        |wide: IpAddr, other: IpAddr| wide.is_unspecified() && (wide.is_ipv6() || other.is_ipv4());
    let (x, y) = (a.ip(), b.ip());
    a.port() == b.port() && a.port() != 0 && (a == b || covers(x, y) || covers(y, x))
}

fn pools(pools: &[PoolSettings]) -> Result<(), Fault> {
    if pools.is_empty() {
        return fault(
            [Step::Key("pool")],
            "no pool is configured: add a [[pool]] with a [[pool.backend]]".into(),
        );
    }
    // Pools are tried in order: whatever stands after one that takes everything is never asked.
    let takes_all = |pool: &PoolSettings| pool.models.is_empty() && pool.paths.is_empty();
    if let Some(index) = pools[..pools.len() - 1].iter().position(takes_all) {
        return fault(
            [Step::Key("pool"), Step::Item(index + 1), Step::Key("name")],
            format!(
                "pool {} is never reached: pool {} before it serves any model and path, move it to the end",
                pools[index + 1].name,
                pools[index].name
            ),
        );
    }
    let wanted: usize = pools.iter().map(|pool| pool.backends.len()).sum();
    if wanted > LEDGER_SLOTS as usize {
        return fault(
            [Step::Key("pool")],
            format!(
                "{wanted} backends are configured, and there is room for {LEDGER_SLOTS}: remove some"
            ),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_clash_where_the_kernel_says_so() {
        for (a, b, clashes) in [
            ("127.0.0.1:80", "127.0.0.1:80", true),
            ("127.0.0.1:80", "127.0.0.1:81", false),
            ("127.0.0.1:80", "127.0.0.2:80", false),
            ("0.0.0.0:80", "127.0.0.1:80", true),
            ("127.0.0.1:80", "0.0.0.0:80", true),
            ("0.0.0.0:80", "[::1]:80", false),
            ("[::]:80", "127.0.0.1:80", true),
            ("[::1]:80", "[::]:80", true),
            ("127.0.0.1:0", "127.0.0.1:0", false),
        ] {
            let parse = |text: &str| text.parse().expect("an address");
            assert_eq!(clash(parse(a), parse(b)), clashes, "{a} {b}");
        }
    }
}
