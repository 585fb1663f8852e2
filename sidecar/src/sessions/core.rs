//! The state machine's entry: one call per input.

use super::seam::{Host, Input, Now, Output, Start};
use crate::engine::config::Config;

/// Sessions and engine together. The shell keeps one behind a short-held lock and calls [`Core::handle`] for everything that
/// happens.
pub struct Core<H: Host> {
    config: Config,
    host: H,
    table: Option<H::Table>,
    boot: u64,
}

impl<H: Host> Core<H> {
    /// A state machine at the start of an engine process. Makes or takes over the arena where that is allowed now.
    pub fn new(
        config: Config,
        host: H,
        start: Start<H::Table>,
        now: Now,
        out: &mut Vec<Output>,
    ) -> Self {
        let _ = (now, out);
        Self {
            config,
            host,
            table: start.found,
            boot: start.boot,
        }
    }

    /// Takes one input; what the shell shall do is appended to `out`, in order.
    pub fn handle(&mut self, now: Now, input: Input<'_>, out: &mut Vec<Output>) {
        let _ = (now, input, out, &self.host, &self.table, self.boot);
    }

    /// Takes a changed configuration. Returns the names of what needs a restart.
    pub fn configure(&mut self, config: Config) -> Vec<&'static str> {
        self.config = config;
        Vec::new()
    }
}
