//! The kubectl plugin. `args` is the command line, `read` reads the cluster, and each command has its module: `overview` (status), `explain`
//! and `size` format what was read; `check` and `purge` run a Job (`job`) with the settings of a pool's sidecars (`settings`); `doctor` checks
//! the installation; `logs`, `report`, `reload` and `injection` (pause, resume) operate it. The plugin uses the caller's permissions.

mod args;
mod check;
mod completion;
mod doctor;
mod explain;
mod injection;
mod job;
mod logs;
mod overview;
mod purge;
mod read;
mod reload;
mod report;
mod settings;
mod size;
mod table;

use crate::api::Mode;
use args::{Args, Command, Output};
use clap::{CommandFactory, Parser};
use std::error::Error;
use std::io;
use std::process::ExitCode;
use tokio::runtime::Runtime;

/// Runs the plugin with this process's arguments.
pub fn main() -> ExitCode {
    let done = match completion::asked(std::env::args_os()) {
        Some(words) => completion::candidates(words)
            .map(Printed::from)
            .map_err(Into::into),
        None => run(&Args::parse()),
    };
    match done {
        Ok(printed) => {
            if !printed.text.is_empty() {
                println!("{}", plain(printed.text.trim_end()));
            }
            printed.code
        }
        Err(e) => {
            eprintln!("error: {}", plain(&e.to_string()));
            ExitCode::FAILURE
        }
    }
}

fn warning(text: &str) {
    eprintln!("warning: {}", plain(text));
}

/// A text without control characters, by which a message from the cluster could change what a terminal shows.
fn plain(text: &str) -> String {
    let plain = |c: char| match c {
        '\n' | '\t' => c,
        c if c.is_control() => char::REPLACEMENT_CHARACTER,
        c => c,
    };
    text.chars().map(plain).collect()
}

/// The output, and the exit code.
struct Printed {
    text: String,
    code: ExitCode,
}

impl Printed {
    fn new(text: String, succeeded: bool) -> Self {
        let code = match succeeded {
            true => ExitCode::SUCCESS,
            false => ExitCode::FAILURE,
        };
        Self { text, code }
    }
}

impl From<String> for Printed {
    fn from(text: String) -> Self {
        Self::new(text, true)
    }
}

fn run(args: &Args) -> Result<Printed, Box<dyn Error>> {
    runtime()?.block_on(command(args))
}

/// A runtime in which a cluster can be reached.
fn runtime() -> io::Result<Runtime> {
    // With two providers linked, the first TLS connection could not choose one. A provider that is already installed is fine.
    let _set = rustls::crypto::aws_lc_rs::default_provider().install_default();
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
}

async fn command(args: &Args) -> Result<Printed, Box<dyn Error>> {
    let connect = || read::Cluster::connect(&args.kube);
    Ok(match &args.command {
        Command::Status {
            pool,
            all_namespaces,
            output,
        } => {
            let cluster = connect().await?;
            let seen = cluster.pools(pool.as_deref(), *all_namespaces).await?;
            match output {
                Output::Text => overview::text(&seen).into(),
                output => output
                    .format(&overview::json(&seen), ToString::to_string)?
                    .into(),
            }
        }
        Command::Explain { pod, output } => {
            let explained = explain::explain(&connect().await?.evidence(pod).await?);
            output.format(&explained, explain::Explained::text)?.into()
        }
        Command::Check(args) => {
            let report = check::check(&connect().await?, args).await?;
            Printed::new(args.output.format(&report, check::text)?, report.ready)
        }
        Command::Size(args) => {
            let pool = match &args.pool {
                Some(name) => Some(connect().await?.one(name).await?),
                None => None,
            };
            let report = size::size(args, pool.as_ref())?;
            args.output.format(&report, ToString::to_string)?.into()
        }
        Command::Doctor(args) => {
            let operator = args.operator.operator_namespace.as_deref();
            let found = doctor::doctor(&connect().await?, operator, args.all_namespaces).await;
            let text = args.output.format(&found, doctor::Diagnosis::text)?;
            Printed::new(text, !found.failed())
        }
        Command::Logs(args) => {
            let read = logs::logs(&connect().await?, args).await?;
            Printed::new(String::new(), read)
        }
        Command::Report(args) => {
            let written = report::report(&connect().await?, args).await?;
            for error in &written.errors {
                warning(&format!("not in the report: {error}"));
            }
            let path = written.path.display();
            format!(
                "{path} has {} files. Look through it before you publish it.",
                written.files
            )
            .into()
        }
        Command::Reload(args) => {
            let report = reload::reload(&connect().await?, args).await?;
            let text = args.output.format(&report, reload::Report::text)?;
            Printed::new(text, !report.failed())
        }
        Command::Pause(args) => set_injection(&connect().await?, args, Mode::Disabled).await?,
        Command::Resume(args) => set_injection(&connect().await?, args, Mode::Enabled).await?,
        Command::Purge(args) => {
            let report = purge::purge(&connect().await?, args).await?;
            let text = args.output.format(&report, purge::Report::text)?;
            Printed::new(text, report.error.is_empty())
        }
        Command::Completions { shell } => {
            let mut script = Vec::new();
            let name = "kubectl-kvcachepool";
            clap_complete::generate(*shell, &mut Args::command(), name, &mut script);
            String::from_utf8(script)?.into()
        }
    })
}

async fn set_injection(
    cluster: &read::Cluster,
    args: &args::Injection,
    mode: Mode,
) -> Result<Printed, Box<dyn Error>> {
    let report = injection::set(cluster, &args.pool, mode).await?;
    Ok(args.output.format(&report, injection::Report::text)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_from_the_cluster_are_not_printed() {
        assert_eq!(
            plain("a\tb\nc\u{1b}]0;x\u{7}"),
            "a\tb\nc\u{fffd}]0;x\u{fffd}"
        );
    }
}
