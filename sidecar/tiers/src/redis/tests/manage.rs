//! Clusters of real servers that a manager forms, repairs and re-shards.

use super::cluster::begin_move;
use super::traffic::{Rig, sample};
use crate::redis::cluster::slot;
use crate::redis::manage::{Manager, Settings, State};
use crate::testing::free_port;
use crate::testing::redis_server::{PATIENCE, Server, until};
use kvcachepool_protocol::object::ObjectName;
use std::path::PathBuf;
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// What servers let a manager do, as in `operator/src/desired/redis`.
const RIGHTS: &str = "~kvcp:* -@all +cluster +info +ping +select +migrate +restore +restore-asking +asking +del +psync +replconf +role +config|get";
const PASSWORD: &str = "a-password";

/// Servers, as an operator starts them.
struct Servers {
    folder: TempDir,
    all: Vec<Server>,
}

impl Servers {
    fn start(count: usize) -> Self {
        let mut servers = Self {
            folder: tempfile::tempdir().unwrap(),
            all: Vec::new(),
        };
        let users =
            format!("user default on nopass ~* &* +@all\nuser manager on >{PASSWORD} {RIGHTS}\n");
        std::fs::write(servers.folder.path().join("users.acl"), users).unwrap();
        std::fs::write(servers.password(), PASSWORD).unwrap();
        servers.more(count);
        servers
    }

    fn password(&self) -> PathBuf {
        self.folder.path().join("password")
    }

    fn more(&mut self, count: usize) {
        let users = self.folder.path().join("users.acl");
        for _ in 0..count {
            let bus = free_port().to_string();
            self.all.push(Server::start(&[
                "--cluster-enabled",
                "yes",
                "--cluster-port",
                &bus,
                "--cluster-node-timeout",
                "1000",
                "--cluster-require-full-coverage",
                "no",
                "--cluster-replica-validity-factor",
                "0",
                "--cluster-allow-replica-migration",
                "no",
                "--masteruser",
                "manager",
                "--masterauth",
                PASSWORD,
                "--aclfile",
                users.to_str().unwrap(),
            ]));
        }
    }

    /// A manager of the first servers.
    fn manage(&self, count: usize, shards: usize) -> Managed {
        let servers = self.all.iter().take(count);
        let settings = Settings {
            servers: servers
                .map(|server| ("127.0.0.1".to_owned(), server.port))
                .collect(),
            shards,
            user: Some("manager".to_owned()),
            password: Some(self.password()),
            ca: None,
        };
        let (manager, state) = Manager::new(settings).unwrap();
        Managed {
            task: tokio::spawn(manager.run()),
            state,
        }
    }

    fn url(&self) -> String {
        let ports = self
            .all
            .iter()
            .map(|server| format!("127.0.0.1:{}", server.port));
        let ports: Vec<String> = ports.collect();
        format!("redis-cluster://{}", ports.join(","))
    }

    /// A server that was killed starts again: empty, as all that start. A replica that has not taken over yet would copy that.
    fn start_again(&mut self, at: usize) {
        let server = &mut self.all[at];
        std::fs::remove_file(server.folder.path().join("nodes.conf")).unwrap();
        server.run_again();
    }

    /// Waits until all objects are on replicas too, and kills these servers.
    async fn lose(&mut self, lost: &[usize]) {
        let masters = self.masters();
        until("replicas", async || {
            let keys = |at: usize| self.all[at].say(&["DBSIZE"]).parse::<usize>().unwrap();
            let of_masters: usize = masters.iter().copied().map(keys).sum();
            of_masters * 2 == (0..self.all.len()).map(keys).sum::<usize>()
        })
        .await;
        for at in lost {
            self.all[*at].kill();
        }
    }

    /// Waits until other servers have the slots of those that were killed.
    async fn wait_for_masters(&self, count: usize) {
        until("masters", async || self.masters().len() == count).await;
    }

    fn masters(&self) -> Vec<usize> {
        let is_master = |at: &usize| {
            let nodes = self.all[*at].say(&["CLUSTER", "NODES"]);
            let own = nodes.lines().find(|line| line.contains("myself"));
            own.is_some_and(|line| line.split(' ').count() > 8)
        };
        (0..self.all.len()).filter(is_master).collect()
    }
}

