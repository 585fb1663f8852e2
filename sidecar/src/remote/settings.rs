//! Settings of the server: arguments of `serve`.

use clap::builder::RangedU64ValueParser;
use kvcachepool_protocol::config::{ByteSize, Config};
use std::net::SocketAddr;
use std::path::PathBuf;

/// A frame with its data must fit into the buffers.
const BUFFER_BYTES_MIN: u64 = 16 << 20;

// Not a doc comment: it would replace the description of the command.
#[derive(Debug, Clone, clap::Args)]
pub struct Settings {
    /// Socket of the sidecar.
    #[arg(long, value_name = "PATH", default_value_os_t = Config::default().socket)]
    pub socket: PathBuf,
    /// Address and port for clients.
    #[arg(long, value_name = "ADDRESS", default_value = "[::]:9800")]
    pub listen: SocketAddr,
    /// Address and port of /healthz, /readyz and /metrics, over HTTP.
    #[arg(long, value_name = "ADDRESS", default_value = "[::]:9801")]
    pub admin: SocketAddr,
    /// Certificate chain in PEM. Its names must be those that clients connect to.
    #[arg(long, value_name = "FILE")]
    pub certificate: PathBuf,
    /// Private key of the certificate, in PEM.
    #[arg(long, value_name = "FILE")]
    pub private_key: PathBuf,
    /// Keys of the clients: one per line, each of 16 or more characters.
    #[arg(long, value_name = "FILE")]
    pub key_file: PathBuf,
    /// Open connections of clients.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = RangedU64ValueParser::<u32>::new().range(1..=65_536))]
    pub connections: u32,
    /// Memory for values on their way, of all connections together.
    #[arg(long, value_name = "BYTES", default_value_t = ByteSize(256 << 20), value_parser = buffers)]
    pub buffers: ByteSize,
    /// File to write the address of --listen to, for a port that the system chooses (port 0).
    #[arg(long, value_name = "FILE")]
    pub address_file: Option<PathBuf>,
}

fn buffers(value: &str) -> Result<ByteSize, String> {
    let size: ByteSize = value.parse().map_err(|e| format!("{e}"))?;
    match size.0 >= BUFFER_BYTES_MIN {
        true => Ok(size),
        false => Err(format!("expected at least {}", ByteSize(BUFFER_BYTES_MIN))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::net::Ipv6Addr;

    /// A command line.
    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        settings: Settings,
    }

    #[test]
    fn by_default_it_listens_on_all_addresses_of_both_families() {
        let line = [
            "serve",
            "--certificate=c",
            "--private-key=p",
            "--key-file=k",
        ];
        let settings = Line::try_parse_from(line).unwrap().settings;
        let all = |port| SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
        assert_eq!((settings.listen, settings.admin), (all(9800), all(9801)));
    }
}
