//! What a tier says of itself, and how a removal is meant, comes through every layer.

use super::*;
use crate::layers::scripted::{Scripted, name};
use crate::{Listed, Reading, Server, TierInfo};

/// A tier that says something else of everything than one that says nothing.
fn talkative() -> TierInfo {
    let server = Server {
        name: "redis-1:6379".into(),
        up: false,
        trouble: Some("it does not answer".into()),
    };
    TierInfo {
        kind: Kind::Redis,
        compares_puts: true,
        servers: Reading::new(move || vec![server.clone()]),
        counters: Reading::new(|| vec![("RemovalRefused", 3)]),
        unix_s: Reading::new(|| Some(784_111_777)),
        remark: Some("it keeps everything".into()),
    }
}

/// Each layer alone around the tier, and all of them.
fn around(tier: &Arc<Scripted>) -> [(&'static str, Arc<dyn Tier>); 4] {
    let inner = || -> Arc<dyn Tier> { tier.clone() };
    let options = Options::default();
    let (packing, deadline) = (options.packing.clone(), options.deadline);
    let chaos = Chaos::new(inner(), Faults::none(1));
    [
        ("chaos", Arc::new(chaos)),
        ("guarded", Arc::new(Guarded::new(inner(), &options))),
        (
            "packing",
            Arc::new(Packing::new(inner(), packing, deadline, Arc::default())),
        ),
        ("all", layered(inner(), &options).tier),
    ]
}

#[test]
fn every_layer_says_of_a_tier_what_the_tier_says() {
    let tier = Scripted::saying(talkative());
    for (layer, outside) in around(&tier) {
        let info = outside.info();
        assert_eq!(info.kind, Kind::Redis, "{layer}");
        assert!(info.compares_puts, "{layer}");
        let servers = info.servers.now();
        assert_eq!(servers, talkative().servers.now(), "{layer}");
        assert_eq!(info.counters.now(), [("RemovalRefused", 3)], "{layer}");
        assert_eq!(info.unix_s.now(), Some(784_111_777), "{layer}");
        assert_eq!(info.remark, talkative().remark, "{layer}");
    }
}

#[tokio::test]
async fn every_layer_removes_as_it_was_meant() {
    let listed = [Listed {
        name: name(1),
        bytes: 1,
        written_unix_s: 1,
    }];
    let (one, names) = (name(2), [name(3), name(4)]);
    let removals = [
        Removal::Listed(&listed),
        Removal::Unusable(&one),
        Removal::Named(&names),
    ];
    let meant = removals.map(|removal| format!("{removal:?}"));
    for at in 0..4 {
        let tier = Scripted::new();
        let (layer, outside) = &around(&tier)[at];
        for removal in removals {
            let removed = outside.remove(removal).await;
            assert_eq!(removed, Ok(removal.count() as u64), "{layer}");
        }
        assert_eq!(tier.removals(), meant, "{layer}");
    }
}
