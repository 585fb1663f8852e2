//! The maintenance loop: in every round the leader executes the next steps, every replica renews its own leaf, and readiness is updated.

use super::PkiError;
use super::authority::{self, expiry};
use super::call::call;
use super::configuration::{Configuration, Trust};
use super::files::Files;
use super::plan::{self, Leaf, Lifetimes, Step};
use super::store::Store;
use crate::health::{CERTIFICATE, Readiness};
use crate::leader::Leadership;
use crate::metrics::Metrics;
use crate::shutdown::{Phase, Shutdown};
use crate::webhook::tls::Served;
use rustls::sign::CertifiedKey;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::sleep;
use tracing::{info, warn};

/// Maximum steps of the leader in one round. A rotation has four.
const STEPS_MAX: usize = 8;

/// Interval while the certificate is not ready: the missing part is usually being created.
const UNREADY: Duration = Duration::from_secs(1);

/// Source of certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mode {
    /// The operator's own authority, in the Secret with this name.
    Own { secret: String },
    /// cert-manager: mounted files, and a caBundle that its cainjector writes.
    CertManager {
        /// Folder with tls.crt and tls.key.
        folder: PathBuf,
    },
    /// External: mounted files. An empty caBundle means that the API server's machine already trusts the issuer.
    External {
        /// Folder with tls.crt and tls.key.
        folder: PathBuf,
    },
}

/// Dependencies of the loop.
pub struct Upkeep {
    /// Source of certificates.
    pub mode: Mode,
    pub lifetimes: Lifetimes,
    /// Interval between rounds.
    pub interval: Duration,
    /// Names and addresses of the webhook. The API server calls the first.
    pub names: Vec<String>,
    /// Address of the own port.
    pub address: SocketAddr,
    pub configuration: String,
    pub namespace: String,
    pub client: kube::Client,
    /// Provides the port's certificate.
    pub served: Arc<Served>,
    /// Whether this replica is the leader, which rotates.
    pub leadership: Leadership,
    /// Receives the result.
    pub readiness: Arc<Readiness>,
    pub metrics: Arc<Metrics>,
}

enum Source {
    Own(Box<Store>),
    Files(Files),
}

struct Keeper {
    upkeep: Upkeep,
    source: Source,
    configuration: Configuration,
    leaf: Option<Leaf>,
    /// The last caBundle that was read, used while the API server does not answer.
    trust: Option<Trust>,
}

/// Maintains the certificate until `Phase::Stopping`.
pub async fn run(upkeep: Upkeep, mut shutdown: Shutdown) {
    let client = upkeep.client.clone();
    let source = match &upkeep.mode {
        Mode::Own { secret } => Source::Own(Box::new(Store::new(
            kube::Api::namespaced(client.clone(), &upkeep.namespace),
            secret.clone(),
        ))),
        Mode::CertManager { folder } | Mode::External { folder } => {
            Source::Files(Files::new(folder.clone()))
        }
    };
    let configuration = Configuration::new(kube::Api::all(client), upkeep.configuration.clone());
    let mut keeper = Keeper {
        upkeep,
        source,
        configuration,
        leaf: None,
        trust: None,
    };
    let mut leadership = keeper.upkeep.leadership.clone();
    loop {
        let mut stopping = shutdown.clone();
        let ready = tokio::select! {
            () = stopping.reached(Phase::Stopping) => return,
            ready = keeper.round() => ready,
        };
        let pause = pause(keeper.upkeep.interval, ready);
        tokio::select! {
            () = shutdown.reached(Phase::Stopping) => return,
            // A new leader starts immediately.
            () = leadership.changed() => {}
            () = sleep(pause) => {}
        }
    }
}

