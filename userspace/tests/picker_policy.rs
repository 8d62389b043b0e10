//! The policies: which backend, and why, over a ledger that the test writes itself.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;

use prefixlb::config::{
    BackendSettings, GateKind, HashOn, KeySettings, PolicyKind, PolicySettings, PoolSettings,
    Scorer,
};
use prefixlb::picker::{
    Charge, EngineSignal, Ledger, Member, NoPick, Pick, PickReason, PickRequest, Picker, PrefixKey,
    SignalTable,
};
use prefixlb_common::gate::mix;
use prefixlb_common::ledger::{
    STATE_DRAINING, STATE_EJECTED, STATE_HEALTHY, STATE_PRESENT, WEIGHT_ONE,
};

/// A pool of backends named b0, b1, … and what picks from it depend on.
struct Bench {
    picker: Picker,
    members: Vec<Member>,
    ledger: Ledger,
    signals: SignalTable,
    random: u64,
}

const TAU: u64 = 10_000;

fn policy(kind: PolicyKind) -> PolicySettings {
    PolicySettings {
        kind,
        tau: Some(TAU),
        ..PolicySettings::default()
    }
}

impl Bench {
    fn new(backends: u16, policy: PolicySettings) -> Self {
        let settings = BackendSettings {
            name: "b".into(),
            host: "b".into(),
            port: 1,
            weight: 1.0,
            max_active: None,
        };
        let mut pool = PoolSettings::new("p", vec![settings]);
        let ledger = Ledger::in_process();
        for slot in 0..backends {
            let cell = ledger.cell(slot);
            cell.state.store(STATE_PRESENT | STATE_HEALTHY, Relaxed);
            cell.weight.store(WEIGHT_ONE, Relaxed);
            cell.tau.store(policy.effective_tau(), Relaxed);
        }
        pool.policy = policy;
        let picker = Picker::new(&pool, &KeySettings::default());
        let members: Vec<Member> = (0..backends).map(member).collect();
        picker.set_members(&members);
        Self {
            picker,
            members,
            ledger,
            signals: SignalTable::default(),
            random: 1,
        }
    }

    fn try_pick(
        &mut self,
        key: Option<&PrefixKey>,
        session: Option<&[u8]>,
    ) -> Result<Pick, NoPick> {
        self.random = mix(self.random, 1);
        let request = PickRequest {
            key,
            session,
            prompt_tokens: 1000,
            tried: &[],
            now_ms: 0,
            random: self.random,
        };
        self.picker
            .pick(&request, &self.members, &self.ledger, &self.signals)
    }

    fn pick(&mut self, key: &PrefixKey) -> Pick {
        self.try_pick(Some(key), None).expect("a backend")
    }

    /// A pick as the proxy makes it: charged and learnt.
    fn send(&mut self, key: &PrefixKey) -> (Pick, Charge) {
        let pick = self.pick(key);
        let charge = self
            .ledger
            .try_charge(pick.slot, pick.uncached_tokens)
            .expect("room");
        self.picker.learn(key, pick.slot);
        (pick, charge)
    }

    fn load(&self, slot: u16, tokens: u64) {
        self.ledger.cell(slot).prefill_tokens.store(tokens, Relaxed);
    }

    fn set_state(&self, slot: u16, state: u32) {
        self.ledger.cell(slot).state.store(state, Relaxed);
    }
}

fn member(slot: u16) -> Member {
    Member {
        slot,
        identity: mix(u64::from(slot), 99),
        weight: WEIGHT_ONE,
    }
}

/// A prefix of `shared` blocks named by `prefix`, then `own` blocks named by `tail`.
fn key(prefix: u64, shared: u64, tail: u64, own: u64) -> PrefixKey {
    let mut last = prefix;
    let blocks = (0..shared)
        .map(|i| (prefix, i))
        .chain((0..own).map(|i| (tail, 1000 + i)));
    PrefixKey::from_chain(
        blocks
            .map(|(name, i)| {
                last = mix(last, mix(name, i));
                last
            })
            .collect(),
    )
}

