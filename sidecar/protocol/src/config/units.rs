//! Values with units: `64Gi`, `250ms`, `50%`.

use std::{fmt, str::FromStr};

/// A text is not a value of the type. The payload says what to write instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("write {0}")]
pub struct BadUnit(pub &'static str);

/// A number of bytes. Text form: an integer with the suffix `Ki`, `Mi`, `Gi`, `Ti` (powers of 1024), `k`, `M`, `G`, `T` (powers of 1000),
/// or none (bytes).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteSize(pub u64);

const SIZES: [(&str, u64); 8] = [
    ("Ti", 1 << 40),
    ("Gi", 1 << 30),
    ("Mi", 1 << 20),
    ("Ki", 1 << 10),
    ("T", 1_000_000_000_000),
    ("G", 1_000_000_000),
    ("M", 1_000_000),
    ("k", 1_000),
];

impl ByteSize {
    /// For people: with one decimal if the size is not a whole unit.
    pub fn short(self) -> String {
        let whole = self.to_string();
        if whole.len() <= 6 {
            return whole;
        }
        let mut value = self.0 as f64;
        let mut unit = "";
        for next in ["Ki", "Mi", "Gi", "Ti"] {
            if value < 1024.0 {
                break;
            }
            value /= 1024.0;
            unit = next;
        }
        format!("{value:.1}{unit}")
    }
}

const SIZE_FORM: BadUnit = BadUnit("a size such as 64Gi, 512Mi or 65536 (bytes)");

impl FromStr for ByteSize {
    type Err = BadUnit;
    fn from_str(text: &str) -> Result<Self, BadUnit> {
        let (digits, unit) = SIZES
            .iter()
            .find_map(|(suffix, unit)| Some((text.strip_suffix(suffix)?, *unit)))
            .unwrap_or((text, 1));
        let number = whole(digits).ok_or(SIZE_FORM)?;
        number.checked_mul(unit).map(ByteSize).ok_or(SIZE_FORM)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match SIZES[..4]
            .iter()
            .find(|(_, unit)| self.0 >= *unit && self.0.is_multiple_of(*unit))
        {
            Some((suffix, unit)) => write!(f, "{}{suffix}", self.0 / unit),
            None => write!(f, "{}", self.0),
        }
    }
}

/// A duration in whole milliseconds. Text form: parts of `d`, `h`, `m`, `s`, `ms`, largest first: `24h`, `1h30m`, `250ms`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Duration {
    pub ms: u64,
}

const TIMES: [(&str, u64); 5] = [
    ("d", 86_400_000),
    ("h", 3_600_000),
    ("m", 60_000),
    ("s", 1_000),
    ("ms", 1),
];
const TIME_FORM: BadUnit = BadUnit("a time such as 250ms, 2s, 10m or 24h");

impl Duration {
    pub const fn from_ms(ms: u64) -> Self {
        Self { ms }
    }

    pub const fn std(self) -> std::time::Duration {
        std::time::Duration::from_millis(self.ms)
    }
}

impl FromStr for Duration {
    type Err = BadUnit;
    fn from_str(text: &str) -> Result<Self, BadUnit> {
        let mut rest = text;
        let mut ms = 0u64;
        let mut smallest = u64::MAX;
        while !rest.is_empty() {
            let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            let (number, tail) = rest.split_at(digits);
            let letters = tail.len()
                - tail
                    .trim_start_matches(|c: char| c.is_ascii_alphabetic())
                    .len();
            let (suffix, next) = tail.split_at(letters);
            let unit = TIMES
                .iter()
                .find(|(s, _)| *s == suffix)
                .map(|(_, unit)| *unit)
                .filter(|unit| *unit < smallest)
                .ok_or(TIME_FORM)?;
            let part = whole(number)
                .and_then(|n| n.checked_mul(unit))
                .ok_or(TIME_FORM)?;
            ms = ms.checked_add(part).ok_or(TIME_FORM)?;
            smallest = unit;
            rest = next;
        }
        if smallest == u64::MAX {
            return Err(TIME_FORM);
        }
        Ok(Self { ms })
    }
}

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match TIMES
            .iter()
            .find(|(_, unit)| self.ms >= *unit && self.ms.is_multiple_of(*unit))
        {
            Some((suffix, unit)) => write!(f, "{}{suffix}", self.ms / unit),
            None => write!(f, "{}ms", self.ms),
        }
    }
}

/// A share, 0 to 100 in whole percent. Text form: `50%`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Percent(pub u8);

impl Percent {
    /// This share of `whole`, rounded down.
    pub fn of(self, whole: u64) -> u64 {
        (u128::from(whole) * u128::from(self.0) / 100) as u64
    }
}

impl FromStr for Percent {
    type Err = BadUnit;
    fn from_str(text: &str) -> Result<Self, BadUnit> {
        text.strip_suffix('%')
            .and_then(whole)
            .and_then(|n| u8::try_from(n).ok())
            .filter(|n| *n <= 100)
            .map(Percent)
            .ok_or(BadUnit("a share such as 50%, from 0% to 100%"))
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0)
    }
}

fn whole(digits: &str) -> Option<u64> {
    (!digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
        .then(|| digits.parse().ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_for_people_are_short() {
        assert_eq!(ByteSize(0).short(), "0");
        assert_eq!(ByteSize(4 << 30).short(), "4Gi");
        assert_eq!(ByteSize((1 << 30) + 12345).short(), "1.0Gi");
    }
}
