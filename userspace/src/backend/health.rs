//! Health: active probes and what traffic itself says.

/// What one exchange with a backend showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A response head with this status came.
    Status(u16),
    /// No connection, or it broke before a response byte.
    Failed,
}

/// Passive health of one backend: errors in a row, ejections.
#[derive(Debug, Default)]
pub struct Passive {}

impl Passive {
    /// Notes an exchange. Called by workers; must be cheap when all is well.
    pub fn report(&self, outcome: Outcome) {
        let _ = outcome;
    }
}
