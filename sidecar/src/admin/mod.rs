//! Admin HTTP and metrics. Open paths: health, metrics, a status summary. With a bearer token: config and objects. Nothing is
//! decided here; the ADMIN operations on the socket run the same code.

pub mod http;
pub mod listen;
pub mod metrics;
pub mod socket;
pub mod token;
