"""How the kernel sends over local connections while tiers are measured."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CHOSEN = Path("/proc/sys/net/ipv4/tcp_congestion_control")
#: What Linux chooses where nobody does.
USUAL = "cubic"


@contextmanager
def unpaced() -> Iterator[None]:
    """Sends as fast as the other side takes it (root).

    BBR, which some machines choose, sends by a timer, at a rate that it finds out as over a network: with servers on
    the same machine that rate is what would be measured, and it depends on when somebody reads.
    """
    before = _CHOSEN.read_text().strip()
    if before == USUAL:
        yield
        return
    try:
        _CHOSEN.write_text(USUAL)
    except OSError as e:
        print(f"{_CHOSEN}: {e}; measured with {before}, whose pace may be what bounds Redis and S3", file=sys.stderr)
        yield
        return
    # Else what is terminated would leave it so.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        _CHOSEN.write_text(before)
