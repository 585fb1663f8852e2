//! Commands that run together or not at all, and only if the watched keys did not change.

use super::Connection;
use crate::redis::fault::{Fault, is_denied, redirect};
use crate::redis::resp::Reply;
use std::time::Duration;

/// Servers begin the reply to a transaction that was discarded with this word.
const ABORTED: &str = "EXECABORT";
/// Precedes the reason, if one of the commands was refused.
const BECAUSE_OF: &str = " Transaction discarded because of: ";

/// A connection whose user may not watch or begin a transaction is used for this long: a new connection per attempt would cost more than
/// it helps. But the credentials may have changed since.
const BLIND: Duration = Duration::from_secs(30);

/// A transaction that was begun.
#[must_use]
pub struct Open {
    asking: bool,
    /// The server confirmed it.
    heard: bool,
}

/// A command, word by word.
pub type Words<'a> = Vec<&'a [u8]>;

impl Connection {
    /// Adds a WATCH of these keys, which makes the next transaction fail after any change of them. It has its own reply.
    pub fn watch(&mut self, keys: &[&[u8]]) {
        self.watches += 1;
        let words: Words<'_> = [&b"WATCH"[..]]
            .into_iter()
            .chain(keys.iter().copied())
            .collect();
        self.command(&words);
    }

    /// The reply to the WATCH; after an error no additional key is watched.
    pub async fn watched(&mut self) -> Result<Reply, Fault> {
        let reply = self.awaited().await?;
        if let Reply::Error(text) = &reply {
            self.watches = self.watches.saturating_sub(1);
            self.heeds_if_not_blind(text);
        }
        Ok(reply)
    }

    fn heeds_if_not_blind(&mut self, text: &str) {
        if !is_denied(text) || self.since.elapsed() >= BLIND {
            self.heeds(text);
        }
    }

    /// Whether any key is watched.
    pub fn is_watching(&self) -> bool {
        self.watches > 0
    }

    /// Ends all watches.
    pub async fn unwatch(&mut self) -> Result<(), Fault> {
        self.command(&[b"UNWATCH"]);
        self.answer().await?;
        self.watches = 0;
        Ok(())
    }

    /// Runs these commands atomically and returns their replies. `None`: a watched key changed, and nothing ran. Ends all watches.
    pub async fn transaction(
        &mut self,
        commands: &[Words<'_>],
    ) -> Result<Option<Vec<Reply>>, Fault> {
        let open = self.begin();
        self.asking = false;
        for command in commands {
            self.command(command);
        }
        self.end(open, commands.len()).await
    }

    /// Begins a transaction; its reply is read before the first command.
    pub fn begin(&mut self) -> Open {
        self.command(&[b"MULTI"]);
        self.in_transaction = true;
        // ASKING before MULTI holds until EXEC; after MULTI it would be one of the commands.
        Open {
            asking: self.asking,
            heard: false,
        }
    }

    /// Reads the confirmation of the transaction. Commands that are added from now on run at its end.
    pub async fn begun(&mut self, open: &mut Open) -> Result<(), Fault> {
        if let Reply::Error(text) = self.awaited().await? {
            self.in_transaction = false;
            self.heeds_if_not_blind(&text);
            return Err(Fault::Refused(text));
        }
        self.asking = false;
        open.heard = true;
        Ok(())
    }

    /// Ends a transaction of `commands` commands whose replies were not read, like `transaction`. Without commands it ends the watches.
    pub async fn end(&mut self, open: Open, commands: usize) -> Result<Option<Vec<Reply>>, Fault> {
        self.command(&[b"EXEC"]);
        let mut refused = None;
        if !open.heard {
            self.asking = open.asking;
            refused = refusal(self.reply().await?);
            self.asking = false;
        }
        for _ in 0..commands {
            let queued = refusal(self.reply().await?);
            refused = refused.or(queued);
        }
        let done = self.reply().await?;
        self.asking = open.asking;
        // A transaction that the server did not even discard is still open.
        self.in_transaction = matches!(&done, Reply::Error(text) if !is_given_up(text));
        self.watches = 0;
        let parts = match (refused, done) {
            (Some(text), _) => return Err(Fault::Refused(text)),
            (None, Reply::Error(text)) => {
                let why = text
                    .strip_prefix(ABORTED)
                    .and_then(|rest| rest.strip_prefix(BECAUSE_OF));
                return Err(Fault::Refused(why.unwrap_or(&text).into()));
            }
            (None, Reply::Nil) => return Ok(None),
            (None, Reply::Array(parts)) => parts,
            _ => {
                return Err(Fault::protocol(
                    "unexpected reply to EXEC: expected an array",
                ));
            }
        };
        match parts.iter().find_map(|part| refusal(part.clone())) {
            Some(text) => Err(Fault::Refused(text)),
            None => Ok(Some(parts)),
        }
    }
}

/// Whether this reply to EXEC means that the transaction ended. A cluster node discards one whose slot moves.
fn is_given_up(text: &str) -> bool {
    text.starts_with(ABORTED) || text.starts_with("TRYAGAIN") || redirect(text).is_some()
}

fn refusal(reply: Reply) -> Option<String> {
    match reply {
        Reply::Error(text) => Some(text),
        _ => None,
    }
}
