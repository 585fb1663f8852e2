"""Serves a Python class as a tier: `python -m kvcachepool.store MODULE:CLASS`.

The sidecar reaches it as its S3 tier: `s3.endpoint: http://127.0.0.1:9810`. `store_api.Store` is the interface of the
class, and docs/guides/dynamic-tier.md is the guide.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .store_calls import BadClass, Budget, Calls, load
from .store_errors import Refused, line, log
from .store_http import Server
from .store_sign import BadKey, Keys

_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_EXAMPLES = """examples:
  python -m kvcachepool.store kvcachepool.store_memory:MemoryStore
  python -m kvcachepool.store kvcachepool.store_memory:MemoryStore --config '{"capacity_bytes": 1073741824}'
  python -m kvcachepool.store my_module:MyStore --config @/etc/my-store.json --listen 0.0.0.0:9810 \\
    --auth /var/run/kvcachepool/s3
"""


def _size(text: str) -> int:
    parsed = re.fullmatch(r"(\d{1,9})(Ki|Mi|Gi|)", text)
    if not parsed or int(parsed[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 512Mi, got {text!r}")
    return int(parsed[1]) * _UNITS[parsed[2]]


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds up to 3600, got {text!r}")
    return seconds


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 9999, got {text!r}")
    return int(text)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not re.fullmatch(r"\d{1,5}", port) or int(port) > 65_535:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {text!r}")
    return host, int(port)


def _config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, or @FILE with one: {error}") from error
    if not isinstance(config, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {type(config).__name__}")
    return config


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(
        prog="python -m kvcachepool.store",
        description="Serves a Python class to sidecars as their S3 tier.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("store", metavar="MODULE:CLASS", help="the class; its interface is kvcachepool.store_api.Store")
    made.add_argument("--config", type=_config, default={}, help="arguments of the class: a JSON object, or @FILE")
    made.add_argument("--listen", type=_address, default="127.0.0.1:9810", help="HOST:PORT (default: %(default)s)")
    made.add_argument(
        "--auth",
        type=Path,
        help="folder with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, as s3.auth of the sidecar: requests must be"
        " signed with this key; required to listen on other addresses than the loopback interface",
    )
    made.add_argument(
        "--concurrency", type=_count, default=16, help="calls of the class at once (default: %(default)s)"
    )
    made.add_argument(
        "--connections", type=_count, default=256, help="connections at once, of all sidecars (default: %(default)s)"
    )
    made.add_argument(
        "--memory",
        type=_size,
        default="1Gi",
        help="bytes of objects in this process at once; while parts are joined, one part more (default: %(default)s)",
    )
    made.add_argument(
        "--deadline", type=_seconds, default=10.0, help="seconds of a call of the class (default: %(default)g)"
    )
    made.add_argument(
        "--open-deadline", type=_seconds, default=60.0, help="seconds of the class's open (default: %(default)g)"
    )
    made.add_argument(
        "--grace", type=_seconds, default=10.0, help="seconds that SIGTERM leaves to requests (default: %(default)g)"
    )
    return made


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def keys_of(arguments: argparse.Namespace) -> Keys | None:
    """The key of `--auth`. Raises `BadKey` if other hosts reach the address and there is none."""
    host, _ = arguments.listen
    if arguments.auth is not None:
        return Keys(arguments.auth)
    if not _is_loopback(host):
        raise BadKey(f"--listen {host} is reachable from other hosts: add --auth FOLDER, or listen on 127.0.0.1")
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit code."""
    arguments = parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    sys.path.insert(0, os.getcwd())
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        keys = keys_of(arguments)
        calls = Calls(load(arguments.store, arguments.config), arguments.concurrency, arguments.deadline)
        calls.call("open", deadline_s=arguments.open_deadline)
        budget = Budget(arguments.memory, arguments.deadline)
        server = Server(arguments.listen, calls, budget, keys, arguments.connections)
    except (BadClass, BadKey, Refused, OSError) as error:
        log.error(line("cannot start", store=arguments.store, reason=error))
        return 1
    if not calls.lists():
        log.warning(line("class has no list: the sidecar cannot count, expire, evict or clear", store=calls.name))
    host, port = server.server_address[:2]
    log.info(line("listening", address=f"{host!s}:{port}", store=calls.name, signed=keys is not None))
    threading.Thread(target=server.serve_forever, args=(0.1,), name="accept", daemon=True).start()
    stop.wait()
    server.shutdown()
    server.server_close()
    drained = server.drain(arguments.grace)
    try:
        calls.call("close")
    except Refused as error:
        log.warning(line("close failed", reason=error.message))
    log.info(line("stopped", drained=drained))
    return 0


if __name__ == "__main__":
    sys.stderr.flush()
    code = main()
    logging.shutdown()
    # Calls that hang must not keep the process.
    os._exit(code)
