//! The compiled programs: loaded from the object that ships with the source, and tried before they are trusted.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;

use aya::maps::Map;
use aya::programs::{TestRun, TestRunOptions, Xdp};
use aya::{Ebpf, EbpfLoader};
use prefixlb_common::ledger::LEDGER_SLOTS;
use prefixlb_common::ledger_op::{LedgerOp, OP_CHARGE, OP_END, OP_FIRST_BYTE};

use super::mapping;
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
        let mut bpf = EbpfLoader::new()
            .btf(None) // nothing here is relocated by the kernel's types, and reading them takes its time
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
        let mut options = TestRunOptions::default();
        options.data_in = Some(&frame);
        options.repeat = times;
        let run = program
            .test_run(options)
            .map_err(|error| format!("the kernel cannot run plb_ledger_op ({})", cause(&error)))?;
        Ok(run.return_value == XDP_PASS)
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
        Some(libc::EPERM) => "not permitted: CAP_BPF and CAP_NET_ADMIN are needed".into(),
        Some(libc::ENOSYS) => "this kernel has no BPF".into(),
        _ => inner.to_string(),
    }
}
