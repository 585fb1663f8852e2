//! Commands that are done together or not at all, and only while what was watched stays as it was.

use super::Connection;
use crate::redis::fault::{Fault, is_denied, redirect};
use crate::redis::resp::Reply;
use std::time::Duration;

/// Servers begin so what they say of a transaction of which they did nothing.
const ABORTED: &str = "EXECABORT";
/// What follows before why, where each command was taken for it.
const BECAUSE_OF: &str = " Transaction discarded because of: ";

/// A connection whose user may not watch or begin a transaction is used for so long all the same: a new one for each try would cost more
/// than it brings. But the login that it was made by may have been exchanged since.
const BLIND: Duration = Duration::from_secs(30);

/// A transaction that was begun.
#[must_use]
pub struct Open {
    asking: bool,
    /// The server said that it is.
    heard: bool,
}

/// A command, word by word.
pub type Words<'a> = Vec<&'a [u8]>;

impl Connection {
    /// Adds the wish to be told, by the next transaction, of any change of these keys; it has a reply of its own.
    pub fn watch(&mut self, keys: &[&[u8]]) {
        self.watches += 1;
        let words: Words<'_> = [&b"WATCH"[..]]
            .into_iter()
            .chain(keys.iter().copied())
            .collect();
        self.command(&words);
    }

    /// The reply to that wish; where it is an error, nothing more is watched than before.
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

    /// Is any key watched?
    pub fn is_watching(&self) -> bool {
        self.watches > 0
    }

    /// Gives up what is watched.
    pub async fn unwatch(&mut self) -> Result<(), Fault> {
        self.command(&[b"UNWATCH"]);
        self.answer().await?;
        self.watches = 0;
        Ok(())
    }

    /// Does these commands at once and returns their replies. None: something that was watched has changed, and nothing was done.
    /// Nothing is watched afterwards.
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

    /// Begins a transaction, which is heard of before its first command.
    pub fn begin(&mut self) -> Open {
        self.command(&[b"MULTI"]);
        self.in_transaction = true;
        // What is asked for before MULTI holds until its end; said in between it would be one of the commands.
        Open {
            asking: self.asking,
            heard: false,
        }
    }

    /// Hears that a transaction was begun: what is added from now on is done at its end.
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

    /// Ends a transaction of so many commands, of which no reply was heard, as `transaction` does. Of none, it gives up what is watched.
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
        // One that the server does not even give up goes on.
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
            _ => return Err(Fault::protocol("EXEC was answered by no replies")),
        };
        match parts.iter().find_map(|part| refusal(part.clone())) {
            Some(text) => Err(Fault::Refused(text)),
            None => Ok(Some(parts)),
        }
    }
}

/// Is it the end of a transaction that EXEC is answered so? A node of a cluster gives up one whose slot moves.
fn is_given_up(text: &str) -> bool {
    text.starts_with(ABORTED) || text.starts_with("TRYAGAIN") || redirect(text).is_some()
}

fn refusal(reply: Reply) -> Option<String> {
    match reply {
        Reply::Error(text) => Some(text),
        _ => None,
    }
}
