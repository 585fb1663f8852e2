//! The kubectl plugin: `status` prints pools, `explain` walks from a pod's label to its attached vLLM and stops where it ends.
//! `args` is the command line, `read` the cluster; `overview` and `explain` are pure and print what was read.
//! It uses the rights of whoever calls it and changes nothing.

mod args;
mod explain;
mod overview;
mod read;
mod table;

use args::{Args, Command, Output};
use clap::Parser;
use std::process::ExitCode;

/// Runs the plugin with this process's arguments.
pub fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(text) => {
            println!("{}", text.trim_end());
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<String, read::ReadError> {
    // With two providers linked in, the first TLS connection would not know which to take; one that is set already is fine.
    let _set = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let cluster = read::Cluster::connect(&args.kube).await?;
        match &args.command {
            Command::Status {
                pool,
                all_namespaces,
                output,
            } => {
                let seen = cluster.pools(pool.as_deref(), *all_namespaces).await?;
                match output {
                    Output::Text => Ok(overview::text(&seen)),
                    Output::Json => Ok(read::json(&overview::json(&seen))?),
                }
            }
            Command::Explain { pod, output } => {
                let explained = explain::explain(&cluster.evidence(pod).await?);
                match output {
                    Output::Text => Ok(explained.text()),
                    Output::Json => Ok(read::json(&explained)?),
                }
            }
        }
    })
}
