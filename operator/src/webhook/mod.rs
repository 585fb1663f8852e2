//! The admission webhook: reviews come in over TLS, an answer goes out in time, whatever came in. No answer ever rejects a pod.
//! `review` is the wire, `router` the handler with its bounds, `decide` finds the pool and asks `inject`.
//! What a pod gets is decided in `inject`; certificates are made in `pki`.

pub mod breaker;
pub mod decide;
mod missing;
pub mod pools;
pub mod review;
pub mod router;
#[cfg(test)]
mod tests;
pub mod tls;
