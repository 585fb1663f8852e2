//! Runs simulated histories of the state machine, or one with its trace.
//!
//! `cargo run --example simulate -- --histories N --seed S [--trace] [--json]`

#![allow(clippy::unwrap_used, clippy::panic, reason = "a tool for developers")]

use clap::Parser;
use kvcachepool_simulation::{MISTAKES, Wrong, guarded, run_many, threads};
use std::path::PathBuf;
use std::time::Instant;

#[derive(Parser)]
struct Args {
    /// Histories to run, from the seed on.
    #[arg(long, default_value_t = 1_000)]
    histories: u64,
    /// First seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Threads; 0 = one per core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Print what happens in the history of the seed.
    #[arg(long)]
    trace: bool,
    /// Histories that may break a rule before the run ends.
    #[arg(long, default_value_t = 1)]
    most: usize,
    /// Make this mistake, by its name, in the kind of history in which it shows.
    #[arg(long, requires = "trace")]
    mistake: Option<String>,
    /// The kind of history of `--mistake`, without the mistake.
    #[arg(long, requires = "mistake")]
    without: bool,
    /// Make every mistake in turn and say when it was seen.
    #[arg(long)]
    mistakes: bool,
    /// Add a row to target/bench/results.json.
    #[arg(long)]
    json: bool,
}

fn main() {
    let args = Args::parse();
    if args.mistakes {
        mistakes(&args);
        return;
    }
    if args.trace {
        trace(&args);
        return;
    }
    let threads = if args.threads == 0 {
        threads()
    } else {
        args.threads
    };
    let begun = Instant::now();
    let summary = run_many(
        args.seed,
        args.histories,
        threads,
        args.most,
        Wrong::NOTHING,
        &|p| p,
    );
    let seconds = begun.elapsed().as_secs_f64();
    let counts = summary.counts;
    for (name, count) in counts.list() {
        println!("{name:28} {count}");
    }
    println!("loads reported good          {}", counts.loads_good);
    println!("stores committed             {}", counts.stores_done);
    let rate = counts.histories as f64 / seconds;
    println!(
        "{} histories, {} events ({:.0} a history), {seconds:.1} s on {threads} threads: {rate:.0} histories/s",
        counts.histories,
        counts.events,
        counts.events as f64 / counts.histories.max(1) as f64,
    );
    for (seed, violation) in &summary.broken {
        println!("seed {seed}: {violation}");
    }
    if let Some((seed, _)) = summary.broken.first() {
        println!("replay: cargo run --example simulate -- --seed {seed} --trace");
        std::process::exit(1);
    }
    if args.json {
        record(rate, counts.histories, args.histories);
    }
}

fn trace(args: &Args) {
    let seed = args.seed;
    let named = args.mistake.as_ref().map(|name| {
        MISTAKES
            .iter()
            .find(|m| m.name == name)
            .unwrap_or_else(|| panic!("no mistake is called {name}"))
    });
    let outcome = match named {
        Some(mistake) if args.without => guarded(seed, Wrong::NOTHING, &mistake.shape, true),
        Some(mistake) => guarded(seed, mistake.wrong, &mistake.shape, true),
        None => guarded(seed, Wrong::NOTHING, &|p| p, true),
    };
    match outcome.violation {
        Some(violation) => {
            println!("seed {seed}: {violation}");
            std::process::exit(1);
        }
        None => println!("seed {seed}: every rule held"),
    }
}

fn mistakes(args: &Args) {
    for mistake in MISTAKES {
        let begun = Instant::now();
        let wrong = run_many(
            args.seed,
            args.histories,
            2,
            1,
            mistake.wrong,
            &mistake.shape,
        );
        let right = run_many(
            args.seed,
            args.histories.min(100),
            2,
            1,
            Wrong::NOTHING,
            &mistake.shape,
        );
        let seen = wrong.broken.first();
        let named = seen.is_some_and(|(_, v)| mistake.rules.contains(&v.rule));
        println!(
            "{} {:26} {:5} histories, {:.1} s: {}{}",
            if named { "ok  " } else { "MISS" },
            mistake.name,
            wrong.counts.histories,
            begun.elapsed().as_secs_f64(),
            seen.map_or("not seen".into(), |(seed, v)| format!("seed {seed} {v}")),
            right
                .broken
                .first()
                .map_or(String::new(), |(seed, v)| format!(
                    " AND WITHOUT IT: seed {seed} {v}"
                )),
        );
    }
}

/// Replaces the row of this name in the list of results.
fn record(rate: f64, runs: u64, histories: u64) {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    let bench = if target.join("bench").is_dir() {
        target.join("bench")
    } else {
        PathBuf::from("target/bench")
    };
    std::fs::create_dir_all(&bench).unwrap();
    let path = bench.join("results.json");
    let name = "sim_histories_per_s";
    let mut rows: Vec<serde_json::Value> = std::fs::read(&path)
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok())
        .unwrap_or_default();
    rows.retain(|row| row["name"] != name);
    rows.push(serde_json::json!({
        "name": name,
        "value": rate,
        "unit": "1/s",
        "reference": "20,000 histories within 90 s",
        "reference_value": 20_000.0 / 90.0,
        "ratio": rate / (20_000.0 / 90.0),
        "runs": runs,
        "command": format!("cargo run --example simulate -- --histories {histories} --json"),
    }));
    std::fs::write(&path, serde_json::to_string_pretty(&rows).unwrap()).unwrap();
    println!("{}: row {name}", path.display());
}
