//! Finds a master through its sentinels. All sentinels are asked at once, the address with the most votes is tried first, and only a server
//! with the role of a master is used. So a sentinel that missed a failover is outvoted, or refuted by the server that it names.

use crate::Cause;
use crate::redis::connection::Connection;
use crate::redis::fault::Fault;
use crate::redis::node::Node;
use crate::redis::resp::Reply;
use crate::redis::url::Address;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::time::timeout;

impl Node {
    /// Connects to the master of this name.
    pub(super) async fn connect_by(
        &self,
        sentinels: &[Address],
        master: &str,
    ) -> Result<Connection, Fault> {
        let (places, mut last) = self.places_by(sentinels, master).await;
        for place in places {
            let connected = timeout(self.options.connect / 3, self.connect_to_master(&place)).await;
            let silent = |_| Err(Fault::unreachable("the server did not answer"));
            match connected.unwrap_or_else(silent) {
                Ok(connection) => return Ok(connection),
                Err(fault) => last = fault.at(&place.to_string()),
            }
        }
        Err(last)
    }

    /// Addresses of the master according to the sentinels, most votes first, and the last error.
    async fn places_by(&self, sentinels: &[Address], master: &str) -> (Vec<Address>, Fault) {
        let mut asked: FuturesUnordered<_> = sentinels
            .iter()
            .map(|sentinel| async move {
                let asked = timeout(self.options.connect / 3, self.master_by(sentinel, master));
                let silent = |_| Err(Fault::unreachable("the sentinel did not answer"));
                let said = asked.await.unwrap_or_else(silent);
                said.map_err(|fault| fault.at(&format!("sentinel {sentinel}")))
            })
            .collect();
        let mut votes: Vec<(usize, Address)> = Vec::new();
        let mut failed = None::<Fault>;
        while let Some(said) = asked.next().await {
            let place = match said {
                Ok(place) => place,
                Err(fault) => {
                    // An unknown master name is more informative than an unreachable sentinel.
                    if failed.as_ref().is_none_or(Fault::is_a_loss) {
                        failed = Some(fault);
                    }
                    continue;
                }
            };
            let known = votes.iter().position(|(_, other)| *other == place);
            let (count, _) = match known {
                Some(at) => votes.swap_remove(at),
                None => (0, place.clone()),
            };
            votes.push((count + 1, place));
            if count + 1 > sentinels.len() / 2 {
                // Independent of the other votes.
                votes.drain(..votes.len() - 1);
                break;
            }
        }
        votes.sort_by_key(|(count, _)| std::cmp::Reverse(*count));
        let places = votes.into_iter().map(|(_, place)| place).collect();
        let nobody = || Fault::unreachable("no sentinel is configured");
        (places, failed.unwrap_or_else(nobody))
    }

    async fn master_by(&self, sentinel: &Address, master: &str) -> Result<Address, Fault> {
        let mut connection = self.stream_to(sentinel).await?;
        let known = async |connection: &mut Connection| {
            connection.command(&[b"SENTINEL", b"get-master-addr-by-name", master.as_bytes()]);
            connection.answer().await
        };
        let answer = match known(&mut connection).await {
            Err(Fault::Refused(text)) if text.starts_with("NOAUTH") => {
                let login = self.login().await?;
                self.log_in(&mut connection, login.as_ref()).await?;
                known(&mut connection).await?
            }
            answer => answer?,
        };
        let Reply::Array(parts) = answer else {
            let why = format!("unknown master \"{master}\"");
            return Err(Fault::Of(Cause::Config, why));
        };
        address(&parts)
            .ok_or_else(|| Fault::protocol("unexpected reply of the sentinel: expected an address"))
    }

    async fn connect_to_master(&self, place: &Address) -> Result<Connection, Fault> {
        let mut connection = self.connect_to(place).await?;
        connection.command(&[b"ROLE"]);
        match connection.answer().await? {
            Reply::Array(parts) if parts.first() == Some(&Reply::Bulk(b"master".to_vec())) => {
                Ok(connection)
            }
            _ => Err(Fault::unreachable("the server is no longer the master")),
        }
    }
}

/// Parses host and port from two strings.
fn address(parts: &[Reply]) -> Option<Address> {
    let [Reply::Bulk(host), Reply::Bulk(port)] = parts else {
        return None;
    };
    let host = String::from_utf8(host.clone()).ok()?;
    let port = std::str::from_utf8(port).ok()?.parse().ok()?;
    Some(Address::Tcp(host, port))
}
