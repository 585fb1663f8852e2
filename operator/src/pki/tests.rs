//! Rotation: the plan against a model of replicas and API servers, and real certificates against a real client.

use super::authority;
use super::call::call;
use super::files::Files;
use super::plan::{Authority, Leaf, Lifetimes, Step, ends, next, noted, sign};
use crate::http::{Bounds, Port, serve};
use crate::metrics;
use crate::shutdown::{Phase, Shutdown};
use crate::webhook::tls::{Served, acceptor};
use axum::Router;
use proptest::prelude::*;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::net::TcpListener;

const LIFETIMES: Lifetimes = Lifetimes {
    authority: 300,
    leaf: 60,
    settle: 12,
};

fn authority(name: &str, ends: u64, trusted_since: Option<u64>) -> Authority {
    Authority {
        certificate: name.to_owned(),
        key: String::new(),
        ends,
        trusted_since,
    }
}

fn names(all: &[&str]) -> Vec<String> {
    all.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn a_first_authority_is_created_then_trusted_then_recorded() {
    assert_eq!(next(&[], &[], 0, LIFETIMES), Step::Make);
    let fresh = [authority("a", 300, None)];
    assert_eq!(next(&fresh, &[], 0, LIFETIMES), Step::Trust(names(&["a"])));
    assert_eq!(
        next(&fresh, &names(&["a"]), 0, LIFETIMES),
        Step::Note("a".into())
    );
    let noted = [authority("a", 300, Some(0))];
    assert_eq!(next(&noted, &names(&["a"]), 0, LIFETIMES), Step::Wait);
}

#[test]
fn a_new_authority_is_trusted_beside_the_old_one_until_the_old_leaves_expire() {
    let bundle = names(&["a", "b"]);
    let new = [authority("a", 300, Some(0)), authority("b", 500, None)];
    assert_eq!(
        next(&new, &names(&["a"]), 199, LIFETIMES),
        Step::Trust(bundle.clone())
    );
    let both = [authority("a", 300, Some(0)), authority("b", 500, Some(200))];
    assert_eq!(
        next(&both, &bundle, 200 + 2 * 12 + 60 - 1, LIFETIMES),
        Step::Wait
    );
    let gone = next(&both, &bundle, 200 + 2 * 12 + 60, LIFETIMES);
    assert_eq!(gone, Step::Forget(names(&["a"])));
    assert_eq!(
        next(&both[1..], &bundle, 300, LIFETIMES),
        Step::Trust(names(&["b"]))
    );
}

#[test]
fn no_authority_signs_before_its_trust_has_settled() {
    let both = [authority("a", 300, Some(0)), authority("b", 500, Some(200))];
    let leaf = Leaf {
        signer: "a".into(),
        ends: 260,
    };
    assert_eq!(sign(Some(&leaf), &both, 211, LIFETIMES), None);
    assert_eq!(sign(Some(&leaf), &both, 212, LIFETIMES), Some(&both[1]));
}

#[test]
fn a_lost_store_keeps_trusted_authorities_until_their_leaves_expire() {
    let new = [authority("b", 300, None)];
    let kept = names(&["a", "b"]);
    assert_eq!(
        next(&new, &names(&["a"]), 0, LIFETIMES),
        Step::Trust(kept.clone())
    );
    let noted = [authority("b", 300, Some(0))];
    // Replicas may serve leaves from before the loss for the lifetime of a leaf.
    assert_eq!(next(&noted, &kept, 2 * 12 + 59, LIFETIMES), Step::Wait);
    assert_eq!(
        next(&noted, &kept, 2 * 12 + 60, LIFETIMES),
        Step::Trust(names(&["b"]))
    );
    let leaf = Leaf {
        signer: "a".into(),
        ends: 50,
    };
    assert_eq!(sign(Some(&leaf), &noted, 11, LIFETIMES), None);
    assert_eq!(sign(Some(&leaf), &noted, 12, LIFETIMES), Some(&noted[0]));
}

#[test]
fn a_restored_old_store_does_not_sign_before_its_trust_has_settled() {
    let old = [authority("a", 300, Some(0))];
    let trusted = names(&["b"]);
    assert_eq!(
        next(&old, &trusted, 100, LIFETIMES),
        Step::Doubt("a".into())
    );
    let doubted = noted(old.to_vec(), "a", None);
    let both = names(&["b", "a"]);
    assert_eq!(
        next(&doubted, &trusted, 100, LIFETIMES),
        Step::Trust(both.clone())
    );
    assert_eq!(
        next(&doubted, &both, 100, LIFETIMES),
        Step::Note("a".into())
    );
    let again = noted(doubted, "a", Some(100));
    assert_eq!(next(&again, &both, 100 + 12, LIFETIMES), Step::Wait);
    let leaf = Leaf {
        signer: "b".into(),
        ends: 150,
    };
    assert_eq!(sign(Some(&leaf), &again, 111, LIFETIMES), None);
    assert_eq!(sign(Some(&leaf), &again, 112, LIFETIMES), Some(&again[0]));
}

#[test]
fn an_authority_that_cannot_sign_is_rejected() {
    let (one, other) = (
        authority::make(unix(), LIFETIMES).unwrap(),
        authority::make(unix(), LIFETIMES).unwrap(),
    );
    assert!(authority::usable(&one).is_ok());
    let cut = one.key.len() / 2;
    for (certificate, key) in [
        (&*one.certificate, &one.key[..cut]),
        (&one.certificate[..cut], &one.key),
        (&one.certificate, &other.key),
        ("", ""),
    ] {
        let stored = Authority {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            ..one.clone()
        };
        assert!(authority::usable(&stored).is_err());
    }
}

#[test]
fn no_leaf_outlives_its_authority_or_is_renewed_in_a_loop() {
    let old = authority("a", 300, Some(0));
    assert_eq!(ends(&old, 290, LIFETIMES), 300);
    let leaf = Leaf {
        signer: "a".into(),
        ends: 300,
    };
    assert_eq!(sign(Some(&leaf), &[old], 299, LIFETIMES), None);
}

/// A model of the cluster: the store, the caBundle, and two replicas with their leaves.
#[derive(Default)]
struct World {
    store: Vec<Authority>,
    /// Every value of the caBundle, with its time.
    bundles: Vec<(u64, Vec<String>)>,
    made: u64,
    leaves: [Option<Leaf>; 2],
}

impl World {
    fn bundle(&self) -> Vec<String> {
        self.bundles.last().map(|b| b.1.clone()).unwrap_or_default()
    }

    fn lead(&mut self, now: u64, steps: usize) {
        for _ in 0..steps {
            match next(&self.store, &self.bundle(), now, LIFETIMES) {
                Step::Wait => return,
                Step::Make => {
                    self.made += 1;
                    let name = format!("ca-{}", self.made);
                    self.store
                        .push(authority(&name, now + LIFETIMES.authority, None));
                }
                Step::Forget(gone) => self.store.retain(|a| !gone.contains(&a.certificate)),
                Step::Trust(bundle) => self.bundles.push((now, bundle)),
                Step::Note(name) => {
                    self.store = noted(std::mem::take(&mut self.store), &name, Some(now));
                }
                Step::Doubt(name) => {
                    self.store = noted(std::mem::take(&mut self.store), &name, None);
                }
            }
        }
    }

    fn follow(&mut self, who: usize, now: u64) {
        if let Some(signer) = sign(self.leaves[who].as_ref(), &self.store, now, LIFETIMES) {
            self.leaves[who] = Some(Leaf {
                signer: signer.certificate.clone(),
                ends: ends(signer, now, LIFETIMES),
            });
        }
    }

    /// Every bundle that some API server may use: the newest, and older ones that were replaced within the settle time.
    fn believed(&self, now: u64) -> impl Iterator<Item = &Vec<String>> {
        let replaced = self.bundles.iter().skip(1).map(|b| b.0).chain([u64::MAX]);
        let old = self.bundles.iter().zip(replaced);
        old.filter(move |(_, until)| until.saturating_add(LIFETIMES.settle) > now)
            .map(|((_, bundle), _)| bundle)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// For delays of leader and replicas of up to 8 s, and a leader that may stop between any two steps, no API server ever sees a
    /// certificate that it does not trust, after the first trusted one.
    #[test]
    fn every_leaf_is_trusted_through_all_rotations(
        rounds in proptest::collection::vec((1..8u64, 0..8u64, 1..6usize, any::<bool>(), any::<bool>()), 100..400),
    ) {
        let mut world = World::default();
        world.lead(0, 8);
        let mut now = LIFETIMES.settle + 1;
        world.follow(0, now);
        world.follow(1, now);
        let mut late = [0, 0];
        let mut led = now;
        for (wait, idle, steps, first, second) in rounds {
            now += wait;
            if idle < 5 || now - led > 8 {
                world.lead(now, if now - led > 8 { 8 } else { steps });
                led = now;
            }
            for (who, looks) in [first, second].into_iter().enumerate() {
                if looks || now - late[who] > 8 {
                    world.follow(who, now);
                    late[who] = now;
                }
                let leaf = world.leaves[who].clone().unwrap();
                prop_assert!(now < leaf.ends, "{who} serves an expired leaf at {now}");
                for bundle in world.believed(now) {
                    prop_assert!(bundle.contains(&leaf.signer), "{} is not in {bundle:?} at {now}", leaf.signer);
                }
            }
            prop_assert!(world.store.len() <= 3, "{:?}", world.store);
        }
        prop_assert!(now < 250 || world.made > 1, "no rotation in {now} s");
    }
}

fn unix() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs()
}

fn localhost() -> Vec<String> {
    names(&["localhost", "127.0.0.1"])
}

async fn server(served: Arc<Served>) -> (std::net::SocketAddr, tokio::sync::watch::Sender<Phase>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (phase, shutdown) = Shutdown::new();
    let port = Port {
        name: "webhook",
        bounds: Bounds::default(),
        tls: Some(acceptor(served).unwrap()),
        router: Router::new(),
        metrics: Arc::new(metrics::registry()),
    };
    tokio::spawn(serve(listener, port, shutdown));
    (address, phase)
}

#[tokio::test]
async fn a_call_fails_with_another_bundle_or_name() {
    let own = authority::make(unix(), Lifetimes::default()).unwrap();
    let others = authority::make(unix(), Lifetimes::default()).unwrap();
    let served = Arc::new(Served::default());
    let (address, _phase) = server(served.clone()).await;
    let bundle = [own.certificate.clone()];
    assert!(
        call(address, "localhost", &bundle).await.is_err(),
        "nothing is served yet"
    );
    served.set(authority::leaf(&own, &localhost(), unix(), Lifetimes::default()).unwrap());
    call(address, "localhost", &bundle).await.unwrap();
    call(address, "127.0.0.1", &bundle).await.unwrap();
    let both = [others.certificate.clone(), own.certificate.clone()];
    call(address, "localhost", &both).await.unwrap();
    let wrong = call(address, "localhost", &[others.certificate]).await;
    assert!(
        wrong
            .unwrap_err()
            .to_string()
            .contains("invalid peer certificate")
    );
    assert!(call(address, "elsewhere", &bundle).await.is_err());
}

#[tokio::test]
async fn an_expired_certificate_does_not_pass() {
    let past = unix() - 2 * LIFETIMES.authority;
    let old = authority::make(past, LIFETIMES).unwrap();
    let served = Arc::new(Served::default());
    let (address, _phase) = server(served.clone()).await;
    served.set(authority::leaf(&old, &localhost(), past, LIFETIMES).unwrap());
    let result = call(address, "localhost", &[old.certificate]).await;
    assert!(result.unwrap_err().to_string().contains("xpired"));
}

#[test]
fn certificates_are_backdated_and_end_at_their_stated_time() {
    let now = unix();
    let own = authority::make(now, LIFETIMES).unwrap();
    let leaf = authority::leaf(&own, &localhost(), now, LIFETIMES).unwrap();
    assert_eq!(authority::expiry(&leaf.cert).unwrap(), now + LIFETIMES.leaf);
    assert_eq!(own.ends, now + LIFETIMES.authority);
}

#[test]
fn a_bundle_is_parsed_with_text_around_its_certificates() {
    let a = authority::make(unix(), LIFETIMES).unwrap().certificate;
    let b = authority::make(unix(), LIFETIMES).unwrap().certificate;
    let text = format!("# own\r\n{}\n\n{b}trailing", a.replace('\n', "\r\n"));
    assert_eq!(authority::blocks(&text), [a, b]);
    let broken = "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----";
    assert_eq!(authority::blocks(broken), Vec::<String>::new());
    assert_eq!(authority::blocks(""), Vec::<String>::new());
}

#[tokio::test]
async fn changed_files_are_reloaded_and_a_partial_change_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let mut files = Files::new(folder.path().to_owned());
    let missing = files.changed().await.unwrap_err().to_string();
    assert!(missing.contains("tls.crt"), "{missing}");
    let pair = || {
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(localhost()).unwrap();
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    };
    let (first, second) = (pair(), pair());
    std::fs::write(path("tls.crt"), &first.0).unwrap();
    std::fs::write(path("tls.key"), &first.1).unwrap();
    assert!(files.changed().await.unwrap().is_some());
    assert!(files.changed().await.unwrap().is_none());
    std::fs::write(path("tls.crt"), &second.0).unwrap();
    assert!(files.changed().await.is_err());
    std::fs::write(path("tls.key"), &second.1).unwrap();
    assert!(files.changed().await.unwrap().is_some());
}
