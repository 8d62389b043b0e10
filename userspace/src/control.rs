//! Orders to the control plane.

/// A handle for giving orders to the control plane.
#[derive(Clone, Debug)]
pub struct Control {}

impl Control {
    /// Reads the configuration again; the new generation's number, or why the old one stays in force.
    pub async fn reload(&self) -> Result<u64, String> {
        Err("reload is not there yet".into())
    }
}
