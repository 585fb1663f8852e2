//! The tier against a real server, and against one that answers what a test tells it to.

mod addresses;
mod bucket;
mod direct;
mod errors;
mod faulty;
mod listed;
mod removal;
mod room;
pub(crate) mod server;
mod shared;
mod stalled;
mod suite;
mod tls;
mod uploads;

use super::{Options, Parts, Uploads};
pub use server::Server;

fn parts() -> Parts {
    Options::default().parts
}

fn uploads() -> Uploads {
    Options::default().uploads
}
