//! Rules of `spec.sidecar`, which is copied into every pod of the pool. The API server does not validate it in a pool, and would reject the
//! pods.

use super::Rule;
use super::table::{NAME, optional_text};
use crate::api::Sidecar;
use crate::forms;
use k8s_openapi::api::core::v1::{
    EnvVar, EnvVarSource, ObjectFieldSelector, ResourceFieldSelector,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kvcachepool_protocol::config::Form;
use std::collections::BTreeMap;

const ENV: &str = "spec.sidecar.env";
pub(super) const SUBDOMAIN: &str =
    "[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
pub(super) const QUALIFIED_NAME: &str = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?";
/// Longest name of an object.
const NAME_BYTES: usize = 253;
/// Resources without a domain that a pool may set. Memory is accepted, but computed.
const RESOURCES: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];
/// Maximum digits of an amount.
const AMOUNT_DIGITS: usize = 15;
const AMOUNT_SUFFIXES: [&str; 10] = ["", "m", "k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti"];
const CPU_DIVISORS: [&str; 3] = ["0", "1", "1m"];
const BYTE_DIVISORS: [&str; 10] = ["0", "1", "1k", "1M", "1G", "1T", "1Ki", "1Mi", "1Gi", "1Ti"];

/// The name of an image.
const IMAGE: Form = Form {
    pattern: r"^[-a-zA-Z0-9._:/@+\\[\\]]+$",
    write: "the name of an image, such as registry.example/kvcachepool:1.2 or one with @sha256:...",
    matches: |text| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._:/@+[]".contains(&b);
        !text.is_empty() && text.bytes().all(plain)
    },
};

pub(super) fn rules() -> Vec<Rule> {
    let mut rules = vec![optional_text("spec.sidecar.image", &IMAGE), pull_secrets()];
    rules.extend(variables());
    rules.extend(resources());
    rules
}

fn rule(
    at: &'static str,
    cel: String,
    message: &str,
    holds: impl Fn(&Sidecar) -> bool + Send + Sync + 'static,
) -> Rule {
    Rule {
        at,
        cel,
        message: message.to_string(),
        holds: Box::new(move |pool, _| holds(&pool.spec.sidecar)),
    }
}

fn pull_secrets() -> Rule {
    rule(
        "spec.sidecar.imagePullSecrets",
        format!(
            "self.all(s, s.name.size() <= {NAME_BYTES} && s.name.matches('{}'))",
            NAME.pattern
        ),
        "write names of Secrets: lower-case letters, digits, - and ., a letter or digit at both ends",
        |s| s.image_pull_secrets.iter().all(|one| object(&one.name)),
    )
}

fn object(name: &str) -> bool {
    name.len() <= NAME_BYTES && (NAME.matches)(name)
}

