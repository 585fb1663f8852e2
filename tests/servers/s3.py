"""A real S3 server over a folder, for tests: versitygw with one bucket."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from servers import paths
from servers.process import Process
from servers.waiting import wait_for

BUCKET = "kv-bucket"


class S3Server:
    """A server with an empty bucket. With a folder of certificates that `certificates.for_server` made, it only accepts
    TLS.
    """

    key_id, secret = "kvcachepool-test", "only-for-this-test"
    #: Another user with the permissions of `let_guest`, none at first.
    guest_id, guest_secret = "kvcachepool-guest", "only-for-this-guest"

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        region: str = "us-east-1",
        certificates: Path | None = None,
    ) -> None:
        program = paths.cache() / "tools/bin/versitygw"
        assert program.exists(), f"{program} is not there: run `tools/setup.sh servers`"
        self.folder = paths.short_folder()
        self.port = paths.free_port()
        self.host = host
        self._region = region
        self.data = self.folder / "data"
        for folder in (self.data / BUCKET, self.folder / "auth", self.folder / "users"):
            folder.mkdir(parents=True)
        for name, text in (("AWS_ACCESS_KEY_ID", self.key_id), ("AWS_SECRET_ACCESS_KEY", self.secret)):
            (self.folder / "auth" / name).write_text(text)
        guest = {"access": self.guest_id, "secret": self.guest_secret, "role": "user"}
        (self.folder / "users" / "users.json").write_text(json.dumps({"accessAccounts": {self.guest_id: guest}}))
        command = [str(program), "--access", self.key_id, "--secret", self.secret, "--quiet", "--keep-alive"]
        command += ["--iam-dir", str(self.folder / "users"), "--region", region, "--port", f"{host}:{self.port}"]
        self.endpoint = f"http://{host}:{self.port}"
        self.authority: Path | None = None
        if certificates is not None:
            self.authority = certificates / "ca.crt"
            command += ["--cert", str(certificates / "server.crt"), "--key", str(certificates / "server.key")]
            self.endpoint = f"https://{host}:{self.port}"
        command += ["posix", str(self.data)]
        env = {**os.environ, "HOME": str(self.folder)}
        self.process = Process("versitygw", command, self.folder / "log", env=env)
        wait_for(self._listens, 20, "an S3 server that listens")

    def _listens(self) -> bool:
        assert self.process.running(), f"the S3 server ended:\n{self.process.tail()}"
        with socket.socket() as probe:
            return probe.connect_ex((self.host, self.port)) == 0

    def config(self) -> dict[str, Any]:
        """The section `s3` of a sidecar's config."""
        config = {"bucket": BUCKET, "endpoint": self.endpoint, "auth": str(self.folder / "auth")}
        return {**config, **({"ca": str(self.authority)} if self.authority else {})}

    def objects(self) -> list[Path]:
        """Files of cache objects."""
        return list((self.data / BUCKET).rglob("*.kv"))

    def let_guest(self, *permissions: str) -> None:
        """Sets the guest's permissions in the bucket."""
        bucket = f"arn:aws:s3:::{BUCKET}"
        may = {"Effect": "Allow", "Action": permissions, "Resource": [bucket, f"{bucket}/*"]}
        policy = {"Version": "2012-10-17", "Statement": [{**may, "Principal": [self.guest_id]}]}
        signed = ["--aws-sigv4", f"aws:amz:{self._region}:s3", "--user", f"{self.key_id}:{self.secret}"]
        # curl before version 8 omits that header.
        command = ["curl", "-sSf", "--insecure", *signed, "--header", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]
        command += ["--request", "PUT", "--data", json.dumps(policy), f"{self.endpoint}/{BUCKET}?policy="]
        subprocess.run(command, check=True, capture_output=True, timeout=20)

    def freeze(self) -> None:
        """From now on it accepts connections and does not reply."""
        self.process.signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """It continues."""
        self.process.signal_all(signal.SIGCONT)

    def stop(self) -> None:
        """Ends it and removes its folder."""
        self.process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
