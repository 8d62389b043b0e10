//! A change of the ledger as a message: what a start-up check sends through a program.

/// Say in `plb_meta` which layout you were compiled with; slot and tokens mean nothing.
pub const OP_HELLO: u32 = 0;
/// A request was picked; refused if that would go over the backend's cap.
pub const OP_CHARGE: u32 = 1;
/// Its first body byte came.
pub const OP_FIRST_BYTE: u32 = 2;
/// It ended.
pub const OP_END: u32 = 3;

/// One change of one backend's load.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LedgerOp {
    /// One of `OP_*`.
    pub op: u32,
    /// The ledger slot.
    pub slot: u32,
    /// Uncached prompt tokens of the request.
    pub tokens: u64,
}

impl LedgerOp {
    /// As the program reads it. Both run on the same machine, so its own byte order is the right one.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        let words = [self.op.to_ne_bytes(), self.slot.to_ne_bytes()];
        let tokens = self.tokens.to_ne_bytes();
        let mut i = 0;
        while i < 4 {
            bytes[i] = words[0][i];
            bytes[4 + i] = words[1][i];
            i += 1;
        }
        i = 0;
        while i < 8 {
            bytes[8 + i] = tokens[i];
            i += 1;
        }
        bytes
    }
}

const _: () = assert!(core::mem::size_of::<LedgerOp>() == 16);
