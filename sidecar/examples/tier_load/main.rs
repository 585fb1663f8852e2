//! Load on one tier, or on the disk below it: what the tier benchmarks measure.
//!
//! `cargo run --example tier_load -- tier --config FILE --size 8Mi --in-flight 8`: puts, then gets of what was put, again and again,
//! through all layers.
//! With `--raw DIR` the same bytes follow by a bare loop of direct I/O, from and to the same memory.
//! `cargo run --example tier_load -- http --requests FILE --size 8Mi --in-flight 8`: the same bytes by a bare HTTP client.
//! Each prints one JSON line for puts and one for gets of each kind.
//! `fill` leaves many objects behind and dies, `open` says how long it takes until they are all known again.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a tool for developers"
)]

mod http;
mod measure;
mod objects;
mod raw;
mod tier;

use clap::{Args, Parser, Subcommand};
use kvcachepool_protocol::config::ByteSize;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// A tier with its layers.
    Tier {
        /// Config of a sidecar with exactly one tier below memory.
        #[arg(long)]
        config: PathBuf,
        /// Folder for a file: afterwards the same by direct I/O on it.
        #[arg(long)]
        raw: Option<PathBuf>,
        /// Order of the dimensions in memory, such as LBHNC: objects are converted. The size is a multiple of 1 MiB.
        #[arg(long)]
        portable: Option<String>,
        #[command(flatten)]
        load: Load,
    },
    /// Puts objects and then dies of SIGKILL, whatever is under way.
    Fill {
        /// Config of a sidecar with exactly one tier below memory.
        #[arg(long)]
        config: PathBuf,
        /// How many.
        #[arg(long)]
        objects: u64,
    },
    /// Opens a tier and prints how long that took and what it holds.
    Open {
        /// Config of a sidecar with exactly one tier below memory.
        #[arg(long)]
        config: PathBuf,
    },
    /// Signed requests to an S3 server.
    Http {
        /// HOST:PORT, then a line for each object: target of its PUT, blank, target of its GET.
        #[arg(long)]
        requests: PathBuf,
        /// PEM file with the authority of a server with TLS.
        #[arg(long)]
        ca: Option<PathBuf>,
        #[command(flatten)]
        load: Load,
    },
}

/// How much of what.
#[derive(Args, Clone, Copy)]
struct Load {
    /// Bytes of an object's one section.
    #[arg(long)]
    size: ByteSize,
    /// Operations under way at once.
    #[arg(long)]
    in_flight: usize,
    /// Puts end after this time, and so do gets once there were a few for each in flight.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// And when so much was put.
    #[arg(long, default_value = "2Gi")]
    most: ByteSize,
}

impl Load {
    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// Most operations.
    fn operations(&self) -> u64 {
        (self.most.0 / self.size.0).max(1)
    }
}

fn main() {
    match Arguments::parse().what {
        What::Tier {
            config,
            raw,
            portable,
            load,
        } => tier::run(&config, raw.as_deref(), portable.as_deref(), load),
        What::Fill { config, objects } => tier::fill(&config, objects),
        What::Open { config } => tier::open(&config),
        What::Http { requests, ca, load } => http::run(&requests, ca.as_deref(), load),
    }
}