#[test]
fn a06_idle_backends_all_get_some_of_many_distinct_prompts() {
    let mut bench = Bench::new(4, policy(PolicyKind::Sticky));
    let mut count = [0; 4];
    for prompt in 0..400 {
        let (pick, charge) = bench.send(&key(prompt, 10, 0, 0));
        assert_eq!(pick.reason, PickReason::Cold);
        count[usize::from(pick.slot)] += 1;
        drop(charge);
    }
    assert!(count.iter().all(|n| (70..130).contains(n)), "{count:?}");
}

#[test]
fn a_few_large_prefixes_do_not_share_one_cache_while_others_are_empty() {
    // By rendezvous alone, four prefixes on four backends put three or four together in 20 of 100 cases.
    let mut crowded = 0;
    for seed in 0..200 {
        let mut bench = Bench::new(4, policy(PolicyKind::Sticky));
        let mut count = [0; 4];
        for prefix in 0..4 {
            let (pick, charge) = bench.send(&key(seed * 100 + prefix, 60, 0, 0));
            count[usize::from(pick.slot)] += 1;
            drop(charge);
        }
        crowded += usize::from(count.iter().any(|n| *n > 2));
    }
    assert!(crowded <= 2, "{crowded} of 200");
}

#[test]
fn a06_a_full_backend_gets_none() {
    let mut bench = Bench::new(4, policy(PolicyKind::Sticky));
    bench.ledger.cell(0).cap.store(8, Relaxed);
    bench.ledger.cell(0).active.store(8, Relaxed);
    for prompt in 0..40 {
        assert_ne!(bench.send(&key(prompt, 10, 0, 0)).0.slot, 0);
    }
}

#[test]
fn a07_a_burst_with_one_new_prefix_lands_on_one_backend() {
    for burst in 0..50 {
        let mut bench = Bench::new(4, policy(PolicyKind::Sticky));
        let sent: Vec<_> = (0..8)
            .map(|tail| bench.send(&key(burst, 30, tail, 2)))
            .collect();
        let first = sent[0].0.slot;
        assert!(sent.iter().all(|(pick, _)| pick.slot == first), "{burst}");
        assert!(
            sent[1..]
                .iter()
                .all(|(pick, _)| pick.reason == PickReason::Warm)
        );
    }
}

#[test]
fn a08_a_prefix_fills_its_owner_then_always_the_same_second_and_comes_back() {
    let mut bench = Bench::new(4, policy(PolicyKind::Sticky));
    for slot in 0..4 {
        bench.ledger.cell(slot).cap.store(4, Relaxed);
    }
    let mut order = Vec::new();
    for _ in 0..3 {
        let mut held = Vec::new();
        let mut picks = Vec::new();
        for _ in 0..12 {
            let (pick, mut charge) = bench.send(&key(7, 30, 0, 0));
            charge.first_byte(); // decoding: it holds its place but no prefill
            picks.push(pick.slot);
            held.push(charge);
        }
        for group in picks.chunks(4) {
            assert!(group.iter().all(|slot| *slot == group[0]), "{picks:?}");
        }
        order.push((picks[0], picks[4], picks[8]));
        drop(held);
    }
    assert!(order.iter().all(|o| *o == order[0]), "{order:?}");
    for slot in 0..4 {
        bench.ledger.cell(slot).active.store(4, Relaxed);
    }
    let full = bench.try_pick(Some(&key(7, 30, 0, 0)), None);
    assert_eq!(full, Err(NoPick::AllFull));
}

