//! Maps the failure of a request to a [`Cause`], from status, code and error chain, and names the missing permission.

use super::connect::{NoTunnel, PLAIN, Unshaken};
use super::http::{Malformed, Unanswered};
use crate::{Cause, Kind, TierError};
use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_s3::config::http::HttpResponse;
use aws_sdk_s3::error::{ConnectorError, ProvideErrorMetadata, SdkError};
use aws_sdk_s3::operation::create_session::CreateSessionError;
use std::error::Error;

/// Limit of a server's text in messages.
const SHOWN: usize = 200;

/// A request as its errors describe it: the required permission, the bucket, and the object, if any.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// For example `s3:GetObject`.
    pub permission: &'static str,
    pub bucket: &'a str,
    /// Its full key.
    pub object: Option<&'a str>,
}

/// The server's response, if any.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Answer {
    /// HTTP status; 0 without a response.
    pub status: u16,
    /// Error code of S3; empty without a body.
    pub code: String,
    pub message: String,
    /// The bucket's region, if the server reports it.
    pub region: Option<String>,
    /// The server reports that it accepts only TLS.
    pub wants_tls: bool,
}

impl Answer {
    /// Reads the response of a failed request.
    pub fn of<E: ProvideErrorMetadata>(error: &SdkError<E, HttpResponse>) -> Self {
        let raw = error.raw_response();
        let meta = match error {
            SdkError::ServiceError(e) => Some(e.err().meta()),
            _ => None,
        };
        let text = |text: Option<&str>| text.unwrap_or_default().chars().take(SHOWN).collect();
        let region = raw.and_then(|raw| raw.headers().get("x-amz-bucket-region"));
        let status = raw.map_or(0, |raw| raw.status().as_u16());
        let code: String = text(meta.and_then(|meta| meta.code()));
        // Only human-readable, and different for each server.
        let said = raw.and_then(|raw| raw.body().bytes()).unwrap_or_default();
        let of_tls = || String::from_utf8_lossy(said).contains("HTTPS");
        Self {
            wants_tls: status == 400 && code.is_empty() && of_tls(),
            status,
            code,
            message: text(meta.and_then(|meta| meta.message())),
            region: region.map(str::to_string),
        }
    }

    /// Whether the server does not support such a request.
    pub fn not_supported(&self) -> bool {
        matches!(self.status, 405 | 501)
            || matches!(self.code.as_str(), "NotImplemented" | "MethodNotAllowed")
    }

    /// Whether a condition of the request does not hold. An error may come with the status of success.
    pub fn unmet(&self) -> bool {
        self.status == 412 || self.code == "PreconditionFailed"
    }

    /// Whether another request about the same name or upload was in the way.
    pub fn conflicts(&self) -> bool {
        self.status == 409
            || matches!(
                self.code.as_str(),
                "ConditionalRequestConflict" | "OperationAborted" | "NoSuchUpload"
            )
    }

    /// The code is more specific than the status.
    fn cause(&self) -> Cause {
        match self.code.as_str() {
            "NoSuchBucket" => return Cause::Gone,
            "NoSuchKey" | "NotFound" => return Cause::Missing,
            "ExpiredToken"
            | "InvalidToken"
            | "InvalidAccessKeyId"
            | "SignatureDoesNotMatch"
            | "TokenRefreshRequired"
            | "RequestTimeTooSkewed"
            | "MissingSecurityHeader"
            | "InvalidSecurity"
            | "InvalidClientTokenId"
            | "UnrecognizedClientException" => {
                return Cause::Unauthenticated;
            }
            "AuthorizationHeaderMalformed"
            | "PermanentRedirect"
            | "TemporaryRedirect"
            | "IllegalLocationConstraintException"
            | "InvalidBucketName" => return Cause::Config,
            "QuotaExceeded" | "XMinioStorageFull" | "InsufficientCapacity" => return Cause::Full,
            "RequestTimeout" => return Cause::Timeout,
            "ConditionalRequestConflict" | "OperationAborted" | "NoSuchUpload" => {
                return Cause::Busy;
            }
            // The bytes were corrupted on their way, or the server failed on them.
            "InternalError" | "BadDigest" | "IncompleteBody" | "XAmzContentChecksumMismatch" => {
                return Cause::Unreachable;
            }
            "SlowDown"
            | "Throttling"
            | "ThrottlingException"
            | "RequestLimitExceeded"
            | "TooManyRequests"
            | "ServiceUnavailable" => return Cause::Throttled,
            _ => {}
        }
        match self.status {
            301 | 302 | 307 | 308 => Cause::Config,
            400 if self.wants_tls => Cause::Config,
            401 => Cause::Unauthenticated,
            403 => Cause::Denied,
            404 => Cause::Missing,
            409 => Cause::Busy,
            416 => Cause::Corrupt,
            429 | 503 => Cause::Throttled,
            507 => Cause::Full,
            500.. => Cause::Unreachable,
            _ => Cause::Protocol,
        }
    }

