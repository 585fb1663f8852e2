//! Opens connections: address, stream, login.

mod sentinel;

use super::auth::Login;
use super::connection::Connection;
use super::fault::Fault;
use super::node::{Node, Reach};
use super::resp::Reply;
use super::stream::Stream;
use super::url::Address;
use crate::Cause;
use std::time::Duration;
use tokio::time::timeout;
use tracing::info;

impl Node {
    /// Opens a connection that is ready for commands.
    pub(super) async fn connect(&self) -> Result<Connection, Fault> {
        let longest = self.connect_longest();
        let connected = timeout(longest, async {
            match &self.dial.reach {
                Reach::Fixed(address) => self.connect_to(address).await,
                Reach::Sentinel(sentinels, master) => self.connect_by(sentinels, master).await,
            }
        });
        connected.await.unwrap_or_else(|_| {
            let seconds = longest.as_secs_f64();
            Err(Fault::unreachable(format!(
                "no connection within {seconds:.1} s"
            )))
        })
    }

    /// Beside other servers it has less time, so that the others can be used.
    fn connect_longest(&self) -> Duration {
        match self.one_of_many() {
            true => self.options.connect.min(self.options.answer),
            false => self.options.connect,
        }
    }

    async fn connect_to(&self, address: &Address) -> Result<Connection, Fault> {
        // A missing file is reported whether the server runs or not.
        let login = self.login().await?;
        let mut connection = self.stream_to(address).await?;
        self.log_in(&mut connection, login.as_ref()).await?;
        if self.dial.how.database != 0 {
            let database = self.dial.how.database.to_string();
            connection.command(&[b"SELECT", database.as_bytes()]);
            connection.answer().await?;
        }
        Ok(connection)
    }

    async fn stream_to(&self, address: &Address) -> Result<Connection, Fault> {
        let (tls, files) = (self.dial.how.tls, &self.dial.tls_files);
        // A handshake that hangs must be reported before the whole time is over.
        let handshake = self.connect_longest() * 3 / 4;
        let stream = Stream::connect(address, tls.then_some(handshake), files).await?;
        let patience = self.one_of_many().then_some(self.options.answer * 2);
        Ok(Connection::new(stream, patience))
    }

    async fn login(&self) -> Result<Option<Login>, Fault> {
        let login = self.dial.how.auth.login().await;
        login.map_err(|why| Fault::Of(Cause::Unauthenticated, why))
    }

    /// Logs in, or with the login before it if the server does not accept this one.
    async fn log_in(
        &self,
        connection: &mut Connection,
        login: Option<&Login>,
    ) -> Result<(), Fault> {
        let Some(login) = login else {
            return Ok(());
        };
        let auth = &self.dial.how.auth;
        let refusal = match log_in(connection, login).await {
            Err(fault @ Fault::Of(Cause::Unauthenticated, _)) => fault,
            Ok(()) => {
                auth.accepted(login);
                return Ok(());
            }
            Err(fault) => return Err(fault),
        };
        for other in auth.others(login) {
            if log_in(connection, &other).await.is_ok() {
                connection.set_logged_in();
                let reason = refusal.detail();
                info!(server = %self.name, reason, "the server does not accept the new login yet; the login before it is used");
                return Ok(());
            }
        }
        Err(refusal)
    }
}

async fn log_in(connection: &mut Connection, login: &Login) -> Result<(), Fault> {
    let password = login.password.as_bytes();
    match &login.user {
        Some(user) => connection.command(&[b"AUTH", user.as_bytes(), password]),
        None => connection.command(&[b"AUTH", password]),
    }
    let refused = |why: String| Err(Fault::Of(Cause::Unauthenticated, why));
    match connection.reply().await? {
        Reply::Simple(_) => Ok(()),
        Reply::Error(text) if text.contains("without any password configured") => {
            refused("a password is configured, but the server has none".into())
        }
        // Only the first word: a server may repeat what it did not understand.
        Reply::Error(text) => match text.split(' ').next().unwrap_or_default() {
            word @ ("LOADING" | "MASTERDOWN") => Err(Fault::Refused(word.into())),
            word => refused(format!(
                "{word}: user or password is wrong, or the user is disabled"
            )),
        },
        _ => Err(Fault::protocol(
            "unexpected reply to AUTH: expected a status",
        )),
    }
}
