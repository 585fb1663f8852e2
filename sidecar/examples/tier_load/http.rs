//! The limit of an S3 server: the same sizes and depth by a bare HTTP/1.1 client, whose requests somebody else has signed.

use super::Load;
use super::measure::{Part, Phase, Turns, threads};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;

/// Reads `address` in the first line of a file, then a line for each object: target of its PUT, blank, target of its GET. With an
/// authority by TLS.
pub fn run(requests: &Path, ca: Option<&Path>, load: Load) {
    let tls = ca.map(trusting);
    let text = std::fs::read_to_string(requests).expect("a file with requests");
    let (address, lines) = text.split_once('\n').expect("an address");
    let targets: Vec<_> = lines.lines().filter_map(|l| l.split_once(' ')).collect();
    let most = (load.operations() as usize).min(targets.len());
    let worker = || {
        (
            Connection::new(address, tls.as_ref()),
            vec![0xA7; load.size.0 as usize],
        )
    };
    let mut workers: Vec<_> = (0..load.in_flight).map(|_| worker()).collect();
    let put = phase(&targets[..most], load, &mut workers, Part::Put);
    phase(&targets[..put], load, &mut workers, Part::Get);
}

fn phase(
    targets: &[(&str, &str)],
    load: Load,
    workers: &mut [(Connection<'_>, Vec<u8>)],
    part: Part,
) -> usize {
    let phase = Phase::begin("http");
    let count = targets.len() as u64;
    let turns = Turns::begin(part, count, load);
    let times = threads(&turns, workers, |(connection, memory), number| {
        let (put, get) = targets.get(number as usize).unwrap();
        match part {
            Part::Put => connection.put(put, memory),
            Part::Get => connection.get(get, memory),
        }
    });
    let done = times.len();
    phase.end(part, load, times);
    done
}

fn trusting(ca: &Path) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(ca).unwrap())
        .unwrap();
    let provider = Arc::new(aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config)
}

/// The socket below TLS. rustls reads only 4 KiB at a time.
struct Below(BufReader<TcpStream>);

impl Read for Below {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl Write for Below {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.get_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

trait Both: Read + Write + Send {}
impl<T: Read + Write + Send> Both for T {}

struct Connection<'a> {
    stream: BufReader<Box<dyn Both>>,
    address: &'a str,
}

impl<'a> Connection<'a> {
    fn new(address: &'a str, tls: Option<&Arc<ClientConfig>>) -> Self {
        let stream = TcpStream::connect(address).expect("the server listens");
        stream.set_nodelay(true).unwrap();
        let stream: Box<dyn Both> = match tls {
            None => Box::new(stream),
            Some(tls) => {
                let (host, _) = address.split_once(':').unwrap();
                let name = ServerName::try_from(host.to_owned()).unwrap();
                let session = ClientConnection::new(tls.clone(), name).unwrap();
                let below = Below(BufReader::with_capacity(64 << 10, stream));
                Box::new(StreamOwned::new(session, below))
            }
        };
        Self {
            stream: BufReader::new(stream),
            address,
        }
    }

    fn put(&mut self, target: &str, body: &[u8]) {
        self.ask("PUT", target, body.len());
        self.stream.get_mut().write_all(body).unwrap();
        let left = self.answered();
        let mut rest = vec![0; left];
        self.stream.read_exact(&mut rest).unwrap();
    }

    fn get(&mut self, target: &str, into: &mut [u8]) {
        self.ask("GET", target, 0);
        assert_eq!(self.answered(), into.len(), "length of an object");
        self.stream.read_exact(into).unwrap();
    }

    fn ask(&mut self, method: &str, target: &str, length: usize) {
        let address = self.address;
        let head = format!(
            "{method} {target} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {length}\r\n\r\n"
        );
        self.stream.get_mut().write_all(head.as_bytes()).unwrap();
    }

    /// Reads the head of an answer, which must be 200, and returns the length of its body.
    fn answered(&mut self) -> usize {
        let (mut line, mut length) = (String::new(), 0);
        self.stream.read_line(&mut line).unwrap();
        assert!(line.starts_with("HTTP/1.1 200"), "{line}");
        loop {
            line.clear();
            self.stream.read_line(&mut line).unwrap();
            let text = line.trim_end().to_ascii_lowercase();
            if text.is_empty() {
                return length;
            }
            if let Some(value) = text.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
        }
    }
}