    /// Converts the response to an error.
    pub fn failed(&self, asked: Asked<'_>) -> TierError {
        let (permission, bucket) = (asked.permission, asked.bucket);
        let (cause, shown) = (self.cause(), self.shown());
        let detail = match (cause, &self.region) {
            (Cause::Denied, _) => format!("{permission} denied on bucket {bucket} ({shown})"),
            (Cause::Config, Some(region)) => {
                format!("bucket {bucket} is in region {region}; set s3.region to it ({shown})")
            }
            (Cause::Config, None) if self.wants_tls => {
                format!("the port uses TLS: use https:// in s3.endpoint ({shown})")
            }
            (Cause::Gone, _) => format!("bucket {bucket} does not exist ({shown})"),
            (Cause::Missing, _) => "the object does not exist".to_string(),
            _ => format!("{permission} on bucket {bucket}: {shown}"),
        };
        about(asked, TierError::new(Kind::S3, cause, detail))
    }

    fn shown(&self) -> String {
        let parts = [self.code.as_str(), self.message.as_str()];
        let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        match parts.is_empty() {
            true => self.status.to_string(),
            false => format!("{} {}", self.status, parts.join(": ")),
        }
    }
}

/// The error of a failed request.
pub fn failed<E>(asked: Asked<'_>, error: &SdkError<E, HttpResponse>) -> TierError
where
    E: ProvideErrorMetadata + Error + 'static,
{
    let (permission, bucket) = (asked.permission, asked.bucket);
    let (cause, detail) = match error {
        SdkError::ServiceError(_) => return Answer::of(error).failed(asked),
        SdkError::ResponseError(_) => {
            let answer = Answer::of(error);
            // A response that cannot be parsed, unless its status is sufficient.
            if answer.status >= 300 {
                return answer.failed(asked);
            }
            let why = texts(error);
            (
                Cause::Protocol,
                format!("{permission} on bucket {bucket}: {why}"),
            )
        }
        SdkError::TimeoutError(_) => {
            let why = "no response in time";
            (
                Cause::Timeout,
                format!("{permission} on bucket {bucket}: {why}"),
            )
        }
        other => {
            if let Some(e) = session(other) {
                let permission = "s3express:CreateSession";
                return failed(
                    Asked {
                        permission,
                        ..asked
                    },
                    e,
                );
            }
            let (cause, why) = of_chain(other);
            (cause, format!("{permission} on bucket {bucket}: {why}"))
        }
    };
    about(asked, TierError::new(Kind::S3, cause, detail))
}

/// Why a directory bucket gave no session.
fn session<'a>(
    error: &'a (dyn Error + 'static),
) -> Option<&'a SdkError<CreateSessionError, HttpResponse>> {
    let mut causes = std::iter::successors(inner(error), |e| inner(*e));
    causes.find_map(|e| e.downcast_ref())
}

/// The error of a response that broke off while its body was read.
pub fn broken(asked: Asked<'_>, error: &(dyn Error + 'static)) -> TierError {
    let (permission, bucket) = (asked.permission, asked.bucket);
    let detail = format!(
        "{permission} on bucket {bucket}: the response broke off: {}",
        texts(error)
    );
    about(asked, TierError::new(Kind::S3, Cause::Unreachable, detail))
}

/// An error in the content of a response.
pub fn found(asked: Asked<'_>, cause: Cause, detail: impl Into<String>) -> TierError {
    about(asked, TierError::new(Kind::S3, cause, detail))
}

fn about(asked: Asked<'_>, error: TierError) -> TierError {
    match asked.object {
        Some(object) => error.about(object),
        None => error,
    }
}

