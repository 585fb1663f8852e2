//! The limit of an S3 server: the same sizes and depth by a bare HTTP/1.1 client, whose requests somebody else has signed.

use super::Load;
use super::measure::{Part, Phase, Turns, threads};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;

/// Reads `address` in the first line of a file, then a line for each object: target of its PUT, blank, target of its GET.
pub fn run(requests: &Path, load: Load) {
    let text = std::fs::read_to_string(requests).expect("a file with requests");
    let (address, lines) = text.split_once('\n').expect("an address");
    let targets: Vec<_> = lines.lines().filter_map(|l| l.split_once(' ')).collect();
    let most = (load.operations() as usize).min(targets.len());
    let worker = || (Connection::new(address), vec![0xA7; load.size.0 as usize]);
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

struct Connection<'a> {
    stream: BufReader<TcpStream>,
    address: &'a str,
}

impl<'a> Connection<'a> {
    fn new(address: &'a str) -> Self {
        let stream = TcpStream::connect(address).expect("the server listens");
        stream.set_nodelay(true).unwrap();
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
