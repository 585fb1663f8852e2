//! Credentials that lie in no Secret: of a pod's web identity (IRSA) or its agent (EKS Pod Identity), whose token Kubernetes writes, and
//! writes anew; of a profile; of the instance.

use crate::harness::{Sidecar, wait_for};
use crate::s3::S3;
use crate::testing::faulty::{Asked, Faulty, Reply};
use crate::testing::store::Store;
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
/// In all keys.
const SECRET: &str = "a-secret";

/// Who gives keys for the token that is good now, and a bucket that takes these and no others.
pub struct Cloud {
    folder: TempDir,
    good: Arc<Mutex<String>>,
    service: Faulty,
    pub bucket: Faulty,
    _runtime: Runtime,
}

impl Cloud {
    pub fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let good: Arc<Mutex<String>> = Arc::default();
        let (knows, store) = (good.clone(), Store::default());
        let service = Faulty::start(move |asked| {
            let good = knows.lock().clone();
            match asked.target.as_str() {
                "/" => by_web_identity(asked, &good),
                "/agent" => by_agent(asked, &good),
                instance => by_instance(instance, &good),
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
    pub fn write(&self, token: &str) {
        std::fs::write(self.file(), token).unwrap();
    }

    /// From now on this token is good, and no other.
    pub fn takes(&self, token: &str) {
        *self.good.lock() = token.into();
    }

    /// Address of who gives keys.
    pub fn service(&self) -> String {
        self.service.config().endpoint
    }

    /// What a pod with a web identity has in its environment, whose tokens this service takes.
    pub fn web_identity(&self, service: &str) -> String {
        format!(
            "AWS_ROLE_ARN=arn:aws:iam::123456789012:role/kv AWS_WEB_IDENTITY_TOKEN_FILE={} AWS_ENDPOINT_URL_STS={service}",
            self.file().display()
        )
    }

    /// What a pod with an agent has in its environment.
    fn agent(&self) -> String {
        format!(
            "AWS_CONTAINER_CREDENTIALS_FULL_URI={}/agent AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE={}",
            self.service(),
            self.file().display()
        )
    }

    /// A profile with the keys of a token; what names it in an environment.
    fn profile(&self, token: &str) -> String {
        let file = self.folder.path().join("credentials");
        let text = format!(
            "[kv]\naws_access_key_id = id-{token}\naws_secret_access_key = {SECRET}\naws_session_token = session-{token}\n"
        );
        std::fs::write(&file, text).unwrap();
        let file = file.display();
        format!("AWS_PROFILE=kv AWS_SHARED_CREDENTIALS_FILE={file}")
    }

    /// Where nothing else is, the instance is asked.
    fn instance(&self) -> String {
        format!("AWS_EC2_METADATA_SERVICE_ENDPOINT={}", self.service())
    }

    /// A sidecar with these variables in its environment.
    fn sidecar(&self, environment: &str) -> Sidecar {
        let bucket = self.bucket.config();
        let mut sidecar = Sidecar::prepare(&format!(
            "memory: {{size: 64Mi}}\ncache: {{minLoadTokens: 0}}\ns3: {{bucket: {}, endpoint: \"{}\"}}\n",
            bucket.bucket, bucket.endpoint
        ));
        sidecar.run_by(&format!("export {environment}; exec \"$@\""));
        sidecar.wait_socket();
        sidecar.wait_populated();
        sidecar
    }
}

/// When keys that are given now end.
fn end() -> String {
    let end = DateTime::from(SystemTime::now() + GOOD_FOR);
    end.fmt(DateTimeFormat::DateTime).unwrap()
}

fn by_web_identity(asked: &Asked, good: &str) -> Reply {
    let form = String::from_utf8(asked.body.clone()).unwrap();
    let token = form.split("WebIdentityToken=").nth(1).unwrap();
    let token = token.split('&').next().unwrap();
    if !form.contains("role%2Fkv") || token != good {
        return refused();
    }
    let end = end();
    let body = format!(
        "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>id-{token}</AccessKeyId>\
         <SecretAccessKey>{SECRET}</SecretAccessKey><SessionToken>session-{token}</SessionToken><Expiration>{end}</Expiration>\
         </Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    );
    Reply::Full(200, vec![("content-type", "text/xml".into())], body.into())
}

fn by_agent(asked: &Asked, good: &str) -> Reply {
    match asked.header("authorization") == good {
        true => json(&keys(good)),
        false => Reply::status(400),
    }
}

fn by_instance(target: &str, good: &str) -> Reply {
    let text = |text: &str| Reply::Full(200, Vec::new(), text.into());
    let Some(target) = target.strip_prefix("/latest/") else {
        return Reply::status(404);
    };
    match target {
        "api/token" => {
            let life = ("x-aws-ec2-metadata-token-ttl-seconds", "60".into());
            Reply::Full(200, vec![life], b"of the instance".into())
        }
        "meta-data/iam/security-credentials/" => text("kv"),
        "meta-data/iam/security-credentials/kv" => json(&keys(good)),
        _ => Reply::status(404),
    }
}

/// Keys as agents and instances give them.
fn keys(token: &str) -> serde_json::Value {
    serde_json::json!({
        "Code": "Success", "Type": "AWS-HMAC", "LastUpdated": end(), "Expiration": end(),
        "AccessKeyId": format!("id-{token}"), "SecretAccessKey": SECRET, "Token": format!("session-{token}"),
    })
}

fn json(value: &serde_json::Value) -> Reply {
    let kind = ("content-type", "application/json".into());
    Reply::Full(200, vec![kind], value.to_string().into())
}

fn refused() -> Reply {
    let body = "<ErrorResponse><Error><Type>Sender</Type><Code>ExpiredTokenException</Code><Message>the token is over</Message></Error></ErrorResponse>";
    Reply::Full(400, vec![("content-type", "text/xml".into())], body.into())
}

/// Why the tier is off: name and message.
fn said(sidecar: &Sidecar) -> String {
    let tier = sidecar.tier("s3");
    let text = |key: &str| tier[key].as_str().unwrap().to_string();
    format!("{}: {}", text("reason"), text("message"))
}

/// A token is good, then another one, which is written later: until then it is said who refuses, and nothing tells a secret.
fn keys_are_taken_again(environment: impl Fn(&Cloud) -> String, refusal: &str) {
    let cloud = Cloud::start();
    cloud.write("first-token");
    cloud.takes("first-token");
    let sidecar = cloud.sidecar(&environment(&cloud));
    sidecar.wait_tier("s3", "ready");
    let stored = "tier_write_chunks_total{result=\"stored\",tier=\"s3\"}";
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("first", &hashes(1, 2));
    sidecar.wait_metric(stored, 2.0);

    // Over, and not written anew yet; memory serves on.
    cloud.takes("second-token");
    sidecar.wait_tier("s3", "off");
    wait_for(refusal, || {
        let said = said(&sidecar);
        let named = said.starts_with("Unauthenticated: ") && said.contains(refusal);
        named.then_some(())
    });
    sidecar.wait_metric("tier_down{reason=\"unauthenticated\",tier=\"s3\"}", 1.0);
    vllm.check("memory", &hashes(1, 2));

    cloud.write("second-token");
    sidecar.wait_tier("s3", "ready");
    vllm.store("second", &hashes(2, 2));
    sidecar.wait_metric(stored, 4.0);
    let fresh = cloud.sidecar(&environment(&cloud));
    fresh.wait_tier("s3", "ready");
    Vllm::attach(&fresh.socket()).finds_below(&hashes(1, 2), 2, S3);
    for secret in ["first-token", "second-token", SECRET] {
        assert!(!sidecar.log().contains(secret), "{secret}");
    }
}

#[test]
fn a_role_is_taken_by_the_token_of_the_pod_and_again_by_the_next_one() {
    keys_are_taken_again(
        |cloud| cloud.web_identity(&cloud.service()),
        "the token is over",
    );
}

#[test]
fn the_agent_of_a_pod_is_asked_with_its_token_and_again_with_the_next_one() {
    keys_are_taken_again(Cloud::agent, "HTTP credential provider: StatusCode(400)");
}

#[test]
fn a_profile_or_the_instance_gives_keys() {
    let cloud = Cloud::start();
    cloud.takes("only-token");
    for (prompt, environment) in [(1, cloud.profile("only-token")), (2, cloud.instance())] {
        let sidecar = cloud.sidecar(&environment);
        sidecar.wait_tier("s3", "ready");
        Vllm::attach(&sidecar.socket()).store("r", &hashes(prompt, 2));
        sidecar.wait_metric(
            "tier_write_chunks_total{result=\"stored\",tier=\"s3\"}",
            2.0,
        );
        assert!(!sidecar.log().contains(SECRET));
    }
}

#[test]
fn a_region_that_the_config_does_not_say_is_that_of_the_environment_also_beside_keys_in_files() {
    let cloud = Cloud::start();
    let keys = cloud.bucket.config().auth.unwrap();
    let config = format!(
        "memory: {{size: 64Mi}}\ns3: {{bucket: kv-bucket, auth: {}}}\n",
        keys.display()
    );
    for (environment, wanted) in [
        (
            "AWS_EC2_METADATA_DISABLED=true",
            "Config: s3.region is not set",
        ),
        // Its server is asked, which no resolver knows.
        ("AWS_REGION=nowhere-1", "Unreachable: "),
    ] {
        let mut sidecar = Sidecar::prepare(&config);
        sidecar.run_by(&format!("export {environment}; exec \"$@\""));
        sidecar.wait_socket();
        sidecar.wait_tier("s3", "off");
        wait_for(wanted, || said(&sidecar).starts_with(wanted).then_some(()));
    }
}
