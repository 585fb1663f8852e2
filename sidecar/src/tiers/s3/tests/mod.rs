//! The tier against a real server, and against one that answers what a test tells it to.

mod server;
mod suite;

pub use server::Server;
