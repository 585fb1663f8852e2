//! What tests rely on is tested, too.

mod chaos;
mod shelf;
