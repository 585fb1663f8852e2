//! `config`: print the defaults, check a file, print a file with all defaults filled in, translate LMCache's.

use super::lmcache;
use crate::config_file;
use kvcachepool_protocol::config::Config;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    what: What,
    #[command(flatten)]
    lmcache: lmcache::Args,
}

#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct What {
    /// Print the default config with a comment per key.
    #[arg(long)]
    defaults: bool,
    /// Check a file. Exit code 0 and "ok", or 1 and every problem in it.
    #[arg(long, value_name = "FILE")]
    check: Option<PathBuf>,
    /// Print all keys of a file with defaults filled in. URLs are printed without user and password.
    #[arg(long, value_name = "FILE")]
    effective: Option<PathBuf>,
    /// Translate LMCache's config to a pool: its YAML, an LMCacheEngine, or, without FILE, the variables LMCACHE_*.
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    from_lmcache: Option<Option<PathBuf>>,
}

pub fn main(args: &Args) -> Result<ExitCode, String> {
    let what = &args.what;
    if let Some(path) = &what.from_lmcache {
        return lmcache::main(path.as_deref(), &args.lmcache);
    }
    if let Some(path) = what.check.as_deref().or(what.effective.as_deref()) {
        let loaded = config_file::load(Some(path)).map_err(|e| e.to_string())?;
        for key in &loaded.unknown {
            eprintln!("warning: {key}");
        }
        if what.check.is_some() {
            println!("ok");
        } else {
            print!("{}", loaded.config.shown_yaml());
        }
    } else {
        print!("{}", Config::default_yaml());
    }
    Ok(ExitCode::SUCCESS)
}
