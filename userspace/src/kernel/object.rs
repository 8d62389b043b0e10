//! The compiled programs: loaded from the object that ships with the source, and tried before they are trusted.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;

use aya::maps::{Array, Map};
use aya::programs::{TestRun, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader};
use prefixlb_common::ledger::{LEDGER_LAYOUT, LEDGER_SLOTS};
use prefixlb_common::ledger_op::{LedgerOp, OP_CHARGE, OP_END, OP_FIRST_BYTE, OP_HELLO};

use super::{capabilities, mapping};
use crate::picker::Ledger;

/// Portable BPF bytecode, committed beside a digest of its sources; see `build.rs`.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/prefixlb.bpf.o"));

/// Shortest frame that the kernel runs an XDP program on.
const FRAME_BYTES: usize = 64;

/// The programs and maps of one process.
#[derive(Debug)]
pub struct Programs {
    bpf: Ebpf,
    ledger: Ledger,
}

impl Programs {
    /// Loads the programs, maps the ledger and checks that both sides write the same words.
    ///
    /// # Errors
    /// One clause that says what is missing.
    pub fn load() -> Result<Self, String> {
        capabilities::check()?;
        let mut bpf = EbpfLoader::new()
            // Nothing here is relocated by the kernel's types. aya 0.14 has read them by now all the same: most of
            // the 20 to 30 ms that this function takes.
            .btf(None)
            .load(OBJECT)
            .map_err(|error| format!("BPF maps cannot be created ({})", cause(&error)))?;
        let cells = match bpf.map("plb_ledger") {
            Some(Map::Array(map)) => mapping::of_map(map.fd().as_fd(), LEDGER_SLOTS as usize)
                .map_err(|error| format!("the BPF map plb_ledger cannot be mapped ({error})"))?,
            _ => return Err("the BPF object has no array map plb_ledger".into()),
        };
        let program: &mut Xdp = bpf
            .program_mut("plb_ledger_op")
            .and_then(|program| program.try_into().ok())
            .ok_or("the BPF object has no program plb_ledger_op")?;
        program
            .load()
            .map_err(|error| format!("BPF programs cannot be loaded ({})", cause(&error)))?;
        let programs = Self {
            bpf,
            ledger: Ledger::over(cells),
        };
        // The order matters: words are compared only once it is certain that both sides mean the same ones.
        programs.check_layout()?;
        programs.self_test()?;
        Ok(programs)
    }

    /// The ledger in the map's memory.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        self.ledger
    }

    /// Each program's name and the instructions that the verifier walked, where the kernel tells.
    #[must_use]
    pub fn verified_instructions(&self) -> Vec<(String, u32)> {
        let told = |(name, program): (&str, &aya::programs::Program)| {
            Some((
                name.to_owned(),
                program.info().ok()?.verified_instruction_count()?,
            ))
        };
        self.bpf.programs().filter_map(told).collect()
    }

    /// Lets the kernel apply `op`, `times` over; whether it took it.
    pub fn apply(&self, op: LedgerOp, times: u32) -> Result<bool, String> {
        const XDP_PASS: u32 = 2;
        let program: &Xdp = self
            .bpf
            .program("plb_ledger_op")
            .and_then(|program| program.try_into().ok())
            .ok_or("the BPF object has no program plb_ledger_op")?;
        let mut frame = [0; FRAME_BYTES];
        frame[..16].copy_from_slice(&op.to_bytes());
        let options = TestRunOptions {
            data_in: Some(&frame),
            repeat: times,
            ..TestRunOptions::default()
        };
        let run = program
            .test_run(options)
            .map_err(|error| format!("the kernel cannot run plb_ledger_op ({})", cause(&error)))?;
        Ok(run.return_value == XDP_PASS)
    }

    /// The programs must have been compiled with the layout that this process was.
    fn check_layout(&self) -> Result<(), String> {
        let hello = LedgerOp {
            op: OP_HELLO,
            slot: 0,
            tokens: 0,
        };
        let noted = self.apply(hello, 1)?;
        let theirs = self
            .bpf
            .map("plb_meta")
            .and_then(|map| Array::<_, [u32; 4]>::try_from(map).ok())
            .and_then(|meta| meta.get(&0, 0).ok())
            .filter(|_| noted)
            .ok_or("the BPF programs do not say which ledger layout they have")?;
        compare_layouts(theirs)
    }

    /// The kernel's writes must appear in the mapping, and ours to the kernel.
    fn self_test(&self) -> Result<(), String> {
        let slot = LEDGER_SLOTS - 1;
        let cell = self.ledger.cell(slot as u16);
        let op = |op| LedgerOp {
            op,
            slot,
            tokens: 3,
        };
        cell.prefill_tokens.store(4, Relaxed);
        let charged = self.apply(op(OP_CHARGE), 1)?;
        let seen = cell.prefill_tokens.load(Relaxed);
        let back = self.apply(op(OP_FIRST_BYTE), 1)? && self.apply(op(OP_END), 1)?;
        let left = (cell.prefill_tokens.load(Relaxed), cell.active.load(Relaxed));
        cell.prefill_tokens.store(0, Relaxed);
        cell.charged.store(0, Relaxed);
        if charged && seen == 7 && back && left == (4, 0) {
            Ok(())
        } else {
            Err("kernel and user space do not see each other's writes in the ledger".into())
        }
    }
}

fn compare_layouts(theirs: [u32; 4]) -> Result<(), String> {
    if theirs == LEDGER_LAYOUT {
        return Ok(());
    }
    let told = |[version, slots, bytes, _]: [u32; 4]| {
        format!("version {version} with {slots} entries of {bytes} bytes")
    };
    Err(format!(
        "the BPF programs have ledger layout {}, this prefixlb has {}",
        told(theirs),
        told(LEDGER_LAYOUT)
    ))
}

/// The innermost cause: what the kernel said, and what that usually means.
fn cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut inner = error;
    while let Some(source) = inner.source() {
        inner = source;
    }
    let os = inner
        .downcast_ref::<std::io::Error>()
        .and_then(std::io::Error::raw_os_error);
    match os {
        // The capabilities are there, or `capabilities` would have said so; but those of a user namespace do not
        // count, and seccomp or a security module may forbid the call.
        Some(libc::EPERM) => "not permitted by the container or a security module".into(),
        Some(libc::ENOSYS) => "this kernel has no BPF".into(),
        _ => inner.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_foreign_layout_is_refused_and_both_are_told() {
        assert_eq!(compare_layouts(LEDGER_LAYOUT), Ok(()));
        let [version, slots, bytes, _] = LEDGER_LAYOUT;
        let refused = compare_layouts([version + 1, slots, bytes, 0]).expect_err("another version");
        assert!(
            refused.contains(&format!("version {}", version + 1)),
            "{refused}"
        );
        assert!(
            refused.contains(&format!("version {version} ")),
            "{refused}"
        );
        assert!(compare_layouts([version, slots, 128, 0]).is_err());
    }
}
