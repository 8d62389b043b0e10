//! From one generation to the next: what is kept, what is new, what is refused, in which slot.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use prefixlb::cli::Run;
use prefixlb::config::PolicyKind;
use prefixlb::control::Control;
use prefixlb::picker::Ledger;
use prefixlb::state::{Backend, Shared};
use prefixlb_common::ledger::{
    LEDGER_SLOTS, LedgerEntry, STATE_DRAINING, STATE_HEALTHY, STATE_PRESENT,
};

/// A process that was started with a file, without its threads.
struct World {
    file: PathBuf,
    shared: Arc<Shared>,
    control: Control,
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.file);
    }
}

const HEAD: &str = "[log]\nformat = 'off'\n[admin]\nlisten = '127.0.0.1:0'\n[[pool]]\nname = 'p'\n";

fn backends(ports: &[u16]) -> String {
    let each = ports
        .iter()
        .map(|port| format!("[[pool.backend]]\nurl = '127.0.0.1:{port}'\n"));
    HEAD.to_owned() + &each.collect::<String>()
}

impl World {
    fn new(test: &str, text: &str) -> Self {
        let file =
            std::env::temp_dir().join(format!("prefixlb-{}-{test}.toml", std::process::id()));
        std::fs::write(&file, text).expect("a file in the temporary directory");
        let flags = Run {
            config: Some(file.clone()),
            ..Run::default()
        };
        let settings = flags.settings().expect("right");
        let shared = Shared::start(settings, Ledger::in_process()).expect("room for all");
        let control = Control::new(shared.clone(), flags);
        Self {
            file,
            shared,
            control,
        }
    }

    async fn reload(&self, text: &str) -> Result<u64, String> {
        std::fs::write(&self.file, text).expect("still writable");
        self.control.reload().await
    }

    fn backend(&self, port: u16) -> Option<Arc<Backend>> {
        let snapshot = self.shared.snapshot.load();
        let mut all = snapshot.pools.iter().flat_map(|pool| &pool.backends);
        all.find(|backend| backend.settings.port == port).cloned()
    }

    fn state(&self, slot: u16) -> u32 {
        self.shared.ledger.cell(slot).state.load(Relaxed)
    }
}

#[tokio::test]
async fn what_stays_is_the_same_object_and_what_goes_is_picked_no_more() {
    let world = World::new("diff", &backends(&[1, 2]));
    let (one, two) = (
        world.backend(1).expect("there"),
        world.backend(2).expect("there"),
    );
    assert!(
        LedgerEntry::admits(world.state(one.slot)),
        "trusted at start"
    );
    world
        .shared
        .ledger
        .cell(one.slot)
        .state
        .fetch_or(STATE_DRAINING, Relaxed);
    let pool = world.shared.snapshot.load().pools[0].clone();

    assert_eq!(world.reload(&backends(&[1, 3])).await, Ok(2));

    assert!(Arc::ptr_eq(&one, &world.backend(1).expect("kept")));
    assert_ne!(
        world.state(one.slot) & STATE_DRAINING,
        0,
        "an operator's drain outlives a reload"
    );
    let now = world.shared.snapshot.load().pools[0].clone();
    assert!(Arc::ptr_eq(&pool.picker, &now.picker) && Arc::ptr_eq(&pool.metrics, &now.metrics));
    assert!(Arc::ptr_eq(&pool.waiters, &now.waiters));
    assert!(world.backend(2).is_none());
    assert_eq!(world.state(two.slot) & (STATE_PRESENT | STATE_HEALTHY), 0);
    let three = world.backend(3).expect("new");
    assert_eq!(
        world.state(three.slot),
        STATE_PRESENT,
        "its first probe is still to come"
    );
    assert_eq!(world.shared.metrics.reloads.get(), 1);
}

#[tokio::test]
async fn a_new_pool_is_trusted_at_once_for_nobody_else_could_serve() {
    let world = World::new("newpool", &backends(&[1]));
    let text = backends(&[1]).replace("name = 'p'", "name = 'q'");
    world.reload(&text).await.expect("right");
    let slot = world.backend(1).expect("there").slot;
    assert!(LedgerEntry::admits(world.state(slot)));
}

