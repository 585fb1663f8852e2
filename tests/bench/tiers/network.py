"""The network in which tiers and their servers are measured."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

_CHOSEN = Path("/proc/sys/net/ipv4/tcp_congestion_control")
#: What Linux chooses where nobody does, and what every kernel has. Both send as fast as they may.
_USUAL = ("cubic", "reno")
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1


def enter_own() -> None:
    """From now on this process and what it starts have a network of their own (root), which sends as Linux does by
    itself and ends with them. Call from the main thread.

    BBR, which some machines choose, sends by a timer, at a rate that it finds out as over a network: with servers on
    the same machine that rate is what would be measured, and it depends on when somebody reads.
    """
    chosen = _CHOSEN.read_text().strip()
    if chosen in _USUAL:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        why = os.strerror(ctypes.get_errno())
        print(f"no network of its own: {why}; the pace of {chosen} may be what bounds Redis and S3", file=sys.stderr)
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
    for usual in _USUAL:
        try:
            _CHOSEN.write_text(usual)
        except OSError:
            continue
        return
    print(f"the kernel allows none of {_USUAL}; the pace of {chosen} may be what bounds Redis and S3", file=sys.stderr)
