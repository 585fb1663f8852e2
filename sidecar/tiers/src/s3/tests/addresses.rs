//! Where requests go and what they say, by setting: seen at the HTTP client, where nothing is sent.

use super::uploads;
use crate::s3::Uploads;
use crate::s3::request::{Requests, options};
use crate::testing::suite::{Memory, Sample};
use crate::{Stored, TierError};
use aws_credential_types::Credentials;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::http::{HttpRequest, HttpResponse};
use aws_sdk_s3::config::{HttpClient, Region, RuntimeComponents};
use aws_sdk_s3::primitives::SdkBody;
use aws_smithy_runtime_api::client::http::{
    HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpConnector,
};
use kvcachepool_protocol::config::{AddressingStyle, Checksums, S3};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A request: URL and headers.
type Sent = (String, BTreeMap<String, String>);

/// Remembers requests; a session is granted, all else is well.
#[derive(Debug, Clone, Default)]
struct Recorder(Arc<Mutex<Vec<Sent>>>);

impl HttpConnector for Recorder {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let headers = request.headers().iter();
        let headers = headers.map(|(name, value)| (name.to_string(), value.to_string()));
        let url = request.uri().to_string();
        let body = match url.contains("?session") {
            true => {
                "<CreateSessionResult><Credentials><AccessKeyId>session-id</AccessKeyId><SecretAccessKey>s</SecretAccessKey>\
                     <SessionToken>session-token</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>"
            }
            false if url.contains("?uploads") => {
                "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
            }
            false => "",
        };
        self.0.lock().push((url, headers.collect()));
        // No object is there.
        let status: u16 = if request.method() == "HEAD" { 404 } else { 200 };
        let answer = HttpResponse::new(status.try_into().unwrap(), SdkBody::from(body));
        HttpConnectorFuture::ready(Ok(answer))
    }
}

impl HttpClient for Recorder {
    fn http_connector(
        &self,
        _: &HttpConnectorSettings,
        _: &RuntimeComponents,
    ) -> SharedHttpConnector {
        SharedHttpConnector::new(self.clone())
    }
}

/// What a put sends.
async fn sent(config: &S3) -> Vec<Sent> {
    let (stored, sent) = sent_in(config, uploads()).await;
    stored.unwrap();
    sent
}

/// The same, in parts of some length, and what became of it.
async fn sent_in(config: &S3, uploads: Uploads) -> (Result<Stored, TierError>, Vec<Sent>) {
    let recorder = Recorder::default();
    let keys = Credentials::new("an-id", "a-secret", None, None, "test");
    let mut builder = options(config)
        .unwrap()
        .http_client(recorder.clone())
        .credentials_provider(keys);
    if config.endpoint.is_empty() {
        builder = builder.region(Region::new(config.region.clone()));
    }
    let client = Client::from_conf(builder.build());
    let requests = Requests::new(client, Arc::default(), config);
    let put = Sample::new(1, 0, &[5_000]).put(&Memory::new(1 << 20));
    let stored = requests.put(&put, uploads).await;
    (stored, recorder.0.lock().clone())
}

fn aws(bucket: &str) -> S3 {
    S3 {
        bucket: bucket.into(),
        region: "eu-west-3".into(),
        ..S3::default()
    }
}

