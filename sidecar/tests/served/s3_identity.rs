//! The web identity of a pod (IRSA): the token that Kubernetes writes, and writes anew, becomes keys of a role that end soon.

use crate::faulty::{Faulty, Reply};
use crate::harness::{Sidecar, wait_for};
use crate::s3::S3;
use crate::store::Store;
use crate::vllm::{Vllm, hashes};
use aws_sdk_s3::primitives::{DateTime, DateTimeFormat};
use parking_lot::Mutex;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// Keys of the role are good for so long.
const GOOD_FOR: Duration = Duration::from_secs(3);

/// A token service, and a bucket that takes the keys of the token that is good now, and no others.
struct Cloud {
    folder: TempDir,
    good: Arc<Mutex<String>>,
    service: Faulty,
    bucket: Faulty,
    _runtime: Runtime,
}

impl Cloud {
    fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let good: Arc<Mutex<String>> = Arc::default();
        let (knows, store) = (good.clone(), Store::default());
        let service = Faulty::start(move |asked| {
            let form = String::from_utf8(asked.body.clone()).unwrap();
            let token = form.split("WebIdentityToken=").nth(1).unwrap();
            let token = token.split('&').next().unwrap();
            match form.contains("role%2Fkv") && token == *knows.lock() {
                true => keys(token),
                false => refused(),
            }
        });
        let service = runtime.block_on(service);
        let takes = good.clone();
        let bucket = Faulty::start(move |asked| {
            let token = takes.lock().clone();
            let signed = asked
                .header("authorization")
                .contains(&format!("Credential=id-{token}/"));
            match signed && asked.header("x-amz-security-token") == format!("session-{token}") {
                true => store.answer(asked),
                false => Reply::error(400, "ExpiredToken"),
            }
        });
        let bucket = runtime.block_on(bucket);
        Self {
            folder: tempfile::tempdir().unwrap(),
            good,
            service,
            bucket,
            _runtime: runtime,
        }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("token")
    }

    /// Kubernetes writes a token.
    fn write(&self, token: &str) {
        std::fs::write(self.file(), token).unwrap();
    }

    /// From now on this token is good, and no other.
    fn takes(&self, token: &str) {
        *self.good.lock() = token.into();
    }

    /// A sidecar in a pod of the role.
    fn sidecar(&self) -> Sidecar {
        let bucket = self.bucket.config();
        let mut sidecar = Sidecar::prepare(&format!(
            "memory: {{size: 64Mi}}\ncache: {{minLoadTokens: 0}}\ns3: {{bucket: {}, endpoint: \"{}\"}}\n",
            bucket.bucket, bucket.endpoint
        ));
        sidecar.run_by(&format!(
            "export AWS_ROLE_ARN=arn:aws:iam::123456789012:role/kv AWS_WEB_IDENTITY_TOKEN_FILE={} AWS_ENDPOINT_URL_STS={}; exec \"$@\"",
            self.file().display(),
            self.service.config().endpoint,
        ));
        sidecar.wait_socket();
        sidecar.wait_populated();
        sidecar
    }
}

fn keys(token: &str) -> Reply {
    let end = DateTime::from(SystemTime::now() + GOOD_FOR);
    let end = end.fmt(DateTimeFormat::DateTime).unwrap();
    let body = format!(
        "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>id-{token}</AccessKeyId>\
         <SecretAccessKey>a-secret</SecretAccessKey><SessionToken>session-{token}</SessionToken><Expiration>{end}</Expiration>\
         </Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    );
    Reply::Full(200, vec![("content-type", "text/xml".into())], body.into())
}

fn refused() -> Reply {
    let body = "<ErrorResponse><Error><Type>Sender</Type><Code>ExpiredTokenException</Code><Message>the token is over</Message></Error></ErrorResponse>";
    Reply::Full(400, vec![("content-type", "text/xml".into())], body.into())
}

#[test]
fn a_role_is_taken_by_the_token_of_the_pod_and_again_by_the_next_one() {
    let cloud = Cloud::start();
    cloud.write("first-token");
    cloud.takes("first-token");
    let sidecar = cloud.sidecar();
    sidecar.wait_tier("s3", "ready");
    let stored = "tier_write_chunks_total{result=\"stored\",tier=\"s3\"}";
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("first", &hashes(1, 2));
    sidecar.wait_metric(stored, 2.0);

    // Over, and not written anew yet: it is named who says so, and memory serves on.
    cloud.takes("second-token");
    wait_for("the token to be named", || {
        let tier = sidecar.tier("s3");
        let said = format!("{}: {}", tier["reason"], tier["message"]);
        let named = said.contains("Unauthenticated") && said.contains("the token is over");
        (tier["state"] == "off" && named).then_some(())
    });
    sidecar.wait_metric("tier_down{reason=\"Unauthenticated\",tier=\"s3\"}", 1.0);
    vllm.check("memory", &hashes(1, 2));

    cloud.write("second-token");
    sidecar.wait_tier("s3", "ready");
    vllm.store("second", &hashes(2, 2));
    sidecar.wait_metric(stored, 4.0);
    let fresh = cloud.sidecar();
    fresh.wait_tier("s3", "ready");
    Vllm::attach(&fresh.socket()).finds_below(&hashes(1, 2), 2, S3);
    for secret in ["first-token", "second-token", "a-secret"] {
        assert!(!sidecar.log().contains(secret), "{secret}");
    }
}
