//! How many bytes of a request make a token: learned from the `usage.prompt_tokens` of some answers.
//!
//! Scripts and tokenizers differ by a factor of several, and load is counted in tokens. A share of the
//! answers is enough, and only bytes that pass by anyway are searched.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use super::exchange::Exchange;

const FIELD: &[u8] = b"\"prompt_tokens\":";
/// One answer in so many is searched.
const SAMPLE: u64 = 16;
/// Shorter requests say more about the JSON around a prompt than about its tokens. Bytes.
const MIN_BYTES: u64 = 1024;
/// Bytes a token that can be believed, ×1024.
const BELIEVED: std::ops::RangeInclusive<u64> = 1 << 10..=32 << 10;

/// Tokens in `bytes` of request by the ratio `fixed_point` (bytes a token, ×1024).
pub fn tokens(bytes: u64, fixed_point: &AtomicU32) -> u64 {
    let ratio = u64::from(fixed_point.load(Relaxed)).max(1);
    bytes.saturating_mul(1024) / ratio
}

/// The number that follows the field's name in `bytes`.
fn prompt_tokens(bytes: &[u8]) -> Option<u64> {
    let at = memchr::memmem::find(bytes, FIELD)? + FIELD.len();
    let rest = bytes[at..].trim_ascii_start();
    let digits = rest.iter().position(|b| !b.is_ascii_digit())?;
    std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
}

impl Exchange<'_> {
    /// Whether this answer teaches, and with which request length.
    pub(super) fn sample(&self, status: u16) -> Option<u64> {
        let bytes = self.body_bytes();
        let chosen = status == 200
            && self.has_key
            && bytes >= MIN_BYTES
            && self.flow.worker.random().is_multiple_of(SAMPLE);
        chosen.then_some(bytes)
    }

    /// Looks for the count in what passes by.
    pub(super) fn learn_ratio(&mut self, passing: &[u8]) {
        let Some(bytes) = self.sampled_bytes else {
            return;
        };
        let (Some(tokens), Some(pool)) = (prompt_tokens(passing), &self.pool) else {
            return;
        };
        self.sampled_bytes = None;
        let seen = bytes.saturating_mul(1024) / tokens.max(1);
        if BELIEVED.contains(&seen) {
            let ratio = &pool.bytes_per_token_fp;
            let old = u64::from(ratio.load(Relaxed));
            // Two workers may lose an update to each other; the next sample makes up for it.
            ratio.store(((old * 7 + seen) / 8) as u32, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_found_only_whole() {
        assert_eq!(
            prompt_tokens(b"{\"usage\":{\"prompt_tokens\": 1234,"),
            Some(1234)
        );
        assert_eq!(prompt_tokens(b"\"prompt_tokens\":12"), None);
        assert_eq!(prompt_tokens(b"\"prompt_tokens\":null,"), None);
        assert_eq!(prompt_tokens(b"nothing"), None);
    }

    #[test]
    fn tokens_follow_the_ratio() {
        assert_eq!(tokens(4096, &AtomicU32::new(4 << 10)), 1024);
        assert_eq!(tokens(u64::MAX, &AtomicU32::new(0)), u64::MAX);
    }
}
