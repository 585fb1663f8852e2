//! `logs`: the logs of several containers, line by line.

use super::args::Logs as Args;
use super::doctor::facts::operator_pods;
use super::read::{Cluster, ReadError, failed};
use crate::names::SIDECAR_CONTAINER;
use futures::{AsyncBufReadExt, StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::LogParams;
use std::io::{ErrorKind, Write};

/// Container of the operator.
pub const OPERATOR_CONTAINER: &str = "operator";

/// Prints the logs. Returns false if a log could not be read.
pub async fn logs(cluster: &Cluster, args: &Args) -> Result<bool, Box<dyn std::error::Error>> {
    let (cluster, pods, container) = match &args.of {
        Some(of) => {
            let pods = cluster.pods_of(of).await?.into_iter();
            let pods = pods.filter(|pod| pod.sidecar.is_some());
            let names: Vec<_> = pods.map(|pod| pod.name.to_string()).collect();
            (
                cluster.within(cluster.namespace()),
                names,
                SIDECAR_CONTAINER,
            )
        }
        None => {
            let asked = args.operator.operator_namespace.as_deref();
            let (cluster, pods) = operator_pods(cluster, asked).await?;
            let names = pods.iter().filter_map(|pod| pod.metadata.name.clone());
            (cluster, names.collect(), OPERATOR_CONTAINER)
        }
    };
    if pods.is_empty() {
        return Err(ReadError::NotFound("pod with such a container".to_owned()).into());
    }
    if pods.len() > usize::from(args.max_pods) {
        let n = pods.len();
        return Err(format!("{n} pods are more than --max-pods {}", args.max_pods).into());
    }
    let several = pods.len() > 1;
    let params = params(args, container);
    let all = pods.iter().map(|pod| one(&cluster, pod, &params, several));
    let done: Result<Vec<bool>, _> = stream::iter(all)
        .buffer_unordered(match args.follow {
            true => pods.len(),
            // One after the other, in the order of their names.
            false => 1,
        })
        .try_collect()
        .await;
    match done {
        // The reader has enough, as behind `| head`.
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(true),
        done => Ok(done?.into_iter().all(|read| read)),
    }
}

fn params(args: &Args, container: &str) -> LogParams {
    LogParams {
        container: Some(container.to_owned()),
        follow: args.follow,
        previous: args.previous,
        since_seconds: args
            .since
            .map(|time| i64::try_from(time.as_secs().max(1)).unwrap_or(i64::MAX)),
        tail_lines: args.tail.map(i64::from),
        timestamps: args.timestamps,
        ..LogParams::default()
    }
}

/// Prints the log of one pod. Returns false, after a warning, if it cannot be read. An error: the output is closed.
async fn one(
    cluster: &Cluster,
    pod: &str,
    params: &LogParams,
    several: bool,
) -> Result<bool, std::io::Error> {
    let api: Api<Pod> = cluster.api();
    let stream = api.log_stream(pod, params).await;
    let stream = match stream.map_err(failed(&format!("the log of pod {pod}"))) {
        Ok(stream) => stream,
        Err(e) => {
            super::warning(&e.to_string());
            return Ok(false);
        }
    };
    let mut lines = stream.lines();
    while let Some(line) = lines.next().await {
        let line = match line {
            Ok(line) => line,
            Err(e) => {
                super::warning(&format!("the log of pod {pod} ended: {e}"));
                return Ok(false);
            }
        };
        let line = super::plain(&line);
        let mut out = std::io::stdout().lock();
        match several {
            true => writeln!(out, "[pod/{pod}] {line}")?,
            false => writeln!(out, "{line}")?,
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugin::args::{Args as All, Command};
    use clap::Parser;

    #[test]
    fn flags_select_lines_as_kubectl_does() {
        let words = "x logs demo --since 90s --tail 7 --timestamps";
        let Command::Logs(args) = All::try_parse_from(words.split(' ')).unwrap().command else {
            panic!("logs");
        };
        let params = params(&args, "c");
        assert_eq!(
            (params.since_seconds, params.tail_lines),
            (Some(90), Some(7))
        );
        assert!(params.timestamps && !params.follow && !params.previous);
        assert_eq!(params.container.as_deref(), Some("c"));
    }
}
