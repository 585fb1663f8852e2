//! What the sources, and the pages made from them, have to be.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod metrics_doc;
mod reconcile_imports;
mod troubleshooting;
