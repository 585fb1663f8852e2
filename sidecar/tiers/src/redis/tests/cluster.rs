//! A cluster of real servers.

use crate::testing::free_port;
use crate::testing::redis_server::Server;

/// Slots of each of three masters.
const THIRDS: [[&str; 2]; 3] = [["0", "5460"], ["5461", "10922"], ["10923", "16383"]];

/// Three masters, each with a third of the slots; and what joined them.
pub struct Cluster {
    program: String,
    host: &'static str,
    args: Vec<String>,
    pub nodes: Vec<Server>,
    /// Ports on which they speak to each other.
    buses: Vec<u16>,
}

impl Cluster {
    pub fn start() -> Self {
        Self::of("redis-server", "127.0.0.1", &[])
    }

    /// The same, of a program, reached at this host, with these settings beside.
    pub fn of(program: &str, host: &'static str, args: &[&str]) -> Self {
        let mut cluster = Self {
            program: program.into(),
            host,
            args: args.iter().map(ToString::to_string).collect(),
            nodes: Vec::new(),
            buses: Vec::new(),
        };
        for slots in THIRDS {
            let node = cluster.join();
            let [from, to] = slots;
            node.say(&["CLUSTER", "ADDSLOTSRANGE", from, to]);
        }
        cluster.wait_for("cluster_size:3");
        cluster
    }

    /// A node more, without slots.
    fn join(&mut self) -> &Server {
        let bus = free_port();
        let shown = bus.to_string();
        let mut args = vec!["--cluster-enabled", "yes", "--cluster-port", &shown];
        args.extend(self.args.iter().map(String::as_str));
        let node = Server::of(&self.program, &args);
        if let (Some(first), Some(bus)) = (self.nodes.first(), self.buses.first()) {
            let (port, bus) = (first.port.to_string(), bus.to_string());
            node.say(&["CLUSTER", "MEET", self.host, &port, &bus]);
        }
        self.buses.push(bus);
        self.nodes.push(node);
        &self.nodes[self.nodes.len() - 1]
    }

    /// A replica of the first master, which has all of its data; and its number.
    pub fn replica(&mut self) -> usize {
        let (number, master) = (self.nodes.len(), self.id(0));
        let node = self.join();
        node.wait(&["CLUSTER", "REPLICATE", &master], |said| said == "OK");
        node.wait(&["INFO", "replication"], |info| {
            info.contains("master_link_status:up")
        });
        for other in &self.nodes {
            other.wait(&["CLUSTER", "NODES"], |nodes| nodes.contains("slave"));
        }
        number
    }

    /// Waits until all agree on this.
    fn wait_for(&self, said: &str) {
        for node in &self.nodes {
            node.wait(&["CLUSTER", "INFO"], |info| {
                info.contains("cluster_state:ok") && info.contains(said)
            });
        }
    }

    /// What node `number` is called by the others.
    pub fn id(&self, number: usize) -> String {
        self.nodes[number].say(&["CLUSTER", "MYID"])
    }

    /// Names the second node, which knows the others.
    pub fn url(&self) -> String {
        let port = self.nodes[1].port;
        match self.host.contains(':') {
            true => format!("redis-cluster://[{}]:{port}", self.host),
            false => format!("redis-cluster://{}:{port}", self.host),
        }
    }
}

/// A slot begins to move from one master to another.
pub fn begin_move(slot: &str, from: &Server, to: &Server) {
    let id = |node: &Server| node.say(&["CLUSTER", "MYID"]);
    to.say(&["CLUSTER", "SETSLOT", slot, "IMPORTING", &id(from)]);
    from.say(&["CLUSTER", "SETSLOT", slot, "MIGRATING", &id(to)]);
}

/// Moves a key of such a slot.
pub fn migrate(from: &Server, to: &Server, key: &str) {
    let port = to.port.to_string();
    let said = from.say(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
    assert_eq!(said, "OK");
}
