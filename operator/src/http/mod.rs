//! The bounded HTTP server of both ports: it limits connections, heads and requests, and shuts down in order. The caller provides the
//! router and the TLS acceptor. This module is independent of Kubernetes.

mod connection;
mod open;
mod serve;

pub use serve::{Bounds, Port, bind, serve};