#[tokio::test]
async fn the_buckets_name_stands_where_the_server_wants_it() {
    let at = |endpoint: &str| S3 {
        endpoint: endpoint.into(),
        ..aws("kv-bucket")
    };
    let style = |addressing_style, endpoint: &str| S3 {
        addressing_style,
        ..at(endpoint)
    };
    for (config, start) in [
        (
            aws("kv-bucket"),
            "https://kv-bucket.s3.eu-west-3.amazonaws.com/",
        ),
        (
            style(AddressingStyle::Path, ""),
            "https://s3.eu-west-3.amazonaws.com/kv-bucket/",
        ),
        (
            at("http://10.0.0.1:9000"),
            "http://10.0.0.1:9000/kv-bucket/",
        ),
        (
            at("http://[fd00::1]:9000"),
            "http://[fd00::1]:9000/kv-bucket/",
        ),
        (at("http://minio:9000"), "http://minio:9000/kv-bucket/"),
        (
            at("https://minio.ns.svc:9000"),
            "https://minio.ns.svc:9000/kv-bucket/",
        ),
        (
            at("https://minio.ns.svc.cluster.local"),
            "https://minio.ns.svc.cluster.local/kv-bucket/",
        ),
        (
            at("https://cwobject.com"),
            "https://kv-bucket.cwobject.com/",
        ),
        (at("http://cwlota.com"), "http://kv-bucket.cwlota.com/"),
        (
            style(AddressingStyle::Path, "https://cwobject.com"),
            "https://cwobject.com/kv-bucket/",
        ),
        (
            style(AddressingStyle::VirtualHost, "http://minio:9000"),
            "http://kv-bucket.minio:9000/",
        ),
        (
            S3 {
                accelerate: true,
                ..aws("kv-bucket")
            },
            "https://kv-bucket.s3-accelerate.amazonaws.com/",
        ),
        (
            S3 {
                prefix: "team/a".into(),
                ..aws("kv-bucket")
            },
            "https://kv-bucket.s3.eu-west-3.amazonaws.com/team/a/",
        ),
    ] {
        let sent = sent(&config).await;
        assert_eq!(sent.len(), 1, "{sent:?}");
        assert!(
            sent[0].0.starts_with(start),
            "{} is not at {start}",
            sent[0].0
        );
        let auth = &sent[0].1["authorization"];
        let region = "/eu-west-3/s3/aws4_request";
        assert!(auth.contains("an-id/") && auth.contains(region), "{auth}");
    }
}

#[tokio::test]
async fn a_directory_bucket_is_spoken_to_in_its_zone_by_a_session() {
    let sent = sent(&aws("kv--euw3-az1--x-s3")).await;
    let host = "https://kv--euw3-az1--x-s3.s3express-euw3-az1.eu-west-3.amazonaws.com/";
    assert_eq!(sent.len(), 2, "{sent:?}");
    assert!(
        sent.iter().all(|(url, _)| url.starts_with(host)),
        "{sent:?}"
    );
    assert!(sent[0].0.contains("?session"), "{sent:?}");
    let headers = &sent[1].1;
    assert_eq!(headers["x-amz-s3session-token"], "session-token");
    assert!(
        headers["authorization"].contains("session-id/"),
        "{headers:?}"
    );
    assert!(
        headers["authorization"].contains("/s3express/"),
        "{headers:?}"
    );
}

#[tokio::test]
async fn checksums_of_s3_are_sent_only_where_they_are_wanted() {
    let plain = sent(&aws("kv-bucket")).await;
    let (_, headers) = &plain[0];
    assert!(
        headers.keys().all(|name| !name.contains("checksum")),
        "{headers:?}"
    );
    assert!(!headers.contains_key("x-amz-trailer"), "{headers:?}");
    assert_eq!(headers["x-amz-content-sha256"], "UNSIGNED-PAYLOAD");
    assert_eq!(headers["if-none-match"], "*");
    let length: u64 = headers["content-length"].parse().unwrap();
    assert_eq!(length, Sample::new(1, 0, &[5_000]).object.total_bytes());
    let config = S3 {
        checksums: Checksums::WhenSupported,
        ..aws("kv-bucket")
    };
    let summed = sent(&config).await;
    let (_, headers) = &summed[0];
    assert_eq!(
        headers["x-amz-trailer"], "x-amz-checksum-crc32",
        "{headers:?}"
    );
}

#[tokio::test]
async fn an_upload_in_parts_says_how_they_are_summed_up_where_they_are() {
    for (checksums, wanted) in [
        (Checksums::WhenRequired, None),
        (Checksums::WhenSupported, Some("CRC32")),
    ] {
        let config = S3 {
            checksums,
            ..aws("kv-bucket")
        };
        let in_parts = Uploads {
            from_bytes: 0,
            ..uploads()
        };
        let (_, sent) = sent_in(&config, in_parts).await;
        let begun = sent.iter().find(|(url, _)| url.contains("?uploads"));
        let (_, headers) = begun.unwrap();
        let said = headers.get("x-amz-checksum-algorithm");
        assert_eq!(said.map(String::as_str), wanted, "{headers:?}");
    }
}
