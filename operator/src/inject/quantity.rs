//! Kubernetes quantities: exact sums and comparisons, and the text that the API server would write.

use std::fmt;

/// An amount of cpu, bytes or devices.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quantity {
    /// Billionths, the finest unit in Kubernetes.
    nanos: i128,
    /// Formatted with `Ki`, `Mi`, ... if possible.
    binary: bool,
}

const NANO: i128 = 1_000_000_000;
const BINARY: [(&str, u32); 6] = [
    ("Ki", 10),
    ("Mi", 20),
    ("Gi", 30),
    ("Ti", 40),
    ("Pi", 50),
    ("Ei", 60),
];
/// Suffixes of powers of ten.
const DECIMAL: [(&str, i32); 10] = [
    ("n", -9),
    ("u", -6),
    ("m", -3),
    ("", 0),
    ("k", 3),
    ("M", 6),
    ("G", 9),
    ("T", 12),
    ("P", 15),
    ("E", 18),
];
/// Largest amount: what 64 bits of units can hold. Larger ones are equal to it.
const MOST: i128 = (i64::MAX as i128) * NANO;

impl Quantity {
    pub fn bytes(bytes: u64) -> Self {
        Self {
            nanos: (i128::from(bytes) * NANO).min(MOST),
            binary: true,
        }
    }

    /// Thousandths of a cpu.
    pub fn millis(millis: u32) -> Self {
        Self {
            nanos: i128::from(millis) * (NANO / 1_000),
            binary: false,
        }
    }

