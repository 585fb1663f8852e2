//! The admission webhook: it receives reviews over TLS and answers any input in time. No answer ever rejects a pod. `review` is the wire
//! format, `router` the handler with its limits, `decide` finds the pool and calls `inject`. What a pod gets is decided in `inject`;
//! certificates are created in `pki`.

pub mod breaker;
pub mod decide;
mod missing;
pub mod pools;
pub mod review;
pub mod router;
#[cfg(test)]
mod tests;
pub mod tls;