#[test]
fn the_gap_gate_closes_at_tau_and_reopens_with_hysteresis() {
    let mut bench = Bench::new(3, policy(PolicyKind::Sticky));
    let prefix = key(1, 30, 0, 0);
    let owner = bench.send(&prefix).0.slot;
    bench.load(owner, TAU);
    assert_eq!(bench.pick(&prefix).slot, owner, "at tau it still holds");
    bench.load(owner, TAU + 1);
    let spilt = bench.pick(&prefix);
    assert_eq!(spilt.reason, PickReason::Spill);
    assert_ne!(spilt.slot, owner);
    assert_eq!(
        bench.pick(&prefix).slot,
        spilt.slot,
        "the same second choice"
    );
    bench.load(owner, TAU - 1);
    assert_ne!(bench.pick(&prefix).slot, owner, "closed until well below");
    bench.load(owner, TAU * 79 / 100);
    let back = bench.pick(&prefix);
    assert_eq!((back.slot, back.reason), (owner, PickReason::Warm));
}

#[test]
fn when_all_are_busy_gap_stays_and_absolute_spills() {
    for (gate, reason) in [
        (GateKind::Gap, PickReason::Warm),
        (GateKind::Absolute, PickReason::Spill),
    ] {
        let mut bench = Bench::new(
            3,
            PolicySettings {
                gate,
                ..policy(PolicyKind::Sticky)
            },
        );
        let prefix = key(1, 30, 0, 0);
        let owner = bench.send(&prefix).0.slot;
        for slot in 0..3 {
            bench.load(slot, 5 * TAU);
        }
        bench.load((owner + 1) % 3, 5 * TAU - 5_000);
        assert_eq!(bench.pick(&prefix).reason, reason, "{gate:?}");
    }
}

#[test]
fn a_match_below_the_threshold_is_not_warm_but_counts_as_less_work() {
    let mut bench = Bench::new(4, policy(PolicyKind::Sticky));
    let owner = bench.send(&key(1, 20, 0, 0)).0.slot;
    let half = bench.pick(&key(1, 20, 5, 20));
    assert_eq!(
        (half.slot, half.reason, half.matched_tokens),
        (owner, PickReason::Cold, 500)
    );
    let most = bench.pick(&key(1, 20, 5, 5));
    assert_eq!((most.slot, most.reason), (owner, PickReason::Warm));
}

#[test]
fn active_requests_are_the_load_where_decode_is_what_counts() {
    let mut bench = Bench::new(
        2,
        PolicySettings {
            scorer: Scorer::ActiveRequests,
            tau: Some(2),
            ..policy(PolicyKind::Sticky)
        },
    );
    let prefix = key(1, 30, 0, 0);
    let mut held = Vec::new();
    let picks: Vec<u16> = (0..6)
        .map(|_| {
            let (pick, charge) = bench.send(&prefix);
            held.push(charge);
            pick.slot
        })
        .collect();
    assert_eq!(picks[..3], [picks[0]; 3]);
    assert!(picks.iter().any(|slot| *slot != picks[0]), "{picks:?}");
}

#[test]
fn always_sticky_never_spills() {
    let mut bench = Bench::new(4, policy(PolicyKind::AlwaysSticky));
    let prefix = key(1, 30, 0, 0);
    let owner = bench.send(&prefix).0.slot;
    bench.load(owner, u64::MAX / 4);
    assert_eq!(bench.pick(&prefix).slot, owner);
}

#[test]
fn weight_is_share() {
    for kind in [
        PolicyKind::RoundRobin,
        PolicyKind::LeastLoad,
        PolicyKind::Sticky,
    ] {
        let mut bench = Bench::new(3, policy(kind));
        bench.ledger.cell(2).weight.store(WEIGHT_ONE * 2, Relaxed);
        let mut count = [0u32; 3];
        let mut held = Vec::new();
        for prompt in 0..400 {
            let (pick, charge) = bench.send(&key(prompt, 10, 0, 0));
            count[usize::from(pick.slot)] += 1;
            held.push(charge);
        }
        assert!((180..220).contains(&count[2]), "{kind:?}: {count:?}");
    }
}

#[test]
fn round_robin_takes_turns() {
    let mut bench = Bench::new(4, policy(PolicyKind::RoundRobin));
    let turns: Vec<u16> = (0..8).map(|_| bench.pick(&key(1, 9, 0, 0)).slot).collect();
    assert_eq!(turns[..4], turns[4..]);
    assert_eq!(turns.iter().sum::<u16>(), 12);
}

