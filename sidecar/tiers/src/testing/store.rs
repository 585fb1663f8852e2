//! A bucket in memory behind a test server: answers like S3, so that a test only describes the faults.
#![allow(dead_code, reason = "two programs include it, each uses a part")]

use super::faulty::{Asked, Reply};
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Objects and unfinished uploads.
#[derive(Debug, Default)]
pub struct Store {
    held: Mutex<Held>,
    /// Listings are not in the order of names, as in directory buckets.
    unordered: bool,
}

#[derive(Debug, Default)]
struct Held {
    objects: BTreeMap<String, Vec<u8>>,
    /// Parts by upload id and part number.
    uploads: BTreeMap<String, BTreeMap<u32, Vec<u8>>>,
    begun: u32,
}

impl Store {
    /// A directory bucket.
    pub fn directory() -> Self {
        Self {
            unordered: true,
            ..Self::default()
        }
    }

    /// Names of all objects of the cache.
    pub fn objects(&self) -> Vec<String> {
        let held = self.held.lock();
        let names = held.objects.keys().filter(|name| name.ends_with(".kv"));
        names.cloned().collect()
    }

    /// Changes the bytes of an object.
    pub fn change(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        change(self.held.lock().objects.get_mut(name).unwrap());
    }

    /// Uploads that neither ended nor were aborted.
    pub fn uploads(&self) -> usize {
        self.held.lock().uploads.len()
    }

    pub fn answer(&self, asked: &Asked) -> Reply {
        let (path, query) = asked.target.split_once('?').unwrap_or((&asked.target, ""));
        let (_, key) = path[1..].split_once('/').unwrap_or_default();
        let query: BTreeMap<String, String> = query
            .split('&')
            .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
            .map(|(name, value)| (name.to_string(), decoded(value)))
            .collect();
        let said = |name: &str| query.get(name).map(String::as_str);
        let mut held = self.held.lock();
        match (asked.method.as_str(), said("uploadId")) {
            ("PUT", Some(id)) => {
                let number = said("partNumber").unwrap().parse().unwrap();
                match held.uploads.get_mut(id) {
                    Some(parts) => parts.insert(number, asked.body.clone()),
                    None => return Reply::error(404, "NoSuchUpload"),
                };
                stored()
            }
            ("PUT", None) => held.put(asked, key, asked.body.clone(), stored()),
            ("POST", Some(id)) => {
                let Some(parts) = held.uploads.remove(id) else {
                    return Reply::error(404, "NoSuchUpload");
                };
                let bytes = parts.into_values().flatten().collect();
                held.put(
                    asked,
                    key,
                    bytes,
                    xml("CompleteMultipartUploadResult", "<ETag>one</ETag>"),
                )
            }
            ("POST", None) if said("uploads").is_some() => {
                held.begun += 1;
                let id = format!("upload-{}", held.begun);
                held.uploads.insert(id.clone(), BTreeMap::new());
                xml(
                    "InitiateMultipartUploadResult",
                    &format!("<UploadId>{id}</UploadId>"),
                )
            }
            ("POST", None) => {
                let names = String::from_utf8(asked.body.clone()).unwrap();
                for name in names.split("<Key>").skip(1) {
                    held.objects.remove(name.split("</Key>").next().unwrap());
                }
                xml("DeleteResult", "")
            }
            ("DELETE", Some(id)) => {
                held.uploads.remove(id);
                Reply::status(204)
            }
            ("DELETE", None) => {
                held.objects.remove(key);
                Reply::status(204)
            }
            ("HEAD", _) => match held.objects.get(key) {
                Some(bytes) => Reply::Full(
                    200,
                    vec![("content-length", bytes.len().to_string())],
                    vec![],
                ),
                None => Reply::status(404),
            },
            ("GET", _) if said("list-type").is_some() => {
                let most = said("max-keys").unwrap().parse().unwrap();
                let from = said("continuation-token");
                held.listed(
                    said("prefix").unwrap_or_default(),
                    from,
                    most,
                    self.unordered,
                )
            }
            ("GET", _) if said("uploads").is_some() => xml("ListMultipartUploadsResult", ""),
            ("GET", _) => match held.objects.get(key) {
                Some(bytes) => Reply::part(asked, bytes),
                None => Reply::error(404, "NoSuchKey"),
            },
            (method, _) => panic!("{method} {}", asked.target),
        }
    }
}

impl Held {
    fn put(&mut self, asked: &Asked, key: &str, bytes: Vec<u8>, done: Reply) -> Reply {
        if asked.header("if-none-match") == "*" && self.objects.contains_key(key) {
            return Reply::error(412, "PreconditionFailed");
        }
        self.objects.insert(key.into(), bytes);
        done
    }

    fn listed(&self, prefix: &str, from: Option<&str>, most: usize, unordered: bool) -> Reply {
        let mut all: Vec<_> = self
            .objects
            .iter()
            .filter(|(key, _)| key.starts_with(prefix))
            .collect();
        if unordered {
            all.reverse();
        }
        let start = from.map_or(0, |from| {
            let last = all.iter().position(|(key, _)| key.as_str() == from);
            last.map_or(all.len(), |last| last + 1)
        });
        let page = &all[start..all.len().min(start + most)];
        let mut text = String::new();
        for (key, bytes) in page {
            let size = bytes.len();
            text += &format!(
                "<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
            );
        }
        if let Some((last, _)) = page.last().filter(|_| start + page.len() < all.len()) {
            text += &format!(
                "<IsTruncated>true</IsTruncated><NextContinuationToken>{last}</NextContinuationToken>"
            );
        }
        xml("ListBucketResult", &text)
    }
}

fn stored() -> Reply {
    Reply::Full(200, vec![("etag", "\"one\"".into())], vec![])
}

fn xml(name: &str, content: &str) -> Reply {
    Reply::Full(200, vec![], format!("<{name}>{content}</{name}>").into())
}

/// Decodes URL escapes.
fn decoded(text: &str) -> String {
    let mut parts = text.split('%');
    let mut decoded = parts.next().unwrap_or_default().to_string();
    for part in parts {
        decoded.push(char::from(u8::from_str_radix(&part[..2], 16).unwrap()));
        decoded += &part[2..];
    }
    decoded
}
