//! What every tier must do, done by this one: on Redis and on Valkey, over each kind of stream, on one server and on several, with layers and
//! without, and for a user with no more rights than docs/guides/tiers.md asks for.

use super::cluster::Cluster;
use crate::Tier;
use crate::layers::{self, layered};
use crate::redis::{Redis, Settings};
use crate::testing::redis_server::{Server, settings};
use crate::testing::s3_server::installed;
use crate::testing::suite::{Opening, Subject, passes_the_suite};
use crate::testing::tls::Certificates;
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

const REDIS: &str = "redis-server";
/// Longest wait for a server.
const LONGEST: Duration = Duration::from_secs(20);

pub fn valkey() -> String {
    installed("valkey-server").display().to_string()
}

struct Servers {
    settings: Settings,
    with_layers: bool,
    _running: Box<dyn Any + Send + Sync>,
}

impl Servers {
    fn of(urls: Vec<String>, running: impl Any + Send + Sync) -> Self {
        let mut settings = settings(&urls);
        // Beside hundreds of other servers one may be slow; how soon it counts as lost is tested elsewhere.
        settings.options.connect = LONGEST;
        settings.options.answer = LONGEST;
        Self {
            settings,
            with_layers: false,
            _running: Box::new(running),
        }
    }

    fn one(program: &str, url: fn(&Server) -> String) -> Self {
        let server = Server::of(program, &[]);
        Self::of(vec![url(&server)], server)
    }

    fn three_with_layers() -> Self {
        let servers = [(); 3].map(|()| Server::start(&[]));
        let urls = servers.each_ref().map(Server::tcp);
        Self {
            with_layers: true,
            ..Self::of(urls.into(), servers)
        }
    }

    /// At an IPv6 address, in a database, for a user.
    fn over_tls(program: &str) -> Self {
        let files = Certificates::new(&["::1"]);
        let (server, port) = files.started(&[], |args| Server::of(program, args));
        let [always, .., select] = rights();
        let login = user(&server, &[always, select]);
        let ca = Some(files.path("ca.crt"));
        let url = format!("rediss://{login}@[::1]:{port}/2");
        let mut servers = Self::of(vec![url], (server, files));
        servers.settings.tls_files.ca = ca;
        servers
    }

    fn of_a_sentinel(program: &str) -> Self {
        let master = Server::of(program, &[]);
        let [always, role, ..] = rights();
        let login = user(&master, &[always, role]);
        let watched = format!("127.0.0.1 {} 1", master.port);
        let sentinel = Server::sentinel_of(program, &watched, &[]);
        let url = format!("redis-sentinel://{login}@127.0.0.1:{}/kv", sentinel.port);
        Self::of(vec![url], (master, sentinel))
    }

    fn of_a_cluster(program: &str) -> Self {
        let cluster = Cluster::of(program, "127.0.0.1", &[]);
        let [always, _, slots, asking, _] = rights();
        let rights = [always, slots, asking];
        let logins: Vec<_> = cluster.nodes.iter().map(|n| user(n, &rights)).collect();
        let url = cluster.url().replace("://", &format!("://{}@", logins[0]));
        Self::of(vec![url], cluster)
    }
}

/// Commands that the user needs, as docs/guides/tiers.md has them: always, with Sentinel, with a cluster, and in a database.
fn rights() -> [String; 5] {
    let docs = include_str!("../../../../../docs/guides/tiers.md");
    let (_, rest) = docs.split_once("on keys `kvcp:*`:").unwrap();
    let (said, _) = rest.split_once(".\n").unwrap();
    let quoted: Vec<String> = said.split('`').skip(1).step_by(2).map(Into::into).collect();
    quoted.try_into().unwrap()
}

/// Makes one who may do nothing but this; returns the login.
fn user(server: &Server, rights: &[String]) -> &'static str {
    let [always, more @ ..] = rights else {
        panic!("no rights");
    };
    let always = always.split_whitespace().map(str::to_string);
    let commands = always.chain(more.iter().map(|of| of.replace(' ', "|")));
    let commands: Vec<String> = commands.map(|c| format!("+{}", c.to_lowercase())).collect();
    let mut words = vec!["ACL", "SETUSER", "kv", "reset", "on", ">right", "~kvcp:*"];
    words.extend(commands.iter().map(String::as_str));
    assert_eq!(server.say(&words), "OK");
    "kv:right"
}

impl Subject for Servers {
    fn empty(&self) -> Opening<'_> {
        Box::pin(async {
            let tier: Arc<dyn Tier> = Arc::new(Redis::open(&self.settings).unwrap());
            match self.with_layers {
                true => layered(tier, &layers::Options::default()).tier,
                false => tier,
            }
        })
    }

    fn again(&self) -> Option<Opening<'_>> {
        Some(self.empty())
    }

    /// Each connection has buffers, which servers count.
    fn usage_noise(&self) -> u64 {
        512 << 10
    }
}

mod over_tcp {
    use super::*;
    passes_the_suite!(Servers::one(REDIS, Server::tcp));
}

mod over_a_unix_socket {
    use super::*;
    passes_the_suite!(Servers::one(REDIS, Server::unix));
}

mod over_tls {
    use super::*;
    passes_the_suite!(Servers::over_tls(REDIS));
}

mod on_three_shards_with_layers {
    use super::*;
    passes_the_suite!(Servers::three_with_layers());
}

mod on_the_master_of_a_sentinel {
    use super::*;
    passes_the_suite!(Servers::of_a_sentinel(REDIS));
}

mod on_a_cluster {
    use super::*;
    passes_the_suite!(Servers::of_a_cluster(REDIS));
}

mod on_valkey {
    use super::*;

    mod over_tcp {
        use super::*;
        passes_the_suite!(Servers::one(&valkey(), Server::tcp));
    }

    mod over_a_unix_socket {
        use super::*;
        passes_the_suite!(Servers::one(&valkey(), Server::unix));
    }

    mod over_tls {
        use super::*;
        passes_the_suite!(Servers::over_tls(&valkey()));
    }

    mod on_the_master_of_a_sentinel {
        use super::*;
        passes_the_suite!(Servers::of_a_sentinel(&valkey()));
    }

    mod on_a_cluster {
        use super::*;
        passes_the_suite!(Servers::of_a_cluster(&valkey()));
    }
}
