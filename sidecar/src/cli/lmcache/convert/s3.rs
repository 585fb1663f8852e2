//! Buckets and their keys.

use super::super::translation::{Draft, Fate};
use super::{OTHER_ADAPTER, PREFIX, Shared, of_adapter, shared, whole};
use serde_yaml::Value;

const NO_S3: Fate = Fate::Automatic("It has no effect without a bucket.");

/// The address of a bucket: `bucket`, or `bucket.host[:port]`.
pub fn bucket(draft: &mut Draft<'_>, place: &str) -> Fate {
    let place = place.trim_end_matches('/');
    if place.is_empty() || place.contains('/') {
        return Fate::Bad("s3://bucket or s3://bucket.host:port, without a path".to_owned());
    }
    let scheme = if draft.flag("disable_tls") {
        "http"
    } else {
        "https"
    };
    let of_aws = place.ends_with(".amazonaws.com") || place.ends_with(".amazonaws.com.cn");
    let aws = [".s3.", ".s3-", ".s3express-"].iter().find_map(|service| {
        let (bucket, _) = place.split_once(service)?;
        Some(bucket).filter(|_| of_aws)
    });
    let given = draft.text("s3_bucket").map(str::to_owned);
    let (bucket, host) = match (given, aws) {
        (Some(bucket), _) => (bucket, (!of_aws).then_some(place)),
        (None, Some(bucket)) => (bucket.to_owned(), None),
        (None, None) => match place.split_once('.') {
            Some((bucket, host)) => (bucket.to_owned(), Some(host)),
            None => (place.to_owned(), None),
        },
    };
    let prefix = match draft
        .text("s3_file_prefix")
        .map(|prefix| prefix.trim_matches('/'))
    {
        Some(prefix) if !prefix.is_empty() => format!("{prefix}/{PREFIX}"),
        _ => PREFIX.to_owned(),
    };
    let endpoint = host.map(|host| format!("{scheme}://{host}"));
    let set = [
        ("s3.bucket", Some(bucket)),
        ("s3.endpoint", endpoint),
        ("s3.prefix", Some(prefix)),
    ];
    for (key, value) in set {
        if let Some(Fate::Bad(write)) = value.map(|value| draft.set(key, value)) {
            return Fate::Bad(write);
        }
    }
    Fate::Translated
}

pub fn endpoint(draft: &mut Draft<'_>, value: &Value) -> Fate {
    if !of_adapter(draft, &["s3"]) {
        return OTHER_ADAPTER;
    }
    let place = value.as_str().unwrap_or_default();
    bucket(draft, place.strip_prefix("s3://").unwrap_or(place))
}

fn of_bucket(draft: &mut Draft<'_>, key: &'static str, value: String) -> Fate {
    match shared(draft) {
        Shared::S3 => draft.set(key, value),
        _ => NO_S3,
    }
}

pub fn region(draft: &mut Draft<'_>, value: &Value) -> Fate {
    of_bucket(
        draft,
        "s3.region",
        value.as_str().unwrap_or_default().to_owned(),
    )
}

pub fn concurrency(draft: &mut Draft<'_>, value: &Value) -> Fate {
    of_bucket(draft, "s3.maxConcurrency", whole(value))
}

pub fn addressing_style(draft: &mut Draft<'_>, value: &Value) -> Fate {
    let style = match value.as_str() {
        Some("virtual") => "VirtualHost",
        Some("path") => "Path",
        _ => return Fate::Bad("virtual or path".to_owned()),
    };
    of_bucket(draft, "s3.addressingStyle", style.to_owned())
}

pub fn authority(draft: &mut Draft<'_>, _: &Value) -> Fate {
    if shared(draft) != Shared::S3 {
        return NO_S3;
    }
    let name = format!("{}-s3-ca", draft.name);
    draft.note(format!(
        "Create the ConfigMap {name} with the certificates as the key ca.crt."
    ));
    draft.set("s3.ca", name)
}

pub fn key(draft: &mut Draft<'_>, _: &Value) -> Fate {
    if shared(draft) != Shared::S3 {
        return NO_S3;
    }
    let name = format!("{}-s3", draft.name);
    draft.note(format!(
        "Create the Secret {name} with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. \
         LMCache's config has the values; this command does not print them."
    ));
    draft.set("s3.auth", name)
}
