//! What is shared with the kernel.

use std::fmt;

use crate::config::KernelMode;
use crate::picker::Ledger;

/// Where the ledger's memory is.
#[derive(Debug)]
pub enum LedgerBacking {
    /// In this process only.
    SharedMemory {
        /// Why.
        why: String,
    },
}

impl fmt::Display for LedgerBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::SharedMemory { why } = self;
        write!(f, "memory ({why})")
    }
}

/// The ledger.
pub fn open_ledger(mode: KernelMode) -> Result<(Ledger, LedgerBacking), String> {
    let _ = mode;
    Ok((
        Ledger::in_process(),
        LedgerBacking::SharedMemory {
            why: "not yet".into(),
        },
    ))
}
