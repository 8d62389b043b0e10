//! What is shared with the kernel: the only module that knows BPF, and the only one with `unsafe`.
//!
//! For now that is the ledger. Its memory is the BPF map that the programs write where privileges allow, and
//! memory of the same layout where not; nobody else can tell the difference.

mod capabilities;
mod mapping;
mod object;

use std::fmt;

use prefixlb_common::ledger::LEDGER_SLOTS;

use crate::config::KernelMode;
use crate::picker::Ledger;

pub use object::Programs;

/// Where the ledger's memory is.
#[derive(Debug)]
pub enum LedgerBacking {
    /// In the BPF map `plb_ledger`.
    BpfMap,
    /// In this process only.
    Memory {
        /// Why.
        why: String,
    },
}

impl fmt::Display for LedgerBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BpfMap => f.write_str("BPF map plb_ledger"),
            Self::Memory { why } => write!(f, "memory ({why})"),
        }
    }
}

/// The ledger, in the kind of memory that `mode` asks for.
///
/// # Errors
/// With [`KernelMode::Require`], if the BPF map is not to be had: one sentence that says what is missing.
pub fn open_ledger(mode: KernelMode) -> Result<(Ledger, LedgerBacking), String> {
    if mode == KernelMode::Off {
        return Ok(in_memory("kernel = \"off\"".into()));
    }
    match Programs::load() {
        Ok(programs) => {
            let ledger = programs.ledger();
            // Programs and maps live as long as the process: flows end in any order.
            std::mem::forget(programs);
            Ok((ledger, LedgerBacking::BpfMap))
        }
        Err(why) if mode == KernelMode::Auto => Ok(in_memory(why)),
        Err(why) => Err(format!(
            "kernel = \"require\", but {why}; grant what is missing or set kernel = \"auto\""
        )),
    }
}

fn in_memory(why: String) -> (Ledger, LedgerBacking) {
    match mapping::anonymous(LEDGER_SLOTS as usize) {
        Ok(cells) => (Ledger::over(cells), LedgerBacking::Memory { why }),
        // Without 64 KiB nothing else will go far, but that is for others to say.
        Err(_) => (Ledger::in_process(), LedgerBacking::Memory { why }),
    }
}
