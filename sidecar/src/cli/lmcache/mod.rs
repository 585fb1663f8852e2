//! `config --from-lmcache`: translates LMCache's config into a pool and a sidecar's config. `table` lists every key of LMCache with what
//! becomes of it; the migration guide has the same table. `read` checks a file and the variables `LMCACHE_*`, `convert` has the
//! conversions of values, `translation` collects their results, and `report` says what became of each key.

mod convert;
mod keys;
mod read;
mod report;
mod table;
#[cfg(test)]
mod tests;
mod translation;

use super::tier::Output;
use read::Read;
use std::path::Path;
use std::process::ExitCode;
use translation::{Options, Translation};

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "With --from-lmcache")]
#[group(id = "LmcacheArgs", conflicts_with_all = ["defaults", "check", "effective"])]
pub struct Args {
    /// Print the sidecar's config instead of the pool.
    #[arg(long)]
    sidecar: bool,
    /// Name of the pool. Default: the name of the LMCacheEngine, or "default".
    #[arg(long)]
    name: Option<String>,
    /// Worker processes of each vLLM pod: the tensor times the pipeline parallel size. The sizes in a file of vLLM's process are per worker.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    workers: u32,
    /// vLLM pods on each node. The sizes of an LMCacheEngine are per node.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pods_per_node: u32,
    /// text: the pool as YAML, and a line per key of LMCache on standard error. json: all of it in one document.
    #[arg(short, long, value_enum, default_value = "text")]
    output: Output,
}

/// Translates a file and the variables `LMCACHE_*`. Without a path, the file is that of `LMCACHE_CONFIG_FILE`, if the variable is set.
pub fn main(path: Option<&Path>, args: &Args) -> Result<ExitCode, String> {
    let variables: Vec<_> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect();
    let of_variable = variables.iter().find(|(name, _)| name == read::FILE);
    let path = path.or(of_variable.map(|(_, path)| Path::new(path)));
    let translation = translate(path, &variables, args).map_err(|e| e.to_string())?;
    match args.output {
        Output::Json => println!("{}", report::json(&translation)?),
        Output::Text => {
            eprint!("{}", report::text(&translation));
            let document = match args.sidecar {
                true => translation.config(),
                false => translation.pool(),
            };
            print!("{}", report::yaml(&document)?);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn translate(
    path: Option<&Path>,
    variables: &[(String, String)],
    args: &Args,
) -> Result<Translation, read::Invalid> {
    let text = path.map(read::file).transpose()?;
    let invalid = |problems| read::Invalid {
        source: path.map(Path::to_owned),
        problems,
    };
    let read = Read::new(text.as_deref(), variables).map_err(invalid)?;
    let options = Options {
        name: args.name.clone(),
        workers: args.workers,
        pods_per_node: args.pods_per_node,
    };
    Translation::new(&read, options).map_err(invalid)
}