fn variables() -> Vec<Rule> {
    vec![
        of_variables(
            "v.name.matches('^[-_a-zA-Z][-._a-zA-Z0-9]*$')".to_string(),
            "write names of letters, digits, _, - and ., with neither a digit nor a . first",
            |v| variable_name(&v.name),
        ),
        rule(
            ENV,
            "self.all(v, self.exists_one(o, o.name == v.name))".to_string(),
            "write each name once",
            |s| {
                let named = |name: &str| s.env.iter().filter(|o| o.name == name).count();
                s.env.iter().all(|v| named(&v.name) == 1)
            },
        ),
        of_variables(
            "!has(v.valueFrom) || (!has(v.value) || v.value == '') && \
             [has(v.valueFrom.configMapKeyRef), has(v.valueFrom.secretKeyRef), has(v.valueFrom.fieldRef), \
             has(v.valueFrom.resourceFieldRef)].exists_one(is, is)"
                .to_string(),
            "write either value or valueFrom, and in valueFrom exactly one of configMapKeyRef, secretKeyRef, fieldRef and resourceFieldRef",
            |v| {
                let unsaid = v.value.as_deref().unwrap_or_default().is_empty();
                let one = |from: &EnvVarSource| unsaid && sources(from) == 1;
                v.value_from.as_ref().is_none_or(one)
            },
        ),
        of_variables(
            ["configMapKeyRef", "secretKeyRef"]
                .map(|kind| {
                    format!(
                        "(!has(v.valueFrom) || !has(v.valueFrom.{kind}) || \
                         v.valueFrom.{kind}.name.size() <= {NAME_BYTES} && v.valueFrom.{kind}.name.matches('{}') && \
                         v.valueFrom.{kind}.key.matches('^[.]?[-_a-zA-Z0-9][-._a-zA-Z0-9]{{0,251}}$'))",
                        NAME.pattern
                    )
                })
                .join(" && "),
            "write name and key of a ConfigMap or Secret as Kubernetes has them: a key is of letters, digits, -, _ and .",
            |v| keys(v).into_iter().all(|(name, key)| object(name) && map_key(key)),
        ),
        of_variables(
            format!(
                "!has(v.valueFrom) || !has(v.valueFrom.fieldRef) || \
                 (!has(v.valueFrom.fieldRef.apiVersion) || v.valueFrom.fieldRef.apiVersion in ['', 'v1']) && \
                 v.valueFrom.fieldRef.fieldPath.matches(\"^(metadata[.](name|namespace|uid|(labels|annotations)\
                 \\\\['({SUBDOMAIN}/)?{QUALIFIED_NAME}'\\\\])|spec[.](nodeName|serviceAccountName)|\
                 status[.](hostIP|hostIPs|podIP|podIPs))$\")"
            ),
            "write a fieldPath that a variable can have, such as metadata.name, metadata.labels['app'], spec.nodeName or status.podIP, with apiVersion v1 or none",
            |v| source(v, |from| from.field_ref.as_ref()).is_none_or(field),
        ),
        of_variables(
            format!(
                "!has(v.valueFrom) || !has(v.valueFrom.resourceFieldRef) || \
                 v.valueFrom.resourceFieldRef.resource.matches('^(requests|limits)[.](cpu|memory|ephemeral-storage)$') && \
                 (!has(v.valueFrom.resourceFieldRef.divisor) || (type(v.valueFrom.resourceFieldRef.divisor) == int ? \
                 v.valueFrom.resourceFieldRef.divisor in [0, 1] : \
                 v.valueFrom.resourceFieldRef.divisor in (v.valueFrom.resourceFieldRef.resource.endsWith('.cpu') ? {} : {})))",
                list(&CPU_DIVISORS),
                list(&BYTE_DIVISORS)
            ),
            "write a resource such as limits.memory or requests.cpu, and a divisor of 1 or 1m of cpu, of 1, 1k, 1Ki, 1M, 1Mi, ... of bytes",
            |v| source(v, |from| from.resource_field_ref.as_ref()).is_none_or(resource_field),
        ),
    ]
}

/// A rule for every variable, which is `v` in the expression.
fn of_variables(cel: String, message: &str, holds: fn(&EnvVar) -> bool) -> Rule {
    rule(ENV, format!("self.all(v, {cel})"), message, move |s| {
        s.env.iter().all(holds)
    })
}

fn variable_name(name: &str) -> bool {
    let first = |b: u8| b.is_ascii_alphabetic() || b"-_".contains(&b);
    name.bytes().next().is_some_and(first)
        && name
            .bytes()
            .all(|b| first(b) || b.is_ascii_digit() || b == b'.')
}

fn sources(from: &EnvVarSource) -> usize {
    let sources = [
        from.config_map_key_ref.is_some(),
        from.secret_key_ref.is_some(),
        from.field_ref.is_some(),
        from.resource_field_ref.is_some(),
    ];
    sources.into_iter().filter(|is_set| *is_set).count()
}

fn source<T>(variable: &EnvVar, get: fn(&EnvVarSource) -> Option<&T>) -> Option<&T> {
    variable.value_from.as_ref().and_then(get)
}

/// Names and keys of the objects that a variable refers to.
fn keys(variable: &EnvVar) -> Vec<(&str, &str)> {
    let map = source(variable, |from| from.config_map_key_ref.as_ref());
    let secret = source(variable, |from| from.secret_key_ref.as_ref());
    map.map(|one| (one.name.as_str(), one.key.as_str()))
        .into_iter()
        .chain(secret.map(|one| (one.name.as_str(), one.key.as_str())))
        .collect()
}

fn map_key(key: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
    let rest = key.strip_prefix('.').unwrap_or(key);
    rest.len() <= 252
        && rest.bytes().next().is_some_and(plain)
        && rest.bytes().all(|b| plain(b) || b == b'.')
}

fn field(field: &ObjectFieldSelector) -> bool {
    ["", "v1"].contains(&field.api_version.as_deref().unwrap_or_default())
        && forms::is_field_path(&field.field_path)
}

