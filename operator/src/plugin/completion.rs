//! Completion of `kubectl kvcachepool`: kubectl runs the program `kubectl_complete-kvcachepool`, a link to the plugin, with the words so far.

use super::args::{Args, Kube};
use super::read::Cluster;
use clap::{Arg, Command, CommandFactory, FromArgMatches};
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate, complete};
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::time::Duration;

/// Name of the link.
const PROGRAM: &str = "kubectl_complete-kvcachepool";
/// The last line, which tells kubectl's script to offer no names of files.
const NO_FILES: &str = ":4";
/// Longest wait for the names of pools.
const LONGEST: Duration = Duration::from_secs(2);

/// The words to complete, if kubectl asks for that by the name of this program.
pub fn asked(mut words: impl Iterator<Item = OsString>) -> Option<Vec<OsString>> {
    let program = words.next()?;
    let of_kubectl = Path::new(&program).file_name()? == PROGRAM;
    of_kubectl.then(|| words.collect())
}

/// What the last word can become, a line each, and kubectl's last line.
pub fn candidates(mut words: Vec<OsString>) -> io::Result<String> {
    if words.is_empty() {
        words.push(OsString::new());
    }
    words.insert(0, PROGRAM.into());
    let mut command = with_pools(Args::command(), &kube(&words));
    let last = words.len() - 1;
    let mut text = String::new();
    for candidate in complete(&mut command, words, last, None)? {
        if candidate.is_hide_set() {
            continue;
        }
        text += &candidate.get_value().to_string_lossy();
        let help = candidate.get_help().map(ToString::to_string);
        if let Some(line) = help.as_deref().and_then(|help| help.lines().next()) {
            text += &format!("\t{line}");
        }
        text.push('\n');
    }
    Ok(text + NO_FILES)
}

/// The connection that the words so far choose.
fn kube(words: &[OsString]) -> Kube {
    let matches = Args::command()
        .ignore_errors(true)
        .try_get_matches_from(words);
    matches
        .and_then(|matches| Kube::from_arg_matches(&matches))
        .unwrap_or_default()
}

/// The command line, where every name of a pool has candidates.
fn with_pools(command: Command, kube: &Kube) -> Command {
    command.mut_subcommands(|command| {
        command.mut_args(|arg| {
            let names_pool = matches!(arg.get_id().as_str(), "pool" | "of");
            if names_pool { of_pools(arg, kube) } else { arg }
        })
    })
}

fn of_pools(arg: Arg, kube: &Kube) -> Arg {
    let kube = kube.clone();
    arg.add(ArgValueCandidates::new(move || {
        let names = pools(&kube).unwrap_or_default();
        names.into_iter().map(CompletionCandidate::new).collect()
    }))
}

/// Names of the pools, if the cluster answers in time.
fn pools(kube: &Kube) -> Option<Vec<String>> {
    let runtime = super::runtime().ok()?;
    let listed = async {
        let cluster = Cluster::connect(kube).await.ok()?;
        cluster.names().await.ok()
    };
    runtime.block_on(async { tokio::time::timeout(LONGEST, listed).await.ok().flatten() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(words: &[&str]) -> Vec<String> {
        let text = candidates(words.iter().map(OsString::from).collect()).unwrap();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        assert_eq!(lines.pop().as_deref(), Some(NO_FILES));
        lines
    }

    #[test]
    fn only_the_link_of_kubectl_completes() {
        let asked = |program: &str| asked([program, "st"].map(OsString::from).into_iter());
        assert_eq!(
            asked("/usr/bin/kubectl_complete-kvcachepool"),
            Some(vec!["st".into()])
        );
        assert_eq!(asked("kubectl-kvcachepool"), None);
    }

    #[test]
    fn commands_options_and_choices_are_candidates_with_their_help() {
        assert_eq!(lines(&["dia"]), Vec::<String>::new());
        let [status] = &lines(&["stat"])[..] else {
            panic!("one command")
        };
        assert!(status.starts_with("status\t"), "{status}");
        assert!(lines(&[]).len() > 10);
        let options = lines(&["doctor", "--all"]);
        assert!(options[0].starts_with("--all-namespaces\t"), "{options:?}");
        let formats = lines(&["doctor", "-o", ""]);
        assert_eq!(formats.len(), 3, "{formats:?}");
    }

    #[test]
    fn the_words_so_far_choose_the_namespace() {
        let words = [
            "kubectl_complete-kvcachepool",
            "status",
            "-n",
            "serving",
            "",
        ];
        assert_eq!(
            kube(&words.map(OsString::from)).namespace.as_deref(),
            Some("serving")
        );
    }

    #[test]
    fn without_a_cluster_no_pool_is_a_candidate() {
        let words = ["status", "--kubeconfig", "/nowhere", ""];
        let offered = lines(&words);
        assert!(
            offered.iter().all(|line| line.starts_with('-')),
            "{offered:?}"
        );
    }
}
