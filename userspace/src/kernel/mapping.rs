//! Memory for the ledger: of a BPF map, or anonymous.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use prefixlb_common::ledger::LedgerEntry;

use crate::picker::ledger::LedgerCell;

/// The entries of the mmapable array map `fd`.
pub fn of_map(fd: BorrowedFd<'_>, entries: usize) -> io::Result<&'static [LedgerCell]> {
    map(libc::MAP_SHARED, fd.as_raw_fd(), entries)
}

/// Fresh entries, all zero.
pub fn anonymous(entries: usize) -> io::Result<&'static [LedgerCell]> {
    map(libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, entries)
}

fn map(flags: i32, fd: i32, entries: usize) -> io::Result<&'static [LedgerCell]> {
    // SAFETY: a new mapping, placed by the kernel, touches nothing that exists.
    let start = unsafe {
        libc::mmap(
            ptr::null_mut(),
            entries * size_of::<LedgerEntry>(),
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            fd,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping is page-aligned, `entries` long, never unmapped and zero or valid in every byte: cells
    // are made of atomics of plain integers. Programs in the kernel write it with atomics only.
    Ok(unsafe { std::slice::from_raw_parts(start.cast::<LedgerCell>(), entries) })
}
