//! Servers that speak TLS with certificates of their own authority.

use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// The files `ca.crt` of an authority, and `tls.crt` and `tls.key` of a server.
#[derive(Debug)]
pub struct Certificates {
    folder: TempDir,
}

impl Certificates {
    /// For a server with these names.
    pub fn new(names: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let mut authority = rcgen::CertificateParams::new(vec![]).unwrap();
        // OpenSSL takes a certificate whose issuer has its name for one that nobody else signed.
        let name = rcgen::DnType::CommonName;
        authority.distinguished_name.push(name, "authority");
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let certificate = authority.self_signed(&key).unwrap();
        let issuer = rcgen::Issuer::new(authority, key);
        let server_key = rcgen::KeyPair::generate().unwrap();
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
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

    /// For a server at 127.0.0.1.
    pub fn local() -> Self {
        Self::new(&["127.0.0.1"])
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The server's side of handshakes.
    pub fn acceptor(&self) -> TlsAcceptor {
        let certificate = CertificateDer::from_pem_file(self.path("tls.crt")).unwrap();
        let key = PrivateKeyDer::from_pem_file(self.path("tls.key")).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .unwrap();
        TlsAcceptor::from(Arc::new(config))
    }

    /// Speaks TLS in front of the server at `host:port`; returns its port.
    pub async fn front(&self, server: &str) -> u16 {
        let (acceptor, server) = (self.acceptor(), server.to_owned());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (acceptor, server) = (acceptor.clone(), server.clone());
                tokio::spawn(async move {
                    let mut client = acceptor.accept(client).await?;
                    let mut server = TcpStream::connect(server).await?;
                    copy_bidirectional(&mut client, &mut server).await
                });
            }
        });
        port
    }
}
