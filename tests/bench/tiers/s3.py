"""The S3 tier and a bare HTTP client with requests that are signed beforehand: the same server, the same bytes."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from bench.tiers.load import Amount, Cell, Measured, Turn, tier, tier_load
from servers import certificates
from servers.paths import short_folder
from servers.s3 import BUCKET, S3Server

REFERENCE = "bare HTTP client"
REGION = "us-east-1"


class S3:
    """A server, and a config that names it."""

    def __init__(self, folder: Path, server: S3Server) -> None:
        self._folder, self._server = folder, server
        self._config = folder / "config.yaml"
        self._config.write_text(json.dumps({"s3": server.config()}))
        self._tls = ["--ca", str(server.authority)] if server.authority else []
        self._runs = 0

    def turn(self, cell: Cell, amount: Amount) -> Turn:
        """Both on the same server, one after the other."""
        limit = self._limit(cell, amount)
        return Turn(tier(self._config, cell, amount), limit)

    def _limit(self, cell: Cell, amount: Amount) -> Measured:
        self._runs += 1
        names = [f"bare/{self._runs}/{number}" for number in range(max(1, amount.most // cell.size))]
        lines = [f"{self._signed('PUT', name)} {self._signed('GET', name)}" for name in names]
        requests = self._folder / "requests"
        requests.write_text("\n".join([f"127.0.0.1:{self._server.port}", *lines]) + "\n")
        measured = tier_load(["http", "--requests", str(requests), *self._tls], cell, amount)["http"]
        shutil.rmtree(self._server.data / BUCKET / "bare")
        return measured

    def _signed(self, method: str, name: str) -> str:
        """Target of a request with its signature in the query (Signature Version 4, unsigned body)."""
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        scope = f"{now[:8]}/{REGION}/s3/aws4_request"
        query = {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": f"{self._server.key_id}/{scope}",
            "X-Amz-Date": now,
            "X-Amz-Expires": "3600",
            "X-Amz-SignedHeaders": "host",
        }
        text = "&".join(f"{key}={quote(value, safe='')}" for key, value in sorted(query.items()))
        path = f"/{BUCKET}/{name}"
        canonical = f"{method}\n{path}\n{text}\nhost:127.0.0.1:{self._server.port}\n\nhost\nUNSIGNED-PAYLOAD"
        to_sign = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        key = f"AWS4{self._server.secret}".encode()
        for part in (*scope.split("/"), to_sign):
            key = hmac.digest(key, part.encode(), "sha256")
        return f"{path}?{text}&X-Amz-Signature={key.hex()}"


@contextmanager
def subject(tls: bool = False) -> Iterator[S3]:
    """A server over a folder."""
    folder = short_folder()
    pki = folder / "pki" if tls else None
    if pki:
        certificates.for_server(pki, "127.0.0.1")
    server = S3Server(certificates=pki)
    try:
        yield S3(folder, server)
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