#[test]
fn least_load_breaks_ties_by_chance_not_by_place() {
    let mut bench = Bench::new(4, policy(PolicyKind::LeastLoad));
    bench.load(0, 5);
    let mut count = [0; 4];
    for _ in 0..300 {
        count[usize::from(bench.try_pick(None, None).expect("one").slot)] += 1;
    }
    assert_eq!(count[0], 0);
    assert!(count[1..].iter().all(|n| *n > 60), "{count:?}");
}

#[test]
fn power_of_two_avoids_the_loaded_one() {
    let mut bench = Bench::new(4, policy(PolicyKind::PowerOfTwo));
    bench.load(1, 100);
    let mut count = [0; 4];
    for _ in 0..400 {
        count[usize::from(bench.try_pick(None, None).expect("one").slot)] += 1;
    }
    assert_eq!(count[1], 0, "it loses every pair: {count:?}");
    assert!(count[0] > 60 && count[2] > 60 && count[3] > 60, "{count:?}");
    let mut alone = Bench::new(1, policy(PolicyKind::PowerOfTwo));
    assert_eq!(alone.try_pick(None, None).expect("one").slot, 0);
}

#[test]
fn a09_session_ids_are_equal_or_they_are_not() {
    let mut bench = Bench::new(4, policy(PolicyKind::Session));
    let mut owners = HashMap::new();
    let ids: Vec<String> = (0..40).map(|i| format!("session-{i}")).collect();
    for _ in 0..5 {
        for id in &ids {
            let pick = bench
                .try_pick(None, Some(id.as_bytes()))
                .expect("a backend");
            assert_eq!(pick.reason, PickReason::Session);
            assert_eq!(*owners.entry(id).or_insert(pick.slot), pick.slot);
        }
    }
    for slot in 0..4 {
        assert!(owners.values().filter(|owner| **owner == slot).count() >= 3);
    }
    let prefix = key(1, 20, 0, 0);
    let owner = bench.send(&prefix).0;
    assert_eq!(owner.reason, PickReason::Cold, "no id: by prefix");
    assert_eq!(bench.pick(&prefix).slot, owner.slot);
}

#[test]
fn a10_few_keys_move_and_all_come_home() {
    let mut bench = Bench::new(
        10,
        PolicySettings {
            hash_on: HashOn::Key,
            ..policy(PolicyKind::ConsistentHash)
        },
    );
    let keys: Vec<PrefixKey> = (0..10_000).map(|i| key(i, 1, 0, 0)).collect();
    let owners =
        |bench: &mut Bench| -> Vec<u16> { keys.iter().map(|key| bench.pick(key).slot).collect() };
    let home = owners(&mut bench);
    // Unhealthy: only its own keys go elsewhere, and to all of the others.
    bench.set_state(4, STATE_PRESENT);
    let away = owners(&mut bench);
    assert!(home.iter().zip(&away).all(|(h, a)| h == a || *h == 4));
    assert!((0..10u16).filter(|s| *s != 4).all(|s| {
        home.iter()
            .zip(&away)
            .filter(|(h, a)| **h == 4 && **a == s)
            .count()
            > 40
    }));
    bench.set_state(4, STATE_PRESENT | STATE_HEALTHY);
    assert_eq!(owners(&mut bench), home);
    // Removed: about a tenth moves; back again, in another order: all are home.
    let all = bench.members.clone();
    bench.members.remove(4);
    bench.picker.set_members(&bench.members.clone());
    let removed = owners(&mut bench);
    let moved = home.iter().zip(&removed).filter(|(a, b)| a != b).count();
    assert!((900..1500).contains(&moved), "{moved}");
    bench.members = all.into_iter().rev().collect();
    bench.picker.set_members(&bench.members.clone());
    assert_eq!(owners(&mut bench), home);
}