    /// Parses Kubernetes quantities: `64Gi`, `500m`, `1.5`, `2e3`. `None` if the text is invalid. Fractions below billionths are rounded
    /// up.
    pub fn parse(text: &str) -> Option<Self> {
        let end = text
            .find(|c: char| !matches!(c, '0'..='9' | '.' | '+' | '-'))
            .unwrap_or(text.len());
        let (number, suffix) = text.split_at(end);
        let (negative, number) = match number.as_bytes().first()? {
            b'-' => (true, &number[1..]),
            b'+' => (false, &number[1..]),
            _ => (false, number),
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
        if (whole.is_empty() && fraction.is_empty()) || !digits(whole) || !digits(fraction) {
            return None;
        }
        // More digits are above the largest amount, or below the finest unit.
        let whole = whole.trim_start_matches('0');
        let units: i128 = if whole.len() > 19 {
            MOST / NANO
        } else {
            whole.parse().unwrap_or(0)
        };
        let fine: i128 = format!("{:0<9.9}", fraction).parse().unwrap_or(0);
        let finer = fraction.bytes().skip(9).any(|b| b != b'0');
        let base = units * NANO + fine + i128::from(finer);
        let (nanos, binary) = if let Some((_, shift)) = BINARY.iter().find(|(s, _)| *s == suffix) {
            (base.saturating_mul(1 << shift), true)
        } else {
            let power = match DECIMAL.iter().find(|(s, _)| *s == suffix) {
                Some((_, power)) => *power,
                None => suffix.strip_prefix(['e', 'E'])?.parse::<i32>().ok()?,
            };
            (scaled(base, power), false)
        };
        let nanos = nanos.min(MOST);
        Some(Self {
            nanos: if negative { -nanos } else { nanos },
            binary,
        })
    }

    /// Parses a JSON string or number.
    pub fn of(value: &serde_json::Value) -> Option<Self> {
        match value {
            serde_json::Value::String(text) => Self::parse(text),
            serde_json::Value::Number(number) => Self::parse(&number.to_string()),
            _ => None,
        }
    }

    pub fn is_positive(self) -> bool {
        self.nanos > 0
    }

    /// Whether the amount has no fraction.
    pub fn is_whole(self) -> bool {
        self.nanos % NANO == 0
    }

    /// Whole units, rounded up. `None` for negative amounts.
    pub fn units(self) -> Option<u64> {
        let nanos = u128::try_from(self.nanos).ok()?;
        u64::try_from(nanos.div_ceil(NANO.unsigned_abs())).ok()
    }

    /// The amount above `other`; zero if there is none.
    pub fn beyond(self, other: Self) -> Self {
        Self {
            nanos: (self.nanos - other.nanos).max(0),
            binary: self.binary,
        }
    }
}

fn scaled(base: i128, power: i32) -> i128 {
    if power >= 0 {
        let factor = 10i128.checked_pow(power.unsigned_abs()).unwrap_or(MOST);
        return base.saturating_mul(factor);
    }
    match 10i128.checked_pow(power.unsigned_abs()) {
        Some(divisor) => base / divisor + i128::from(base % divisor != 0),
        None => i128::from(base != 0),
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl std::ops::Add for Quantity {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            nanos: self.nanos.saturating_add(other.nanos),
            binary: self.binary || other.binary,
        }
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.binary && self.nanos % NANO == 0 && self.nanos / NANO >= 1024 {
            let units = self.nanos / NANO;
            let largest = BINARY
                .iter()
                .rev()
                .find(|(_, shift)| units % (1 << shift) == 0);
            return match largest {
                Some((suffix, shift)) => write!(f, "{}{suffix}", units >> shift),
                None => write!(f, "{units}"),
            };
        }
        let largest = DECIMAL.iter().rev().find_map(|(suffix, power)| {
            let unit = 10i128.checked_pow((power + 9).unsigned_abs())?;
            (self.nanos % unit == 0 && self.nanos != 0).then_some((unit, suffix))
        });
        match largest {
            Some((unit, suffix)) => write!(f, "{}{suffix}", self.nanos / unit),
            None => write!(f, "0"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn q(text: &str) -> Quantity {
        Quantity::parse(text).unwrap_or_else(|| panic!("{text}"))
    }

    #[test]
    fn texts_are_parsed_like_kubernetes_does() {
        for (a, b) in [
            ("1Gi", "1024Mi"),
            ("0.5", "500m"),
            (".5", "500m"),
            ("1.", "1"),
            ("1.5Gi", "1536Mi"),
            ("1e3", "1k"),
            ("12E2", "1200"),
            ("1E", "1000P"),
            ("+2", "2"),
            ("0.0000000001", "1n"),
            ("000", "0"),
        ] {
            assert_eq!(q(a), q(b), "{a} {b}");
        }
        for bad in [
            "", "Gi", "1 Gi", "1gi", "one", "1.2.3", "--1", "1e", "1K", "١", "-",
        ] {
            assert_eq!(Quantity::parse(bad), None, "{bad:?}");
        }
        assert!(q("99999999999999999999999Ei") >= q("7Ei"));
        assert!(q("1e2000000000").is_positive());
        assert!(!q("-1").is_positive());
        assert_eq!(q("-1").units(), None);
        assert_eq!(q("1500m").units(), Some(2));
    }

    #[test]
    fn a_quantity_is_formatted_like_the_api_server_does() {
        for (text, written) in [
            ("1024Mi", "1Gi"),
            ("0.5", "500m"),
            ("1500m", "1500m"),
            ("2000m", "2"),
            ("1000", "1k"),
            ("68719476736", "68719476736"),
            ("512", "512"),
            ("0.5Ki", "512"),
            ("1025Ki", "1025Ki"),
            ("0", "0"),
            ("0Gi", "0"),
        ] {
            assert_eq!(q(text).to_string(), written, "{text}");
        }
        assert_eq!(Quantity::bytes(64 << 30).to_string(), "64Gi");
        assert_eq!((q("1") + q("500m")).to_string(), "1500m");
        assert_eq!(q("2").beyond(q("1500m")), q("500m"));
        assert_eq!(q("1").beyond(q("2")), q("0"));
    }

    proptest! {
        #[test]
        fn a_formatted_quantity_parses_back(units in 0u64..1 << 60, binary: bool) {
            let text = if binary { Quantity::bytes(units) } else { q(&units.to_string()) }.to_string();
            prop_assert_eq!(q(&text), q(&units.to_string()));
        }

        #[test]
        fn any_text_is_parsed_or_rejected(text in ".{0,40}") {
            if let Some(read) = Quantity::parse(&text) {
                prop_assert_eq!(Quantity::parse(&read.to_string()), Some(read));
            }
        }
    }
}
