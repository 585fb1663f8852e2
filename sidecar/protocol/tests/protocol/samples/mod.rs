//! Values that several tests share. Each test file uses some of them.
#![allow(dead_code, reason = "compiled into every test file")]

pub mod messages;
pub mod object;
