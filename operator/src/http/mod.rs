//! The bounded HTTP server that both ports share: connections, heads and requests have their limits, and leave in order.
//! What is answered is the caller's router; TLS is the caller's acceptor.
//! Nothing here knows of Kubernetes.

mod connection;
mod open;
mod serve;

pub use serve::{Bounds, Port, bind, serve};
