//! `--output` of the commands that had `--json` first.

use super::tier::Output;

#[derive(Debug, clap::Args)]
pub struct Format {
    /// Output format: text for people, json for programs.
    #[arg(short, long, value_enum, default_value = "text")]
    output: Output,
    /// The same as `--output json`.
    #[arg(long, hide = true, conflicts_with = "output")]
    json: bool,
}

impl Format {
    pub fn is_json(&self) -> bool {
        self.json || self.output == Output::Json
    }
}