fn pause(interval: Duration, ready: bool) -> Duration {
    if ready {
        interval
    } else {
        interval.min(UNREADY)
    }
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

impl Keeper {
    /// Runs one round. Returns whether the certificate is ready.
    async fn round(&mut self) -> bool {
        let renewed = match &mut self.source {
            Source::Own(_) => self.own().await,
            Source::Files(files) => match files.changed().await {
                Ok(Some(certificate)) => self.serve(certificate),
                Ok(None) => Ok(()),
                Err(e) => Err(e),
            },
        };
        let renewed = renewed.map_err(|e| self.failed(&e));
        let checked = self.check().await.map_err(|e| self.failed(&e));
        // A valid certificate is ready, even if its renewal fails.
        let state = match (&checked, renewed) {
            (Err(_), Err(why)) if self.upkeep.served.get().is_none() => Err(why),
            _ => checked,
        };
        let ready = state.is_ok();
        if self.upkeep.readiness.set(CERTIFICATE, state.clone()) {
            match state {
                Ok(()) => info!("webhook certificate is trusted"),
                Err(why) => warn!(reason = why, "webhook certificate is not ready"),
            }
        }
        ready
    }

    fn failed(&self, e: &PkiError) -> String {
        self.upkeep
            .metrics
            .add("certificate_errors_total", &[e.step()], 1);
        e.to_string()
    }

    /// One round with the operator's own authorities.
    async fn own(&mut self) -> Result<(), PkiError> {
        let Source::Own(store) = &self.source else {
            return Ok(());
        };
        if self.upkeep.leadership.leads()
            && let Err(e) = lead(store, &self.configuration, &self.upkeep).await
        {
            let why = self.failed(&e);
            warn!(
                reason = why,
                "maintenance of the certificate authorities failed; retrying"
            );
        }
        let authorities = store.read().await?.authorities;
        if let Some(newest) = authorities.last() {
            self.expires("authority", newest.ends);
        }
        let lifetimes = self.upkeep.lifetimes;
        let now = now();
        let Some(signer) = plan::sign(self.leaf.as_ref(), &authorities, now, lifetimes) else {
            return match self.leaf {
                Some(_) => Ok(()),
                None => Err(PkiError::NoAuthority(store.name().to_owned())),
            };
        };
        let certificate = authority::leaf(signer, &self.upkeep.names, now, lifetimes)?;
        let leaf = Leaf {
            signer: signer.certificate.clone(),
            ends: plan::ends(signer, now, lifetimes),
        };
        self.serve(certificate)?;
        self.leaf = Some(leaf);
        Ok(())
    }

    fn serve(&self, certificate: Arc<CertifiedKey>) -> Result<(), PkiError> {
        self.expires("leaf", expiry(&certificate.cert)?);
        self.upkeep.served.set(certificate);
        self.upkeep
            .metrics
            .add("certificate_rotations_total", &["leaf"], 1);
        info!(names = ?self.upkeep.names, "webhook certificate renewed");
        Ok(())
    }

    fn expires(&self, certificate: &str, at: u64) {
        self.upkeep.metrics.set(
            "certificate_expiry_timestamp_seconds",
            &[certificate],
            at as f64,
        );
    }

    /// Checks whether an API server with the current configuration would get an answer from this replica.
    async fn check(&mut self) -> Result<(), PkiError> {
        match self.configuration.read().await {
            Ok(trust) => self.trust = Some(trust),
            Err(e @ PkiError::NoConfiguration(_)) => return Err(e),
            Err(e) if self.trust.is_none() => return Err(e),
            Err(e) => {
                let why = self.failed(&e);
                warn!(
                    reason = why,
                    "caBundle cannot be read; using the previous one"
                );
            }
        }
        let served = self.upkeep.served.get();
        let served =
            served.ok_or_else(|| PkiError::Certificate("it is not available yet".to_owned()))?;
        let bundle = match &self.trust {
            Some(trust) => trust.bundle.as_slice(),
            None => &[],
        };
        if bundle.is_empty() {
            let advice = match &self.upkeep.mode {
                Mode::Own { .. } => "the leader writes it within seconds",
                Mode::CertManager { .. } => {
                    "cert-manager's cainjector writes it; check that it runs, and that the configuration has its annotation"
                }
                // Trust in the API server's machine cannot be tested from here.
                Mode::External { .. } => {
                    return match expiry(&served.cert)? > now() {
                        true => Ok(()),
                        false => Err(PkiError::Certificate("it has expired".to_owned())),
                    };
                }
            };
            let name = self.configuration.name().to_owned();
            return Err(PkiError::NoBundle(name, advice));
        }
        let name = self
            .upkeep
            .names
            .first()
            .map_or("localhost", String::as_str);
        call(self.upkeep.address, name, bundle).await
    }
}

/// All steps of the leader, each based on freshly read state.
async fn lead(
    store: &Store,
    configuration: &Configuration,
    upkeep: &Upkeep,
) -> Result<(), PkiError> {
    for _ in 0..STEPS_MAX {
        let stored = store.read().await?;
        let trust = configuration.read().await;
        // Without a configuration there is no trust, but an authority is created anyway.
        let (bundle, equal) = match &trust {
            Ok(trust) => (trust.bundle.clone(), trust.equal),
            Err(PkiError::NoConfiguration(_)) => (Vec::new(), true),
            Err(_) => return trust.map(drop),
        };
        // The next leader decides for itself.
        if !upkeep.leadership.leads() {
            return Ok(());
        }
        let authorities = stored.authorities.clone();
        let now = now();
        let step = match plan::next(&authorities, &bundle, now, upkeep.lifetimes) {
            Step::Wait | Step::Note(_) if !equal => {
                Step::Trust(plan::wanted(&authorities, &bundle, now, upkeep.lifetimes))
            }
            step => step,
        };
        match step {
            Step::Wait => return Ok(()),
            Step::Make => {
                let created = authority::make(now, upkeep.lifetimes)?;
                let authorities = authorities.into_iter().chain([created]).collect();
                if store.write(stored, authorities).await? {
                    info!("certificate authority created");
                    upkeep
                        .metrics
                        .add("certificate_rotations_total", &["authority"], 1);
                }
            }
            Step::Forget(unused) => {
                let mut authorities = authorities;
                authorities.retain(|a| !unused.contains(&a.certificate));
                store.write(stored, authorities).await?;
            }
            Step::Trust(bundle) => {
                if configuration.write(&trust?, &bundle).await? {
                    info!(certificates = bundle.len(), "caBundle written");
                }
            }
            Step::Note(certificate) => {
                let noted = plan::noted(authorities, &certificate, Some(now));
                store.write(stored, noted).await?;
            }
            Step::Doubt(certificate) => {
                warn!("a trusted certificate authority is missing from the caBundle");
                let noted = plan::noted(authorities, &certificate, None);
                store.write(stored, noted).await?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_that_is_not_ready_is_checked_again_within_a_second() {
        let (short, long) = (Duration::from_millis(100), Duration::from_secs(600));
        assert_eq!(pause(long, false), UNREADY);
        assert_eq!(pause(short, false), short);
        assert_eq!(pause(long, true), long);
    }
}