/// A manager at work. Its drop ends it, wherever it is.
struct Managed {
    task: JoinHandle<()>,
    state: watch::Receiver<State>,
}

impl Managed {
    async fn wait(&mut self, ready: bool) {
        let reached = timeout(PATIENCE, self.state.wait_for(|state| state.ready == ready));
        if let Ok(Ok(_)) = reached.await {
            return;
        }
        panic!("ready {ready}: {:?}", self.state.borrow().message);
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_master_is_replaced_by_its_replica_and_comes_back_as_one_without_loss() {
    let mut servers = Servers::start(6);
    let mut manager = servers.manage(6, 3);
    manager.wait(true).await;
    let masters = servers.masters();
    assert_eq!(masters.len(), 3);
    let rig = Rig::new(servers.url(), 0..60).await;
    servers.lose(&masters[..1]).await;
    manager.wait(false).await;
    servers.wait_for_masters(3).await;
    servers.start_again(masters[0]);
    manager.wait(true).await;
    assert!(!servers.masters().contains(&masters[0]));
    assert_eq!(servers.masters().len(), 3);
    rig.check(&rig.kept).await;
    for server in &servers.all {
        let nodes = server.say(&["CLUSTER", "NODES"]);
        assert_eq!(nodes.lines().count(), 6, "{nodes}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_replicas_a_lost_server_gets_its_slots_again() {
    let mut servers = Servers::start(3);
    let mut manager = servers.manage(3, 3);
    manager.wait(true).await;
    let before = servers.all[1].say(&["CLUSTER", "SLOTS"]);
    servers.all[1].kill();
    manager.wait(false).await;
    servers.start_again(1);
    manager.wait(true).await;
    let ranges = |slots: &str| -> Vec<u16> {
        slots
            .lines()
            .filter_map(|l| l.trim().parse().ok())
            .collect()
    };
    let after = servers.all[1].say(&["CLUSTER", "SLOTS"]);
    assert_eq!(ranges(&before).len(), ranges(&after).len());
    Rig::new(servers.url(), 0..20).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_majority_of_masters_that_is_lost_at_once_is_replaced() {
    let mut servers = Servers::start(6);
    let mut manager = servers.manage(6, 3);
    manager.wait(true).await;
    let rig = Rig::new(servers.url(), 0..60).await;
    let masters = servers.masters();
    servers.lose(&masters[..2]).await;
    manager.wait(false).await;
    // They cannot agree that two of them are lost, so the manager decides.
    servers.wait_for_masters(3).await;
    for at in &masters[..2] {
        servers.start_again(*at);
    }
    manager.wait(true).await;
    rig.check(&rig.kept).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_join_and_leave_under_load_without_loss() {
    let mut servers = Servers::start(3);
    let mut manager = servers.manage(3, 3);
    manager.wait(true).await;
    let rig = Rig::new(servers.url(), 0..60).await;
    // Objects of slots that move first, and a second time.
    let moves = |number: &u64| slot(&sample(*number).name().redis()) < 64;
    let traffic = rig.begin((10_000..).filter(moves));
    traffic.flows().await;
    servers.more(1);
    let first = servers.manage(4, 4);
    drop(manager);
    servers.all[3].wait(&["DBSIZE"], |keys| keys != "0");
    // Another manager takes over in the middle.
    drop(first);
    let mut manager = servers.manage(4, 4);
    traffic.flows().await;
    let mut written = traffic.end().await;
    manager.wait(true).await;
    drop(manager);
    // The first server leaves.
    servers.all.rotate_left(1);
    let before = servers.all[3].say(&["DBSIZE"]);
    let traffic = rig.begin((1_000_000..).filter(moves));
    let mut manager = servers.manage(3, 3);
    servers.all[3].wait(&["DBSIZE"], |keys| keys != before);
    traffic.flows().await;
    written.extend(traffic.end().await);
    manager.wait(true).await;
    rig.check(&rig.kept).await;
    rig.check(&written).await;
    let left = &servers.all[3];
    assert_eq!(left.say(&["DBSIZE"]), "0");
    assert_eq!(left.say(&["CLUSTER", "NODES"]).lines().count(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_take_over_from_masters_that_leave() {
    let mut servers = Servers::start(6);
    let mut manager = servers.manage(6, 3);
    manager.wait(true).await;
    let rig = Rig::new(servers.url(), 0..60).await;
    servers.lose(&[]).await;
    drop(manager);
    let masters = servers.masters();
    let of_replicas = |at: &usize| !masters.contains(at);
    let (replicas, masters): (Vec<_>, Vec<_>) = (std::mem::take(&mut servers.all).into_iter())
        .enumerate()
        .partition(|(at, _)| of_replicas(at));
    let all = replicas.into_iter().chain(masters);
    servers.all = all.map(|(_, server)| server).collect();
    let mut manager = servers.manage(3, 3);
    manager.wait(true).await;
    assert_eq!(servers.masters(), [0, 1, 2]);
    rig.check(&rig.kept).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_move_that_a_manager_left_open_is_finished() {
    let servers = Servers::start(3);
    let mut manager = servers.manage(3, 3);
    manager.wait(true).await;
    let rig = Rig::new(servers.url(), 0..60).await;
    drop(manager);
    let first = servers.masters()[0];
    let nodes = servers.all[first].say(&["CLUSTER", "NODES"]);
    let own = nodes.lines().find(|line| line.contains("myself")).unwrap();
    let range = own.split(' ').nth(8).unwrap().split_once('-').unwrap();
    let (from, to): (u16, u16) = (range.0.parse().unwrap(), range.1.parse().unwrap());
    let name = |number: u64| -> ObjectName { sample(number).name() };
    let slots = (0..60).map(|number| slot(&name(number).redis()));
    let moved = slots
        .clone()
        .find(|slot| (from..=to).contains(slot))
        .unwrap();
    let second = servers.masters()[1];
    begin_move(
        &moved.to_string(),
        &servers.all[first],
        &servers.all[second],
    );
    let mut manager = servers.manage(3, 3);
    manager.wait(true).await;
    for server in &servers.all {
        let nodes = server.say(&["CLUSTER", "NODES"]);
        assert!(!nodes.contains('['), "{nodes}");
    }
    rig.check(&rig.kept).await;
}

/// The ACL of one server changes, and the manager must log in again.
fn change_acl(server: &Server, words: &[&str]) {
    server.say(&[&["ACL", "SETUSER", "manager"], words].concat());
    server.say(&["CLIENT", "KILL", "USER", "manager"]);
}

fn wait_for_manager(servers: &Servers) {
    for server in &servers.all {
        // Replicas log in as the manager too.
        let managers = |list: &str| {
            list.lines()
                .any(|l| l.contains("user=manager") && l.contains("flags=N"))
        };
        server.wait(&["CLIENT", "LIST"], managers);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_password_is_used_once_servers_accept_it_and_until_then_none_is_lost() {
    let servers = Servers::start(3);
    let mut manager = servers.manage(3, 3);
    manager.wait(true).await;
    std::fs::write(servers.password(), "new").unwrap();
    for server in &servers.all {
        change_acl(server, &[]);
    }
    wait_for_manager(&servers);
    manager.wait(true).await;
    let [first, others @ ..] = &servers.all[..] else {
        unreachable!()
    };
    for server in others {
        change_acl(server, &[">new"]);
    }
    // The first server knows neither: it is not lost, and nothing is done.
    change_acl(first, &["resetpass", ">another"]);
    let refused = manager
        .state
        .wait_for(|state| state.message.contains("password is wrong"));
    timeout(PATIENCE, refused).await.unwrap().unwrap();
    assert_eq!(servers.masters(), [0, 1, 2]);
    for server in &servers.all {
        change_acl(server, &["resetpass", ">new"]);
    }
    manager.wait(true).await;
    wait_for_manager(&servers);
}

#[tokio::test]
async fn servers_that_cannot_be_one_cluster_are_refused() {
    let of = |ports: &[u16], shards| {
        let settings = Settings {
            servers: ports.iter().map(|port| ("a".to_owned(), *port)).collect(),
            shards,
            user: None,
            password: None,
            ca: None,
        };
        Manager::new(settings).err().unwrap()
    };
    for (ports, shards) in [(&[][..], 0), (&[1, 2, 3, 4], 3), (&[], 3)] {
        assert!(of(ports, shards).contains("same number of servers"));
    }
    assert!(of(&[1, 2, 1], 3).contains("twice"));
}
