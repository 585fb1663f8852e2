//! Creates certificates: self-signed authorities, and leaves signed by them. ECDSA over P-256, which every API server supports.

use super::PkiError;
use super::plan::{Authority, Lifetimes, ends};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, date_time_ymd,
};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use std::sync::Arc;
use std::time::Duration;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Certificates are backdated by this many seconds, for API servers whose clock is slow.
const BACKDATED: u64 = 600;

impl From<rcgen::Error> for PkiError {
    fn from(e: rcgen::Error) -> Self {
        Self::Certificate(e.to_string())
    }
}

impl From<rustls::Error> for PkiError {
    fn from(e: rustls::Error) -> Self {
        Self::Certificate(e.to_string())
    }
}

fn params(
    names: &[String],
    title: String,
    now: u64,
    ends: u64,
) -> Result<CertificateParams, PkiError> {
    let epoch = date_time_ymd(1970, 1, 1);
    let mut params = CertificateParams::new(names)?;
    params.not_before = epoch + Duration::from_secs(now.saturating_sub(BACKDATED));
    params.not_after = epoch + Duration::from_secs(ends);
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, title);
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

/// A new authority, which is not trusted yet.
pub fn make(now: u64, lifetimes: Lifetimes) -> Result<Authority, PkiError> {
    let ends = now.saturating_add(lifetimes.authority);
    let title = format!("kvcachepool webhook authority {now}");
    let mut params = params(&[], title, now, ends)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?;
    Ok(Authority {
        certificate: normal(&certificate.pem()),
        key: key.serialize_pem(),
        ends,
        trusted_since: None,
    })
}

/// A certificate of a server for these names, which ends at this time, and its key, both as PEM. Clients trust the certificate itself.
/// Servers of a cluster are also clients of each other.
pub fn self_signed(names: &[String], now: u64, ends: u64) -> Result<(String, String), PkiError> {
    let title = "kvcachepool server".to_owned();
    let mut params = params(names, title, now, ends)?;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?;
    Ok((normal(&certificate.pem()), key.serialize_pem()))
}

/// Checks that a stored authority can sign: certificate and key are readable and belong together.
pub fn usable(stored: &Authority) -> Result<(), PkiError> {
    let key = KeyPair::from_pem(&stored.key)?;
    let certificate = CertificateDer::from_pem_slice(stored.certificate.as_bytes())
        .map_err(|e| PkiError::Certificate(format!("certificate authority: {e}")))?;
    let (_, parsed) = X509Certificate::from_der(&certificate)
        .map_err(|e| PkiError::Certificate(format!("certificate authority: {e}")))?;
    match parsed.public_key().subject_public_key.data == key.public_key_raw() {
        true => Ok(()),
        false => Err(PkiError::Certificate(
            "the key of the certificate authority does not match its certificate".to_owned(),
        )),
    }
}

/// A new leaf with its key, which never leaves this process.
pub fn leaf(
    signer: &Authority,
    names: &[String],
    now: u64,
    lifetimes: Lifetimes,
) -> Result<Arc<CertifiedKey>, PkiError> {
    let issuer = Issuer::from_ca_cert_pem(&signer.certificate, KeyPair::from_pem(&signer.key)?)?;
    let title = "kvcachepool webhook".to_owned();
    let mut params = params(names, title, now, ends(signer, now, lifetimes))?;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &issuer)?;
    let private = PrivateKeyDer::try_from(key.serialize_der())
        .map_err(|e| PkiError::Certificate(e.to_owned()))?;
    certified(vec![certificate.der().clone()], private)
}

/// Certificate chain and key of a server. Errors: they do not belong together.
pub fn certified(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<Arc<CertifiedKey>, PkiError> {
    Ok(Arc::new(CertifiedKey::from_der(
        chain,
        key,
        &default_provider(),
    )?))
}

/// Expiry of the first certificate of a chain, in Unix seconds.
pub fn expiry(chain: &[CertificateDer<'_>]) -> Result<u64, PkiError> {
    let first = chain
        .first()
        .ok_or_else(|| PkiError::Certificate("the chain is empty".to_owned()))?;
    let (_, certificate) =
        X509Certificate::from_der(first).map_err(|e| PkiError::Certificate(e.to_string()))?;
    Ok(u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0))
}

/// The certificates of a PEM text in a normal form that can be compared.
pub fn blocks(pem: &str) -> Vec<String> {
    const END: &str = "-----END CERTIFICATE-----";
    pem.split_inclusive(END)
        .filter_map(|block| {
            block
                .find("-----BEGIN CERTIFICATE-----")
                .map(|at| &block[at..])
        })
        .filter(|block| CertificateDer::from_pem_slice(block.as_bytes()).is_ok())
        .map(normal)
        .collect()
}

fn normal(pem: &str) -> String {
    let mut lines: Vec<&str> = pem.lines().map(str::trim).collect();
    lines.retain(|line| !line.is_empty());
    lines.join("\n") + "\n"
}
