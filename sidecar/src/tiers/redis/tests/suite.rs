//! What every tier must do, done by this one: over each kind of stream, on one server and on several, with layers and without.

use super::rig::{Server, open};
use crate::tiers::Tier;
use crate::tiers::layers::{self, layered};
use crate::tiers::s3::tests::server::installed;
use crate::tiers::suite::{Opening, Subject, passes_the_suite};
use std::sync::Arc;

struct Servers {
    _servers: Vec<Server>,
    urls: Vec<String>,
    with_layers: bool,
}

impl Servers {
    fn one(url: fn(&Server) -> String) -> Self {
        Self::several(1, url)
    }

    fn several(count: usize, url: fn(&Server) -> String) -> Self {
        Self::of((0..count).map(|_| Server::start(&[])).collect(), url)
    }

    fn valkey() -> Self {
        let program = installed("valkey-server");
        let program = program.to_str().unwrap();
        Self::of(vec![Server::of(program, &[])], Server::tcp)
    }

    fn of(servers: Vec<Server>, url: fn(&Server) -> String) -> Self {
        Self {
            urls: servers.iter().map(url).collect(),
            _servers: servers,
            with_layers: false,
        }
    }

    fn layered(self) -> Self {
        Self {
            with_layers: true,
            ..self
        }
    }

    fn open(&self) -> Opening<'_> {
        Box::pin(async {
            let tier: Arc<dyn Tier> = Arc::new(open(&self.urls));
            match self.with_layers {
                true => layered(tier, &layers::Options::default()).tier,
                false => tier,
            }
        })
    }
}

impl Subject for Servers {
    fn empty(&self) -> Opening<'_> {
        self.open()
    }

    fn again(&self) -> Option<Opening<'_>> {
        Some(self.open())
    }

    /// Each connection has buffers, which servers count.
    fn usage_noise(&self) -> u64 {
        256 << 10
    }
}

mod over_tcp {
    use super::*;
    passes_the_suite!(Servers::one(Server::tcp));
}

mod over_a_unix_socket {
    use super::*;
    passes_the_suite!(Servers::one(Server::unix));
}

mod on_valkey {
    use super::*;
    passes_the_suite!(Servers::valkey());
}

mod on_three_shards_with_layers {
    use super::*;
    passes_the_suite!(Servers::several(3, Server::tcp).layered());
}
