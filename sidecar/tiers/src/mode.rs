//! Modes for debugging: a tier whose operations are logged, and one that keeps nothing.

use super::open::Opening;
use super::{
    Cause, Get, Kind, Operation, Page, Put, Removal, Stored, Tier, TierError, TierInfo, Usage,
};
use kvcachepool_protocol::config::TierMode;
use kvcachepool_protocol::object::{Object, ObjectName};
use std::sync::Arc;
use std::time::Instant;
use tracing::{info, warn};

impl Opening {
    /// The tier in this mode.
    pub fn in_mode(mut self, mode: TierMode) -> Self {
        if mode == TierMode::Normal {
            return self;
        }
        let (kind, place) = (self.kind, self.place());
        warn!(
            tier = kind.name(),
            %mode,
            place,
            "the tier is in a mode for debugging"
        );
        self.place = Box::new(move || format!("{place} (mode {mode})"));
        let open = self.open;
        self.open = match mode {
            TierMode::Blackhole => {
                // Nothing of the tier changes.
                self.change = None;
                Box::new(move || Box::pin(async move { Ok(Arc::new(Blackhole::new(kind)) as _) }))
            }
            _ => Box::new(move || {
                let opened = open();
                Box::pin(async move { Ok(Arc::new(Audited(opened.await?)) as _) })
            }),
        };
        self
    }
}

/// Accepts every write and has no objects. Its server or folder is not used.
#[derive(Debug)]
struct Blackhole {
    info: TierInfo,
}

impl Blackhole {
    fn new(kind: Kind) -> Self {
        Self {
            info: TierInfo::new(kind),
        }
    }

    fn missing<T: Send + 'static>(&self) -> Operation<'_, T> {
        let missing = TierError::new(self.info.kind, Cause::Missing, "mode Blackhole");
        Box::pin(async move { Err(missing) })
    }
}

impl Tier for Blackhole {
    fn info(&self) -> &TierInfo {
        &self.info
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        Box::pin(async move { Ok(vec![false; names.len()]) })
    }

    fn head<'a>(&'a self, _: &'a ObjectName) -> Operation<'a, Object> {
        self.missing()
    }

    fn get(&self, _: Get) -> Operation<'_, Object> {
        self.missing()
    }

    fn put(&self, _: Put) -> Operation<'_, Stored> {
        Box::pin(async { Ok(Stored::New) })
    }

    fn remove<'a>(&'a self, _: Removal<'a>) -> Operation<'a, u64> {
        Box::pin(async { Ok(0) })
    }

    fn usage(&self) -> Operation<'_, Usage> {
        Box::pin(async { Ok(Usage::default()) })
    }

    fn list<'a>(&'a self, _: Option<&'a str>, _: usize) -> Operation<'a, Page> {
        Box::pin(async { Ok(Page::default()) })
    }
}

/// Logs each operation of the tier inside, with its result.
#[derive(Debug)]
struct Audited(Arc<dyn Tier>);

impl Audited {
    /// Runs an operation on these objects, and logs it.
    fn audit<'a, T: Send + 'a>(
        &'a self,
        op: &'static str,
        objects: String,
        bytes: u64,
        operation: Operation<'a, T>,
        shown: impl FnOnce(&T) -> String + Send + 'a,
    ) -> Operation<'a, T> {
        let tier = self.0.info().kind.name();
        Box::pin(async move {
            let begin = Instant::now();
            let answer = operation.await;
            let result = match &answer {
                Ok(value) => shown(value),
                Err(e) => format!("{}: {}", e.cause.name(), e.detail),
            };
            let micros = begin.elapsed().as_micros();
            info!(tier, op, objects, bytes, result, micros, "tier operation");
            answer
        })
    }
}

fn listed(names: &[ObjectName]) -> String {
    let names: Vec<String> = names.iter().map(|name| name.s3("")).collect();
    names.join(" ")
}

impl Tier for Audited {
    fn info(&self) -> &TierInfo {
        self.0.info()
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        let shown = |found: &Vec<bool>| {
            let found: Vec<&str> = found.iter().map(|f| if *f { "1" } else { "0" }).collect();
            found.concat()
        };
        self.audit("lookup", listed(names), 0, self.0.lookup(names), shown)
    }

    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object> {
        let shown = |object: &Object| format!("{} sections", object.sections.len());
        self.audit("head", name.s3(""), 0, self.0.head(name), shown)
    }

    fn get(&self, get: Get) -> Operation<'_, Object> {
        let bytes = get.places.iter().map(|place| place.span.length).sum();
        let name = get.name.s3("");
        self.audit("get", name, bytes, self.0.get(get), |_| "ok".into())
    }

    fn put(&self, put: Put) -> Operation<'_, Stored> {
        let bytes = put.spans.iter().map(|span| span.length).sum();
        let name = put.object.name().s3("");
        let shown = |stored: &Stored| format!("{stored:?}");
        self.audit("put", name, bytes, self.0.put(put), shown)
    }

    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64> {
        let names = listed(&removal.names());
        let shown = |removed: &u64| format!("{removed} removed");
        self.audit("remove", names, 0, self.0.remove(removal), shown)
    }

    fn usage(&self) -> Operation<'_, Usage> {
        let shown = |usage: &Usage| format!("{} objects, {} bytes", usage.objects, usage.bytes);
        self.audit("usage", String::new(), 0, self.0.usage(), shown)
    }

    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page> {
        let shown = |page: &Page| format!("{} objects", page.objects.len());
        let from_page = from.unwrap_or_default().to_owned();
        self.audit("list", from_page, 0, self.0.list(from, limit), shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open::configured;
    use kvcachepool_protocol::config::Config;

    fn disk(folder: &std::path::Path, mode: TierMode) -> Opening {
        let mut config = Config::default();
        config.disk.path = Some(folder.to_owned());
        config.disk.size = kvcachepool_protocol::config::ByteSize(64 << 20);
        configured(&config).remove(0).in_mode(mode)
    }

    fn name() -> ObjectName {
        ObjectName {
            model: "0".repeat(16),
            layout: "1".repeat(16),
            key: Default::default(),
            fidelity: kvcachepool_protocol::object::Fidelity::Exact,
        }
    }

    #[tokio::test]
    async fn a_black_hole_has_nothing_and_opens_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let absent = folder.path().join("absent");
        let opening = disk(&absent, TierMode::Blackhole);
        assert!(opening.place().ends_with("absent (mode Blackhole)"));
        let tier = opening.open().await.unwrap();
        assert_eq!(tier.lookup(&[name(), name()]).await.unwrap(), [false; 2]);
        assert_eq!(tier.head(&name()).await.unwrap_err().cause, Cause::Missing);
        assert_eq!(tier.remove(Removal::Named(&[name()])).await.unwrap(), 0);
        assert_eq!(tier.list(None, 10).await.unwrap(), Page::default());
        assert!(!absent.exists());
    }

    #[tokio::test]
    async fn an_audited_tier_is_the_tier() {
        let folder = tempfile::tempdir().unwrap();
        let tier = disk(folder.path(), TierMode::Audit).open().await.unwrap();
        assert_eq!(tier.info().kind, Kind::Disk);
        assert_eq!(tier.lookup(&[name()]).await.unwrap(), [false]);
        assert_eq!(tier.head(&name()).await.unwrap_err().cause, Cause::Missing);
        assert_eq!(tier.usage().await.unwrap().capacity_bytes, 64 << 20);
    }
}
