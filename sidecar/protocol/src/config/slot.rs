//! The value of a key: its forms as text, and its range.

use super::{BadUnit, ByteSize, Choice, Duration, Percent};
use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

/// Longest path of a Unix socket: `sun_path` without its terminator.
const SOCKET_PATH_BYTES: usize = 107;
/// Maximum number of Redis servers.
pub const SERVERS: usize = 256;
/// Longest URL of a Redis server.
pub const URL_BYTES: usize = 1024;
/// Longest name of a Kubernetes object.
const NAME_BYTES: usize = 253;

/// A format of text.
pub struct Form {
    /// A regular expression that the texts match, for the API server.
    pub pattern: &'static str,
    /// What to write instead.
    pub write: &'static str,
    pub matches: fn(&str) -> bool,
}

/// The value of a key and its range.
pub(super) enum Slot<'a> {
    Size(&'a mut ByteSize, RangeInclusive<u64>),
    Time(&'a mut Duration, RangeInclusive<u64>),
    Share(&'a mut Percent, RangeInclusive<u8>),
    Count(&'a mut u32, RangeInclusive<u32>),
    Number(&'a mut u64, RangeInclusive<u64>),
    Flag(&'a mut bool),
    Name(&'a mut String),
    /// Text of a format, or none.
    Text(&'a mut String, &'static Form),
    Listen(&'a mut SocketAddr),
    Socket(&'a mut PathBuf),
    File(&'a mut Option<PathBuf>),
    Urls(&'a mut Vec<String>),
    Choice(&'a mut dyn Choice),
}

impl Slot<'_> {
    /// The value as printed in a config file.
    pub fn text(&self) -> String {
        match self {
            Slot::Size(v, _) => v.to_string(),
            Slot::Time(v, _) => v.to_string(),
            Slot::Share(v, _) => v.to_string(),
            Slot::Count(v, _) => v.to_string(),
            Slot::Number(v, _) => v.to_string(),
            Slot::Flag(v) => v.to_string(),
            Slot::Name(v) | Slot::Text(v, _) => (*v).clone(),
            Slot::Listen(v) => v.to_string(),
            Slot::Socket(v) => v.display().to_string(),
            Slot::File(v) => v
                .as_ref()
                .map(|p| p.display().to_string())
                .unwrap_or_default(),
            // JSON is valid YAML.
            Slot::Urls(v) => serde_json::Value::from(v.as_slice()).to_string(),
            Slot::Choice(v) => v.name().to_string(),
        }
    }

    /// The value without secrets, for display.
    pub fn shown(&self) -> String {
        match self {
            Slot::Urls(v) => {
                let shown: Vec<String> = v.iter().map(|url| without_credentials(url)).collect();
                serde_json::Value::from(shown).to_string()
            }
            _ => self.text(),
        }
    }

    /// Parses and sets a value. The error says what to write instead.
    pub fn set(&mut self, text: &str) -> Result<(), String> {
        let problem = |bad: BadUnit| bad.0.to_string();
        match self {
            Slot::Size(v, range) => {
                let size: ByteSize = text.parse().map_err(problem)?;
                **v = within(size, size.0, range, ByteSize)?;
            }
            Slot::Time(v, range) => {
                let time: Duration = text.parse().map_err(problem)?;
                **v = within(time, time.ms, range, Duration::from_ms)?;
            }
            Slot::Share(v, range) => {
                let share: Percent = text.parse().map_err(problem)?;
                **v = within(share, share.0, range, Percent)?;
            }
            Slot::Count(v, range) => **v = whole(text, range)?,
            Slot::Number(v, range) => **v = whole(text, range)?,
            Slot::Flag(v) => **v = text.parse().map_err(|_| "true or false".to_string())?,
            Slot::Name(v) => {
                let plain =
                    |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
                if text.len() > NAME_BYTES || !text.bytes().all(plain) {
                    return Err(format!(
                        "a Kubernetes name: lower-case letters, digits, - and ., at most {NAME_BYTES} of them"
                    ));
                }
                **v = text.to_string();
            }
            Slot::Text(v, form) => {
                if !text.is_empty() && !(form.matches)(text) {
                    return Err(form.write.to_string());
                }
                **v = text.to_string();
            }
            Slot::Listen(v) => {
                **v = text.parse().map_err(|_| {
                    "an address with a port such as 0.0.0.0:9797 or [::]:9797".to_string()
                })?;
            }
            Slot::Socket(v) => {
                if !absolute(text) || text.len() > SOCKET_PATH_BYTES || text.ends_with('/') {
                    return Err(format!(
                        "an absolute path of a socket, at most {SOCKET_PATH_BYTES} bytes long"
                    ));
                }
                **v = PathBuf::from(text);
            }
            Slot::File(v) => {
                if !text.is_empty() && !absolute(text) {
                    return Err("an absolute path of a file, or \"\" for none".to_string());
                }
                **v = (!text.is_empty()).then(|| PathBuf::from(text));
            }
            Slot::Urls(v) => {
                let urls: Vec<String> = serde_json::from_str(text).unwrap_or_default();
                let is_url = |url: &String| url.len() <= URL_BYTES && url.contains("://");
                let none = text == "[]";
                if (urls.is_empty() && !none) || urls.len() > SERVERS || !urls.iter().all(is_url) {
                    return Err(format!(
                        "a list of at most {SERVERS} URLs such as [\"redis://host:6379\"], or [] for none"
                    ));
                }
                **v = urls;
            }
            Slot::Choice(v) => {
                if !v.choose(text) {
                    return Err(format!("one of {}", v.names().join(", ")));
                }
            }
        }
        Ok(())
    }

    /// The range, for the comment in the printed file. Empty if the value itself shows its form.
    pub fn range(&self) -> String {
        match self {
            Slot::Size(_, r) => format!("{} to {}", ByteSize(*r.start()), ByteSize(*r.end())),
            Slot::Time(_, r) => {
                let [least, most] = [r.start(), r.end()].map(|ms| Duration::from_ms(*ms));
                format!("{least} to {most}")
            }
            Slot::Share(_, r) => format!("{} to {}", Percent(*r.start()), Percent(*r.end())),
            Slot::Count(_, r) => format!("{} to {}", r.start(), r.end()),
            Slot::Number(_, r) => format!("{} to {}", r.start(), r.end()),
            Slot::Choice(v) => v.names().join(", "),
            Slot::Flag(_)
            | Slot::Name(_)
            | Slot::Text(..)
            | Slot::Listen(_)
            | Slot::Socket(_)
            | Slot::File(_)
            | Slot::Urls(_) => String::new(),
        }
    }
}

/// A URL without user and password.
fn without_credentials(url: &str) -> String {
    match url.split_once("://") {
        Some((scheme, rest)) => {
            let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
            format!("{scheme}://{place}")
        }
        None => String::new(),
    }
}

fn absolute(text: &str) -> bool {
    text.starts_with('/') && !text.contains('\0')
}

fn whole<N: FromStr + PartialOrd + Copy + fmt::Display>(
    text: &str,
    range: &RangeInclusive<N>,
) -> Result<N, String> {
    let number = text
        .parse()
        .map_err(|_| format!("a whole number from {} to {}", range.start(), range.end()))?;
    within(number, number, range, |n| n)
}

fn within<V, N: PartialOrd + Copy, S: fmt::Display>(
    value: V,
    number: N,
    range: &RangeInclusive<N>,
    shown: impl Fn(N) -> S,
) -> Result<V, String> {
    if range.contains(&number) {
        return Ok(value);
    }
    Err(format!(
        "a value from {} to {}",
        shown(*range.start()),
        shown(*range.end())
    ))
}
