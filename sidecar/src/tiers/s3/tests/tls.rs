//! TLS to a real server whose certificate only a file of ours vouches for.

use super::Server;
use crate::tiers::s3::{Options, S3};
use crate::tiers::suite::{Memory, Sample};
use crate::tiers::{Cause, Stored, Tier};
use kvcachepool_protocol::config::{self, HttpVersion};
use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;
use tokio_rustls::TlsAcceptor;

/// An authority, and a server's certificate and key, as files.
pub struct Files {
    folder: TempDir,
}

impl Files {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let mut authority = rcgen::CertificateParams::new(vec![]).unwrap();
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let certificate = authority.self_signed(&key).unwrap();
        let issuer = rcgen::Issuer::new(authority, key);
        let server_key = rcgen::KeyPair::generate().unwrap();
        let names = vec!["127.0.0.1".to_string()];
        let server = rcgen::CertificateParams::new(names).unwrap();
        let server = server.signed_by(&server_key, &issuer).unwrap();
        for (name, text) in [
            ("ca.crt", certificate.pem()),
            ("tls.crt", server.pem()),
            ("tls.key", server_key.serialize_pem()),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        Self { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

/// Speaks TLS by these files, and offers these versions of HTTP.
pub fn acceptor(files: &Files, offers: &[&[u8]]) -> TlsAcceptor {
    let pem = |name| std::fs::read(files.path(name)).unwrap();
    let chain: Result<Vec<_>, _> =
        CertificateDer::pem_slice_iter(&pem("tls.crt")).collect::<Result<_, _>>();
    let key = PrivateKeyDer::from_pem_slice(&pem("tls.key")).unwrap();
    let provider = Arc::new(aws_lc_rs::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain.unwrap(), key)
        .unwrap();
    config.alpn_protocols = offers.iter().map(|version| version.to_vec()).collect();
    TlsAcceptor::from(Arc::new(config))
}

#[tokio::test]
async fn a_server_is_trusted_by_the_file_that_vouches_for_it_and_by_no_other() {
    let (right, other) = (Files::new(), Files::new());
    let [certificate, key] =
        ["tls.crt", "tls.key"].map(|name| right.path(name).display().to_string());
    let server = Server::start_with(&["--cert", &certificate, "--key", &key]);
    let plain = server.config();
    let with = |ca: Option<PathBuf>, http_version| config::S3 {
        endpoint: plain.endpoint.replace("http://", "https://"),
        ca,
        http_version,
        ..plain.clone()
    };
    for version in [HttpVersion::Http1, HttpVersion::Http2] {
        let config = with(Some(right.path("ca.crt")), version);
        let tier = S3::open(&config, Options::default()).await.unwrap();
        let (memory, sample) = (
            Memory::new(32 << 20),
            Sample::new(version as u64, 0, &[9 << 20]),
        );
        assert_eq!(tier.put(sample.put(&memory)).await, Ok(Stored::New));
        let get = sample.get_all(&memory);
        tier.get(get.clone()).await.unwrap();
        assert!(sample.lies_in(&get.places));
    }
    let config = with(Some(other.path("ca.crt")), HttpVersion::Auto);
    let error = S3::open(&config, Options::default()).await.unwrap_err();
    assert_eq!(error.cause, Cause::Config, "{error}");
    assert!(
        error.detail.contains("TLS") && error.detail.contains("s3.ca"),
        "{error}"
    );
    // Spoken to without TLS, a server of TLS is no server of ours.
    let error = S3::open(&plain, Options::default()).await.unwrap_err();
    assert!(
        [Cause::Protocol, Cause::Unreachable].contains(&error.cause),
        "{error}"
    );
}
