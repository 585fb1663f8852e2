//! The server's time, from the dates of its responses.

use crate::clock::Clock;
use aws_sdk_s3::primitives::{DateTime, DateTimeFormat};

/// Records the `Date` of a response; ignores an invalid one.
pub fn heard(clock: &Clock, date: &str) {
    let date = DateTime::from_str(date, DateTimeFormat::HttpDate).ok();
    if let Some(unix_s) = date.and_then(|at| u64::try_from(at.secs()).ok()) {
        clock.is_now(unix_s);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_hour_is_believed_and_what_is_none_is_let_be() {
        let clock = Clock::default();
        assert_eq!(clock.unix_s(), None);
        assert!(clock.unix_s_or_own() > 1_700_000_000);
        heard(&clock, "Sun, 06 Nov 1994 08:49:37 GMT");
        for none in ["", "yesterday", "Sun, 99 Nov 1994 08:49:37 GMT"] {
            heard(&clock, none);
        }
        let told = clock.unix_s().unwrap();
        assert!((784_111_777..784_111_787).contains(&told), "{told}");
        assert!(clock.unix_s_or_own() < 1_000_000_000);
    }
}