#[tokio::test]
async fn changed_settings_reach_the_ledger_and_the_policy() {
    let world = World::new("words", &backends(&[1]));
    let slot = world.backend(1).expect("there").slot;
    let cell = world.shared.ledger.cell(slot);
    assert_eq!(
        (cell.cap.load(Relaxed), cell.tau.load(Relaxed)),
        (0, 286_720)
    );
    let text = backends(&[1]) + "max_active = 7\n[pool.policy]\ntau = 5\nkind = 'least-load'\n";
    world.reload(&text).await.expect("right");
    assert_eq!((cell.cap.load(Relaxed), cell.tau.load(Relaxed)), (7, 5));
    assert_eq!(world.backend(1).expect("there").slot, slot);
    let snapshot = world.shared.snapshot.load();
    assert_eq!(
        snapshot.pools[0].settings.policy.kind,
        PolicyKind::LeastLoad
    );
}

#[tokio::test]
async fn a_bad_file_leaves_the_old_one_in_force() {
    let world = World::new("bad", &backends(&[1]));
    let before = world.shared.snapshot.load_full();
    let said = world.reload("workers = 'x'").await.expect_err("refused");
    assert!(said.contains(".toml:1:11: workers: invalid type"), "{said}");
    std::fs::remove_file(&world.file).expect("there");
    let said = world.control.reload().await.expect_err("refused");
    assert!(said.contains("cannot be read"), "{said}");
    assert!(Arc::ptr_eq(&before, &world.shared.snapshot.load_full()));
    assert_eq!(
        (
            world.shared.metrics.reloads.get(),
            world.shared.metrics.reloads_refused.get()
        ),
        (0, 2)
    );
}

#[tokio::test]
async fn what_cannot_change_while_running_keeps_its_value() {
    let world = World::new("fixed", &backends(&[1]));
    let text = format!(
        "workers = 77\nlisten = '127.0.0.1:9'\n{}",
        backends(&[1, 2])
    );
    world.reload(&text).await.expect("the rest is taken");
    let snapshot = world.shared.snapshot.load();
    assert_ne!(snapshot.settings.workers, 77);
    assert_eq!(snapshot.settings.listen[0].port(), 8080);
    assert_eq!(snapshot.pools[0].backends.len(), 2);
}

#[tokio::test]
async fn a_slot_is_given_on_only_when_nothing_knows_or_owes_it() {
    let full: Vec<u16> = (1..=LEDGER_SLOTS as u16).collect();
    let world = World::new("slots", &backends(&full));
    let gone = world.backend(1).expect("there");
    let slot = gone.slot;
    let charge = world.shared.ledger.try_charge(slot, 100).expect("no cap");
    let generation = world.shared.ledger.cell(slot).generation.load(Relaxed);
    let without = backends(&full[1..]);
    world.reload(&without).await.expect("fewer");

    let other = without.clone() + "[[pool.backend]]\nurl = '127.0.0.1:2000'\n";
    let said = world.reload(&other).await.expect_err("a flow knows it");
    assert!(said.contains("still running"), "{said}");
    drop(gone);
    world.reload(&other).await.expect_err("a flow owes it");
    assert_eq!(
        world.shared.snapshot.load().generation,
        2,
        "refusals leave no trace"
    );
    drop(charge);
    world.reload(&other).await.expect("free now");
    let come = world.backend(2000).expect("there");
    assert_eq!(come.slot, slot);
    assert_eq!(
        world.shared.ledger.cell(slot).generation.load(Relaxed),
        generation + 1
    );
}

#[tokio::test]
async fn fifty_reloads_neither_leak_slots_nor_disturb_who_stays() {
    let world = World::new("fifty", &backends(&[1, 2]));
    let stays = world.backend(1).expect("there");
    for round in 0..50 {
        let port = 100 + round;
        world.reload(&backends(&[1, port])).await.expect("right");
        assert!(Arc::ptr_eq(&stays, &world.backend(1).expect("kept")));
    }
    let used = (0..LEDGER_SLOTS as u16)
        .filter(|slot| world.state(*slot) != 0)
        .count();
    assert_eq!(used, 2);
}

#[tokio::test]
async fn a_zone_id_is_for_connecting_and_is_not_sent() {
    let text = HEAD.to_owned() + "[[pool.backend]]\nurl = 'http://[fe80::1%25lo]:7'\n";
    let world = World::new("zone", &text);
    let backend = world.backend(7).expect("there");
    assert_eq!(&*backend.settings.name, "[fe80::1%lo]:7");
    assert_eq!(&*backend.settings.host, "fe80::1%lo");
    assert_eq!(&*backend.authority, "[fe80::1]:7");
}