fn resource_field(field: &ResourceFieldSelector) -> bool {
    let name = ["requests.", "limits."]
        .iter()
        .find_map(|kind| field.resource.strip_prefix(kind));
    let divisor = field.divisor.as_ref().map_or("0", |divisor| &divisor.0);
    match name {
        Some("cpu") => CPU_DIVISORS.contains(&divisor),
        Some(name) => RESOURCES.contains(&name) && BYTE_DIVISORS.contains(&divisor),
        None => false,
    }
}

fn resources() -> Vec<Rule> {
    const REQUESTS: &str = "spec.sidecar.resources.requests";
    const LIMITS: &str = "spec.sidecar.resources.limits";
    let plain = list(&RESOURCES);
    let mut rules = vec![
        rule(
            REQUESTS,
            format!("self.all(k, k in {plain})"),
            "write cpu or ephemeral-storage; hugepages are set from local.memory.hugePages, and a resource with a domain belongs into limits, which also sets its request",
            |s| {
                let mut names = s.resources.requests.iter().flat_map(BTreeMap::keys);
                names.all(|name| RESOURCES.contains(&name.as_str()))
            },
        ),
        rule(
            LIMITS,
            format!(
                "self.all(k, k in {plain} || k.size() <= 240 && k.matches('^{SUBDOMAIN}/{QUALIFIED_NAME}$') && \
                 !k.startsWith('requests.') && !k.contains('kubernetes.io/'))"
            ),
            "write cpu, ephemeral-storage or a resource with a domain, such as example.com/device; hugepages are set from local.memory.hugePages",
            |s| {
                let mut names = s.resources.limits.iter().flat_map(BTreeMap::keys);
                names.all(|name| {
                    RESOURCES.contains(&name.as_str()) || forms::is_extended_resource(name)
                })
            },
        ),
        rule(
            LIMITS,
            format!("self.all(k, !k.contains('/') || {})", amount("self[k]", "")),
            "write a whole number of a resource with a domain",
            |s| {
                let mut amounts = s.resources.limits.iter().flatten();
                amounts.all(|(name, amount)| !name.contains('/') || is_amount(&amount.0, true))
            },
        ),
        rule(
            "spec.sidecar.resources.claims",
            "self.size() == 0".to_string(),
            "omit claims: they refer to claims of a pod, which a pool does not know",
            |s| s.resources.claims.as_ref().is_none_or(Vec::is_empty),
        ),
    ];
    let write = "write amounts such as 500m, 2 or 1Gi";
    // a rule for each: before 1.34, the API server takes every amount for as long as a request may be, and refuses an expensive rule
    let suffix = format!("([.][0-9]{{1,3}})?({})?", AMOUNT_SUFFIXES[1..].join("|"));
    for name in RESOURCES {
        let amount = amount(&format!("self['{name}']"), &suffix);
        let cel = format!("!('{name}' in self) || {amount}");
        rules.push(rule(REQUESTS, cel.clone(), write, move |s| {
            is_absent_or_amount(s.resources.requests.as_ref(), name)
        }));
        rules.push(rule(LIMITS, cel, write, move |s| {
            is_absent_or_amount(s.resources.limits.as_ref(), name)
        }));
    }
    rules
}

/// CEL for an amount at `field`: a number, or digits with this suffix.
fn amount(field: &str, suffix: &str) -> String {
    format!(
        "(type({field}) == int ? {field} >= 0 && {field} < 1{} : {field}.matches('^[0-9]{{1,{AMOUNT_DIGITS}}}{suffix}$'))",
        "0".repeat(AMOUNT_DIGITS)
    )
}

fn is_absent_or_amount(amounts: Option<&BTreeMap<String, Quantity>>, name: &str) -> bool {
    let amount = amounts.and_then(|amounts| amounts.get(name));
    amount.is_none_or(|amount| is_amount(&amount.0, false))
}

fn is_amount(text: &str, whole: bool) -> bool {
    let digits = |text: &str, most: usize| {
        (1..=most).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit())
    };
    if whole {
        return digits(text, AMOUNT_DIGITS);
    }
    let end = text.find(|c: char| c.is_ascii_alphabetic());
    let (number, suffix) = text.split_at(end.unwrap_or(text.len()));
    let right = match number.split_once('.') {
        Some((number, fraction)) => digits(number, AMOUNT_DIGITS) && digits(fraction, 3),
        None => digits(number, AMOUNT_DIGITS),
    };
    right && AMOUNT_SUFFIXES.contains(&suffix)
}

/// A list of strings in CEL.
fn list(texts: &[&str]) -> String {
    format!("['{}']", texts.join("', '"))
}