/// Why there was no response.
fn of_chain(error: &(dyn Error + 'static)) -> (Cause, String) {
    let chain = || std::iter::successors(Some(error), |e| inner(*e));
    let credentials = chain().find_map(|e| Some((e, e.downcast_ref::<CredentialsError>()?)));
    if let Some((e, kind)) = credentials {
        return (of_credentials(kind), texts(e));
    }
    if let Some(malformed) = chain().find(|e| e.is::<Malformed>()) {
        return (Cause::Protocol, malformed.to_string());
    }
    if let Some(no_tunnel) = chain().find(|e| e.is::<NoTunnel>()) {
        return (Cause::Unreachable, texts(no_tunnel));
    }
    if let Some(tls) = chain().find_map(|e| e.downcast_ref::<rustls::Error>()) {
        return of_tls(tls);
    }
    if let Some(unshaken) = chain().find(|e| e.is::<Unshaken>()) {
        return (Cause::Unreachable, unshaken.to_string());
    }
    let broke = chain().any(|e| e.is::<hyper::Error>());
    let cause = match broke || chain().any(|e| e.is::<std::io::Error>()) {
        true => Cause::Unreachable,
        // An error of the SDK without a type: the credential server did not answer.
        false if chain().any(|e| e.to_string().contains("timed out")) => Cause::Timeout,
        false => Cause::Config,
    };
    let mut unanswered = chain().filter_map(|e| e.downcast_ref::<Unanswered>());
    let hint = match broke && unanswered.any(|e| e.never) {
        true => "; is this a port of TLS (https://)?",
        false => "",
    };
    (cause, texts(error) + hint)
}

/// Why there are no credentials. Temporary reasons are worth a retry.
fn of_credentials(error: &CredentialsError) -> Cause {
    let chain = || std::iter::successors(Some(error as &(dyn Error + 'static)), |e| inner(*e));
    let unanswered = |e: &(dyn Error + 'static)| e.is::<ConnectorError>() || e.is::<hyper::Error>();
    match error {
        CredentialsError::ProviderTimedOut(_) => Cause::Timeout,
        _ if chain().any(unanswered) => Cause::Unreachable,
        _ => Cause::Unauthenticated,
    }
}

/// An untrusted certificate, incompatible versions and a wrong protocol are permanent; another broken handshake may be that of a server
/// that restarts.
fn of_tls(error: &rustls::Error) -> (Cause, String) {
    use rustls::{CertificateError, Error as Tls, InvalidMessage};
    match error {
        Tls::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => (
            Cause::Config,
            format!("TLS: {error}; s3.endpoint names another host than the certificate"),
        ),
        Tls::InvalidCertificate(_) | Tls::NoCertificatesPresented | Tls::UnsupportedNameType => (
            Cause::Config,
            format!("TLS: {error}; set s3.ca to the authorities to trust"),
        ),
        Tls::PeerIncompatible(_) => (Cause::Config, format!("TLS: {error}")),
        Tls::InvalidMessage(InvalidMessage::InvalidContentType) => {
            (Cause::Config, format!("TLS: {error}; {PLAIN}"))
        }
        _ => (Cause::Unreachable, format!("TLS: {error}")),
    }
}

/// The next error of a chain. An `io::Error` does not report its inner error as source, but that one's source.
fn inner<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a (dyn Error + 'static)> {
    match error
        .downcast_ref::<std::io::Error>()
        .and_then(|e| e.get_ref())
    {
        Some(carried) => Some(carried),
        None => error.source(),
    }
}

/// The texts of a chain from the outside in, without repetitions.
fn texts(error: &(dyn Error + 'static)) -> String {
    let mut told: Vec<String> = Vec::new();
    for e in std::iter::successors(Some(error), |e| inner(*e)) {
        let text = e.to_string();
        if !told.iter().any(|t| t.contains(&text)) {
            told.push(text);
        }
    }
    told.join(": ").chars().take(2 * SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::{AlertDescription, CertificateError, InvalidMessage, PeerIncompatible};
    use std::time::Duration;

    #[test]
    fn credentials_that_there_may_be_in_a_moment_are_worth_another_try() {
        let refused = || std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let unanswered = ConnectorError::io(refused().into());
        for (error, cause) in [
            (
                CredentialsError::provider_timed_out(Duration::from_secs(1)),
                Cause::Timeout,
            ),
            (
                CredentialsError::provider_error(unanswered),
                Cause::Unreachable,
            ),
            // A file that is not there.
            (
                CredentialsError::provider_error(refused()),
                Cause::Unauthenticated,
            ),
            (CredentialsError::not_loaded("none"), Cause::Unauthenticated),
        ] {
            let (found, _) = of_chain(&error);
            assert_eq!(found, cause, "{error:?}");
        }
    }

    #[test]
    fn neither_a_certificate_nor_a_port_without_tls_gets_better_and_a_handshake_that_broke_may() {
        for (error, cause) in [
            (
                rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer),
                Cause::Config,
            ),
            (
                rustls::Error::PeerIncompatible(PeerIncompatible::Tls12NotOffered),
                Cause::Config,
            ),
            (
                rustls::Error::AlertReceived(AlertDescription::InternalError),
                Cause::Unreachable,
            ),
            (
                rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType),
                Cause::Config,
            ),
            (
                rustls::Error::InvalidMessage(InvalidMessage::MessageTooLarge),
                Cause::Unreachable,
            ),
            (rustls::Error::HandshakeNotComplete, Cause::Unreachable),
        ] {
            let (found, told) = of_chain(&error);
            assert_eq!(found, cause, "{told}");
            assert!(told.starts_with("TLS: "), "{told}");
        }
    }
}
