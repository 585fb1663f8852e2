//! Lookups of many names: each server is asked for its own names, all servers at once.

use super::fault::Fault;
use super::pool::Lent;
use super::servers::Way;
use super::{Now, stopped};
use crate::TierError;
use kvcachepool_protocol::object::ObjectName;
use std::collections::HashMap;
use tokio::task::JoinSet;

/// Names per request to a server.
const NAMES_MAX: usize = 1024;

/// One result per name, in order.
pub type Answers = Result<Vec<Result<bool, Fault>>, Fault>;

/// Treatment of servers that do not answer while others do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// Their objects count as absent.
    IsAbsent,
    /// The whole operation fails.
    IsAnError,
}

/// Indexes of names per server.
type Groups = HashMap<(usize, bool), (Way, Vec<usize>)>;

/// Partial result for all names.
struct Sum {
    names: Vec<ObjectName>,
    writes: bool,
    answers: Vec<bool>,
    /// Whether any server answered.
    some: bool,
    failed: Option<TierError>,
    /// Names to look up at another node.
    open: Vec<(usize, Way)>,
}

impl Now {
    /// Asks each server for the names that it has, by this batch.
    pub(super) async fn each<A>(
        self,
        names: Vec<ObjectName>,
        lost: Lost,
        batch: impl Fn(Lent, Vec<ObjectName>) -> A + Clone + Send + 'static,
    ) -> Result<Vec<bool>, TierError>
    where
        A: Future<Output = Answers> + Send + 'static,
    {
        let mut sum = Sum {
            writes: lost == Lost::IsAnError,
            answers: vec![false; names.len()],
            some: names.is_empty(),
            failed: None,
            open: Vec::new(),
            names,
        };
        let learned = self.servers.learn().await;
        let error = |fault, name| self.servers.error(None, fault, name, sum.writes);
        learned.map_err(|fault| error(fault, None))?;
        for (number, name) in sum.names.iter().enumerate() {
            match self.servers.way(name) {
                Ok(way) => sum.open.push((number, way)),
                Err(fault) => sum.failed = sum.failed.or_else(|| Some(error(fault, Some(name)))),
            }
        }
        while !sum.open.is_empty() {
            let mut asked = JoinSet::new();
            for (way, numbers) in sum.groups().into_values() {
                for numbers in numbers.chunks(NAMES_MAX) {
                    let (way, numbers, batch) = (way.clone(), numbers.to_vec(), batch.clone());
                    let names = numbers.iter().filter_map(|n| sum.names.get(*n).cloned());
                    let names: Vec<ObjectName> = names.collect();
                    asked.spawn(async move {
                        let answers = match way.take_to_ask().await {
                            Ok(lent) => batch(lent, names).await,
                            Err(fault) => Err(fault),
                        };
                        (way, numbers, answers)
                    });
                }
            }
            while let Some(ended) = asked.join_next().await {
                match ended {
                    Ok((way, numbers, answers)) => sum.heard(&self, &way, numbers, answers),
                    Err(_) => sum.failed = sum.failed.or_else(|| Some(stopped())),
                }
            }
        }
        match sum.failed {
            Some(error) if lost == Lost::IsAnError || !sum.some => Err(error),
            _ => Ok(sum.answers),
        }
    }
}

impl Sum {
    fn groups(&mut self) -> Groups {
        let mut groups = Groups::new();
        for (number, way) in self.open.drain(..) {
            let group = groups.entry(way.key()).or_insert((way, Vec::new()));
            group.1.push(number);
        }
        groups
    }

    fn heard(&mut self, now: &Now, way: &Way, numbers: Vec<usize>, answers: Answers) {
        let (servers, writes) = (&now.servers, self.writes);
        way.node.ended(writes, answers.as_ref().err());
        let each = match answers {
            Ok(each) => each,
            Err(fault) => {
                servers.failed(&fault);
                let error = || servers.error(Some(&way.node), fault, None, writes);
                self.failed.get_or_insert_with(error);
                return;
            }
        };
        for (number, answer) in numbers.into_iter().zip(each) {
            let fault = match answer {
                Ok(there) => {
                    self.some = true;
                    if let Some(answer) = self.answers.get_mut(number) {
                        *answer = there;
                    }
                    continue;
                }
                Err(fault) => fault,
            };
            match servers.redirect(way, &fault) {
                Some(way) => self.open.push((number, way)),
                None => {
                    way.node.ended(writes, Some(&fault));
                    let name = self.names.get(number);
                    let error = || servers.error(Some(&way.node), fault, name, writes);
                    self.failed.get_or_insert_with(error);
                }
            }
        }
    }
}
