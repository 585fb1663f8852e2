//! Idle connections of one server, and connections lent to an operation.

use super::connection::Connection;
use super::fault::Fault;
use super::node::Node;
use parking_lot::Mutex;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    Bytes,
    Questions,
}

/// A limit on connections, and the idle ones.
pub struct Pool {
    permits: Arc<Semaphore>,
    /// Connections with their generation.
    idle: Mutex<Vec<(u64, Connection)>>,
}

impl Pool {
    pub fn new(connections: usize) -> Self {
        Self {
            permits: Arc::new(Semaphore::new(connections.max(1))),
            idle: Mutex::default(),
        }
    }

    /// Waits while all connections are in use.
    pub async fn permit(&self) -> Result<OwnedSemaphorePermit, Fault> {
        let permit = self.permits.clone().acquire_owned().await;
        permit.map_err(Fault::unreachable)
    }

    /// Closes idle connections.
    pub fn clear(&self) {
        let idle = std::mem::take(&mut *self.idle.lock());
        drop(idle);
    }

    /// An idle connection of this generation.
    pub fn idle(&self, generation: u64) -> Option<Connection> {
        let mut idle = self.idle.lock();
        while let Some((of, mut connection)) = idle.pop() {
            if of == generation && !connection.is_stale() {
                return Some(connection);
            }
        }
        None
    }
}

/// A connection for one operation. Its drop returns it to the pool if it can be used again.
pub struct Lent {
    node: Arc<Node>,
    lane: Lane,
    generation: u64,
    connection: Option<Connection>,
    _permit: OwnedSemaphorePermit,
}

impl Lent {
    /// A connection of this generation; `permit` must be one of its pool.
    pub fn new(
        node: Arc<Node>,
        lane: Lane,
        generation: u64,
        connection: Connection,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        Self {
            node,
            lane,
            generation,
            connection: Some(connection),
            _permit: permit,
        }
    }
}

impl Deref for Lent {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        match &self.connection {
            Some(connection) => connection,
            None => unreachable!("only its drop takes it"),
        }
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut Connection {
        match &mut self.connection {
            Some(connection) => connection,
            None => unreachable!("only its drop takes it"),
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take() else {
            return;
        };
        let (node, generation) = (&self.node, self.generation);
        if let Some(why) = connection.broken() {
            node.lost(Some(generation), why);
        } else if connection.is_outdated() {
            node.forget_connections(Some(generation));
        } else if connection.is_clean() {
            connection.set_asking(false);
            node.answered();
            if generation == node.generation() {
                let mut idle = node.pool(self.lane).idle.lock();
                idle.push((generation, connection));
            }
        } else if connection.silence() >= Some(node.options.answer) {
            node.lost(Some(generation), "the server does not answer");
        }
    }
}
