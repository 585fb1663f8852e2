//! The kubectl plugin. `status` prints pools, `explain` checks the steps from a pod's label to its attached vLLM, `check` runs a Job that
//! checks a pool's shared tiers, `size` computes what a pool holds of a model's KV. `args` is the command line, `read` reads the cluster;
//! `overview` and `explain` are pure and format what was read. The plugin uses the caller's permissions. It changes nothing, except that
//! `check` creates and deletes a Job.

mod args;
mod check;
mod explain;
mod overview;
mod read;
mod size;
mod table;

use args::{Args, Command, Output};
use clap::{CommandFactory, Parser};
use std::process::ExitCode;

/// Runs the plugin with this process's arguments.
pub fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(printed) => {
            println!("{}", printed.text.trim_end());
            printed.code
        }
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

/// The output, and the exit code.
struct Printed {
    text: String,
    code: ExitCode,
}

impl From<String> for Printed {
    fn from(text: String) -> Self {
        let code = ExitCode::SUCCESS;
        Self { text, code }
    }
}

fn run(args: &Args) -> Result<Printed, Box<dyn std::error::Error>> {
    // With two providers linked, the first TLS connection could not choose one. A provider that is already installed is fine.
    let _set = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let connect = || read::Cluster::connect(&args.kube);
        match &args.command {
            Command::Status {
                pool,
                all_namespaces,
                output,
            } => {
                let seen = connect()
                    .await?
                    .pools(pool.as_deref(), *all_namespaces)
                    .await?;
                match output {
                    Output::Text => Ok(overview::text(&seen).into()),
                    Output::Json => Ok(read::json(&overview::json(&seen))?.into()),
                }
            }
            Command::Explain { pod, output } => {
                let explained = explain::explain(&connect().await?.evidence(pod).await?);
                match output {
                    Output::Text => Ok(explained.text().into()),
                    Output::Json => Ok(read::json(&explained)?.into()),
                }
            }
            Command::Check(args) => {
                let report = check::check(&connect().await?, args).await?;
                let text = match args.output {
                    Output::Text => check::text(&report),
                    Output::Json => read::json(&report)?,
                };
                let code = match report.ready {
                    true => ExitCode::SUCCESS,
                    false => ExitCode::FAILURE,
                };
                Ok(Printed { text, code })
            }
            Command::Size(args) => {
                let pool = match &args.pool {
                    Some(name) => Some(connect().await?.one(name).await?),
                    None => None,
                };
                let report = size::size(args, pool.as_ref())?;
                match args.output {
                    Output::Text => Ok(report.to_string().into()),
                    Output::Json => Ok(read::json(&report)?.into()),
                }
            }
            Command::Completions { shell } => {
                let mut script = Vec::new();
                let name = "kubectl-kvcachepool";
                clap_complete::generate(*shell, &mut Args::command(), name, &mut script);
                Ok(String::from_utf8(script)?.into())
            }
        }
    })
}
