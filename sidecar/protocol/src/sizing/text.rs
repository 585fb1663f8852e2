//! The sizes as text: aligned lines.

use super::report::Report;
use crate::config::ByteSize;
use std::fmt;

/// A dash for 0, which means that the size does not apply.
fn size(bytes: u64) -> String {
    match bytes {
        0 => "-".to_owned(),
        bytes => ByteSize(bytes).short(),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            out,
            "model      {}, KV in {}, tensor parallel size {}",
            self.model, self.kv_dtype, self.tensor_parallel
        )?;
        writeln!(
            out,
            "chunk      {} tokens in blocks of {}\n",
            self.chunk_tokens, self.block_tokens
        )?;
        let mut row = |cells: [&str; 8]| {
            let [group, layers, shards, window, token, rank, chunk, state] = cells;
            let line = format!(
                "{group:<11}{layers:<8}{shards:<8}{window:<8}{token:<11}{rank:<17}{chunk:<11}{state}"
            );
            writeln!(out, "{}", line.trim_end())
        };
        row([
            "GROUP",
            "LAYERS",
            "SHARDS",
            "WINDOW",
            "PER TOKEN",
            "TOKEN, ONE RANK",
            "PER CHUNK",
            "STATE",
        ])?;
        for group in &self.groups {
            row([
                group.kind,
                &group.layers.to_string(),
                &group.shards.to_string(),
                &match group.window_tokens {
                    0 => "-".to_owned(),
                    tokens => tokens.to_string(),
                },
                &size(group.token_bytes),
                &size(group.rank_token_bytes),
                &size(group.chunk_bytes),
                &size(group.state_bytes),
            ])?;
        }
        if self.groups.len() > 1 {
            let sums = [self.token_bytes, self.rank_token_bytes, self.chunk_bytes].map(size);
            row(["all", "", "", "", &sums[0], &sums[1], &sums[2], ""])?;
        }
        writeln!(out)?;
        if let Some(prompt) = &self.prompt {
            writeln!(
                out,
                "prompt     {} tokens: {} chunks, {} stored, {} to load",
                prompt.tokens,
                prompt.chunks,
                size(prompt.stored_bytes),
                size(prompt.loaded_bytes)
            )?;
        }
        for tier in &self.tiers {
            let name = tier.tier;
            let of = ByteSize(tier.size_bytes);
            if !tier.reason.is_empty() {
                writeln!(out, "{name:<11}{of}: {}", tier.reason)?;
                continue;
            }
            write!(
                out,
                "{name:<11}{of}: {} chunks, {} tokens",
                tier.chunks, tier.tokens
            )?;
            match (tier.prompts, &self.prompt) {
                (Some(prompts), Some(prompt)) => {
                    writeln!(out, ", {prompts} prompts of {} tokens", prompt.tokens)?
                }
                _ => writeln!(out)?,
            }
        }
        Ok(())
    }
}
