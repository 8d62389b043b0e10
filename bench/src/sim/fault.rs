//! Faults on demand: a request names one in the field `x-sim-fault`.

/// What goes wrong with one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The answer comes ten times slower.
    Slow,
    /// The head and one event come, then nothing.
    Stall,
    /// The connection ends with FIN after three events.
    DieFin,
    /// It ends with RST after three events.
    DieRst,
    /// It ends with RST before any answer.
    Reset,
    /// 503 at once: the queue is full.
    Full,
    /// A chunk size that is none.
    BadChunk,
    /// Bytes beyond the end of the answer.
    Surplus,
    /// No framing field: the answer ends with the connection.
    UntilClose,
}

impl Fault {
    /// The fault of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "slow" => Self::Slow,
            "stall" => Self::Stall,
            "die-fin" => Self::DieFin,
            "die-rst" => Self::DieRst,
            "reset" => Self::Reset,
            "full" => Self::Full,
            "bad-chunk" => Self::BadChunk,
            "surplus" => Self::Surplus,
            "until-close" => Self::UntilClose,
            _ => return None,
        })
    }
}
