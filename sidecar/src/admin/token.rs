//! The bearer token of the guarded paths. The mounted file is read for every request, so a rotated secret works at once.

use std::path::Path;

/// Result of a token check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Granted,
    /// No token file is configured: the path is off.
    Off,
    /// The token file cannot be read or is empty.
    NoToken,
    /// The request has no token or a wrong one.
    Wrong,
}

/// Compares a presented token with the file's.
pub fn check(file: Option<&Path>, presented: Option<&str>) -> Access {
    let Some(file) = file else {
        return Access::Off;
    };
    let Ok(text) = std::fs::read_to_string(file) else {
        return Access::NoToken;
    };
    let wanted = text.trim();
    if wanted.is_empty() {
        return Access::NoToken;
    }
    // Hashes of equal length are compared, so that the timing reveals nothing about the token.
    let same = |a: &str, b: &str| blake3::hash(a.as_bytes()) == blake3::hash(b.as_bytes());
    match presented {
        Some(token) if same(token, wanted) => Access::Granted,
        _ => Access::Wrong,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_files_token_opens() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        assert_eq!(check(None, Some("x")), Access::Off);
        assert_eq!(check(Some(&file), Some("x")), Access::NoToken);
        std::fs::write(&file, "\n").unwrap();
        assert_eq!(check(Some(&file), Some("")), Access::NoToken);
        std::fs::write(&file, "s3cret\n").unwrap();
        assert_eq!(check(Some(&file), Some("s3cret")), Access::Granted);
        assert_eq!(check(Some(&file), Some("s3cre")), Access::Wrong);
        assert_eq!(check(Some(&file), None), Access::Wrong);
    }
}
