//! Opening the ports of the admin server and of remote access.

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use std::io::{Error, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

/// Opens a non-blocking listener. `[::]` means all addresses: both families, or IPv4 alone on a node without IPv6, so that one config
/// fits all pods.
pub fn open(address: SocketAddr) -> Result<TcpListener, Error> {
    let listener = open_by(address, bind)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn bind(address: SocketAddr) -> Result<TcpListener, Error> {
    if address.ip() != IpAddr::V6(Ipv6Addr::UNSPECIFIED) {
        return TcpListener::bind(address);
    }
    let (family, kind) = (AddressFamily::INET6, SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    // Some nodes have another default (net.ipv6.bindv6only).
    sockopt::set_ipv6_v6only(&socket, false)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

fn open_by<T>(
    address: SocketAddr,
    bind: impl Fn(SocketAddr) -> Result<T, Error>,
) -> Result<T, Error> {
    match bind(address) {
        Err(e) if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) && no_ipv6(&e) => {
            bind((Ipv4Addr::UNSPECIFIED, address.port()).into())
        }
        other => other,
    }
}

fn no_ipv6(e: &Error) -> bool {
    e.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error())
        || e.kind() == ErrorKind::AddrNotAvailable
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[test]
    fn every_address_is_reachable_over_ipv4_whatever_the_kernel_has() {
        let listener = open("[::]:0".parse().unwrap()).unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        if listener.local_addr().unwrap().is_ipv6() {
            TcpStream::connect((Ipv6Addr::LOCALHOST, port)).unwrap();
            assert!(!sockopt::ipv6_v6only(&listener).unwrap());
        }
    }

    #[test]
    fn without_ipv6_every_address_is_every_ipv4_address_and_others_are_refused() {
        let no_ipv6 = |address: SocketAddr| match address {
            SocketAddr::V4(_) => Ok(address),
            SocketAddr::V6(_) => {
                let errno = rustix::io::Errno::AFNOSUPPORT.raw_os_error();
                Err(Error::from_raw_os_error(errno))
            }
        };
        let opened = |text: &str| open_by(text.parse().unwrap(), no_ipv6).map(|a| a.to_string());
        assert_eq!(opened("[::]:9797").unwrap(), "0.0.0.0:9797");
        assert!(opened("[::1]:9797").is_err(), "one address is not another");
        let busy = |_| Err::<SocketAddr, _>(ErrorKind::AddrInUse.into());
        let busy = open_by("[::]:1".parse().unwrap(), busy).unwrap_err();
        assert_eq!(busy.kind(), ErrorKind::AddrInUse);
    }
}