#[test]
fn weighted_blends_match_queue_and_cache() {
    let weighted = |weights| PolicySettings {
        weights,
        ..policy(PolicyKind::Weighted)
    };
    let mut bench = Bench::new(2, weighted([3.0, 2.0, 2.0]));
    let prefix = key(1, 20, 0, 0);
    let owner = bench.send(&prefix).0.slot;
    assert_eq!(bench.pick(&prefix).slot, owner);
    let signal = |waiting, kv_use| EngineSignal {
        waiting: Some(waiting),
        running: None,
        kv_use: Some(kv_use),
    };
    bench.signals.store(owner, signal(20, 0.9), 1000);
    bench.signals.store(1 - owner, signal(0, 0.1), 1000);
    assert_ne!(bench.pick(&prefix).slot, owner, "3 < 2 + 2 × 0.8");
    bench.picker.set_policy(weighted([3.0, 5.0, 0.0]));
    assert_ne!(bench.pick(&prefix).slot, owner);
    bench.picker.set_policy(weighted([9.0, 2.0, 2.0]));
    assert_eq!(bench.pick(&prefix).slot, owner);
    bench.signals.clear(owner);
    bench.signals.clear(1 - owner);
    bench.picker.set_policy(weighted([3.0, 2.0, 2.0]));
    assert_eq!(
        bench.pick(&prefix).slot,
        owner,
        "unknown signals decide nothing"
    );
}

#[test]
fn states_are_obeyed_and_panic_uses_what_is_there() {
    let mut bench = Bench::new(3, policy(PolicyKind::Sticky));
    bench.set_state(0, STATE_PRESENT | STATE_HEALTHY | STATE_DRAINING);
    bench.set_state(1, STATE_PRESENT | STATE_HEALTHY | STATE_EJECTED);
    for prompt in 0..20 {
        let pick = bench.pick(&key(prompt, 5, 0, 0));
        assert_eq!((pick.slot, pick.panic), (2, false));
    }
    bench.set_state(2, STATE_PRESENT);
    let mut used = [false; 3];
    for prompt in 0..40 {
        let pick = bench.pick(&key(prompt, 5, 0, 0));
        assert!(pick.panic);
        used[usize::from(pick.slot)] = true;
    }
    assert_eq!(used, [false, true, true], "never one that drains");
    bench.picker.set_panic(false);
    let none = bench.try_pick(None, None);
    assert_eq!(none, Err(NoPick::NoneAlive));
}

#[test]
fn a_removed_backend_is_forgotten_even_if_its_slot_comes_back() {
    let mut bench = Bench::new(2, policy(PolicyKind::Sticky));
    let prefix = key(1, 20, 0, 0);
    let owner = bench.send(&prefix).0.slot;
    let stay: Vec<Member> = vec![member(1 - owner)];
    bench.picker.set_members(&stay);
    bench.picker.set_members(&bench.members.clone());
    assert_eq!(bench.picker.index().held(owner), 0);
    assert_eq!(bench.pick(&prefix).reason, PickReason::Cold);
}

#[test]
fn a_header_key_is_a_chain_of_one() {
    let mut bench = Bench::new(4, policy(PolicyKind::Sticky));
    let mut header = PrefixKey::default();
    assert!(prefixlb::picker::key::from_header(b"2a", &mut header));
    let (first, _charge) = bench.send(&header);
    let again = bench.pick(&header);
    assert_eq!((again.slot, again.reason), (first.slot, PickReason::Warm));
    assert_eq!(again.matched_tokens, 1000);
}

#[test]
fn a_policy_changes_at_run_time_and_the_index_stays() {
    let mut bench = Bench::new(4, policy(PolicyKind::Sticky));
    let prefix = key(1, 20, 0, 0);
    let owner = bench.send(&prefix).0.slot;
    bench.picker.set_policy(policy(PolicyKind::RoundRobin));
    assert_eq!(bench.pick(&prefix).reason, PickReason::Load);
    bench.picker.set_policy(policy(PolicyKind::Sticky));
    let back = bench.pick(&prefix);
    assert_eq!((back.slot, back.reason), (owner, PickReason::Warm));
}
