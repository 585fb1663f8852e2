//! The operator: it turns a `KVCachePool` into objects, and adds a sidecar to labelled pods. Decisions are pure functions (`api`,
//! `desired`, `inject`, `status`); `reconcile` and `webhook` only read, call them and write. The operator does not use S3 or Redis, does
//! not read users' Secrets, and does not link the sidecar.

pub mod api;
pub mod canary;
pub mod cli;
pub mod defaults;
pub mod desired;
pub mod forms;
pub mod health;
pub mod http;
pub mod inject;
pub mod leader;
pub mod metrics;
pub mod names;
pub mod pki;
pub mod plugin;
pub mod pods;
pub mod policy;
mod reasons;
pub mod reconcile;
pub mod scope;
pub mod shutdown;
pub mod status;
mod untrusted;
pub mod webhook;
