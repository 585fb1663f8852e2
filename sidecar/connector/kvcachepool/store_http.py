"""The part of S3's HTTP interface that the sidecar's S3 tier uses, for path-style addresses.

A response never has other bytes than its headers say: the store's answer is complete before the first byte is sent, and
a request whose body was not read closes its connection.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import io
import re
import socket
import threading
import time
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from . import store_sign, store_xml
from .store_calls import Budget, Calls
from .store_errors import Refused, line, log
from .store_objects import Found, Objects
from .store_request import UNSIGNED, Receiver, Target, byte_range, check_headers, check_key, check_prefix, target
from .store_uploads import Uploads

#: Longest pause within a request or a response, and between requests of a connection.
_IDLE_S = 75.0
#: Longest time from the first byte of a request to the end of its headers, and of a body.
_HEAD_S = 10.0
_BODY_S = 60.0
_PAGE_MOST = 1000
_LENGTH = re.compile(r"\d{1,15}$", re.ASCII)


class Server(ThreadingHTTPServer):
    """Serves one store."""

    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(
        self, address: tuple[str, int], calls: Calls, budget: Budget, keys: store_sign.Keys | None, connections: int
    ) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.calls, self.budget, self.keys = calls, budget, keys
        self.objects, self.uploads = Objects(calls), Uploads(budget)
        self.stopping = False
        self._free = threading.Semaphore(connections)
        self._open: set[Any] = set()
        self._busy: set[Any] = set()
        self._changed = threading.Condition()
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a connection's thread, unless there are too many."""
        if not self._free.acquire(blocking=False):
            log.warning(line("connection refused: too many connections"))
            body = store_xml.error("SlowDown", "too many connections")
            head = f"HTTP/1.1 503 Slow Down\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            try:
                request.settimeout(1)
                request.sendall(head.encode() + body)
            except OSError as error:
                log.info(line("connection lost", error=error))
            self.shutdown_request(request)
            return
        with self._changed:
            self._open.add(request)
        try:
            super().process_request(request, client_address)
        except BaseException:
            # No thread could start. The base class closes the connection.
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def _leave(self, request: Any) -> None:
        with self._changed:
            self._open.discard(request)
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no error of the server."""
        log.info(line("connection lost"), exc_info=True)

    @contextlib.contextmanager
    def serving(self, connection: Any) -> Iterator[None]:
        """A connection has a request for the time of a block."""
        with self._changed:
            self._busy.add(connection)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(connection)
                self._changed.notify_all()

    def drain(self, seconds: float) -> bool:
        """Ends idle connections, and waits for requests that are being served."""
        self.stopping = True
        with self._changed:
            for request in self._open - self._busy:
                try:
                    request.shutdown(socket.SHUT_RD)
                except OSError as error:
                    log.debug(line("connection ended", error=error))
            return self._changed.wait_for(lambda: not self._busy, seconds)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "kvcachepool-store"
    sys_version = ""
    timeout = _IDLE_S
    disable_nagle_algorithm = True
    server: Server

    def setup(self) -> None:
        """Reads through a `Receiver`."""
        super().setup()
        self.rfile.close()
        self._receiver = Receiver(self.connection, _IDLE_S)
        self.rfile = io.BufferedReader(self._receiver, 65_536)

    def handle_one_request(self) -> None:
        """See the base class."""
        self._receiver.await_request(_HEAD_S)
        super().handle_one_request()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged one by one."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For requests that the base class does not understand."""
        self.close_connection = True
        # Without a version the base class would send no status.
        self.request_version = self.protocol_version
        self._answer(code, store_xml.error("InvalidRequest", message or "invalid request"))

    def do_GET(self) -> None:
        """Health, a listing, or an object."""
        self._serve(self._get)

    def do_HEAD(self) -> None:
        """The size of an object."""
        self._serve(self._head)

    def do_PUT(self) -> None:
        """An object or a part."""
        self._serve(self._put)

    def do_POST(self) -> None:
        """A batch removal, or the begin or end of an upload."""
        self._serve(self._post)

    def do_DELETE(self) -> None:
        """Removes an object or an upload."""
        self._serve(self._delete)

    def _serve(self, method: Callable[[Target, bytearray], None]) -> None:
        self._taken, self._answered = 0, False
        with self.server.serving(self.connection):
            try:
                self._respond(method)
            except (OSError, EOFError) as error:
                log.info(line("connection lost", error=error))
                self.close_connection = True
            finally:
                self.server.budget.give(self._taken)

    def _respond(self, method: Callable[[Target, bytearray], None]) -> None:
        try:
            self._check_headers()
            if self.path == "/healthz":
                self._health()
                return
            self._authenticate()
            body = self._read_body()
            method(target(self.command, self.path), body)
        except Refused as refused:
            if refused.status >= 500:
                log.warning(line("request failed", status=refused.status, code=refused.code, reason=refused.message))
            self._answer(refused.status, store_xml.error(refused.code, refused.message))
        except (OSError, EOFError):
            raise
        except Exception as error:
            log.exception(line("request failed", store=self.server.calls.name))
            self.close_connection = True
            if not self._answered:
                why = f"a result of {self.server.calls.name} is invalid: {type(error).__name__}: {error}"
                self._answer(500, store_xml.error("InternalError", why))

    def _health(self) -> None:
        # Requests for health are not signed, so their bodies are not read.
        sized = self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers
        if sized or self.command not in ("GET", "HEAD"):
            self.close_connection = True
            raise Refused(400, "InvalidRequest", "expected GET or HEAD of /healthz without a body")
        stuck = self.server.calls.stuck()
        text = f"every call of {self.server.calls.name} exceeded its deadline\n" if stuck else "ok\n"
        self._answer(503 if stuck else 200, text.encode(), kind="text/plain")

    def _check_headers(self) -> None:
        try:
            check_headers(self.headers)
        except Refused:
            # The end of this request is not certain.
            self.close_connection = True
            raise

    def _authenticate(self) -> None:
        if self.server.keys is None:
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            store_sign.check(self.server.keys, self.command, self.path, headers, time.time())
        except Refused:
            # The body of a stranger is not read.
            self.close_connection = True
            raise

    def _read_body(self) -> bytearray:
        """The whole body. Its bytes are taken from the budget until the response is sent."""
        sent = self.headers.get("Content-Length")
        unread = self.close_connection
        # Until the body was read, the next request on this connection cannot be found.
        self.close_connection = True
        encoding = self.headers.get("Content-Encoding", "")
        if "Transfer-Encoding" in self.headers or "aws-chunked" in encoding:
            raise Refused(400, "InvalidRequest", "expected a plain body: set s3.checksums to WhenRequired")
        if sent is not None and not _LENGTH.match(sent):
            raise Refused(400, "InvalidRequest", "the Content-Length is invalid")
        if sent is None and self.command == "PUT":
            raise Refused(411, "MissingContentLength", "a PUT needs a Content-Length")
        length = int(sent or 0)
        # Parts of clients that are gone must not hold its room.
        self.server.uploads.expire()
        self.server.budget.take(length)
        self._taken += length
        body = bytearray(length)
        view, at = memoryview(body), 0
        self._receiver.within(_BODY_S)
        while at < length:
            try:
                got = self.rfile.readinto(view[at:])
            except TimeoutError as error:
                why = f"{at} of {length} bytes of the body arrived within {_BODY_S:g} s: check the network"
                raise Refused(408, "RequestTimeout", why) from error
            if not got:
                raise EOFError(f"the body ended at byte {at} of {length}")
            at += got
        self.close_connection = unread
        self._check_digests(body)
        return body

    def _check_digests(self, body: bytearray) -> None:
        sha256 = self.headers.get("x-amz-content-sha256", UNSIGNED)
        if sha256 != UNSIGNED and hashlib.sha256(body).hexdigest() != sha256:
            raise Refused(400, "XAmzContentSHA256Mismatch", "the body differs from x-amz-content-sha256")
        crc32 = self.headers.get("x-amz-checksum-crc32")
        if crc32 is not None and b64encode(zlib.crc32(body).to_bytes(4, "big")).decode() != crc32:
            raise Refused(400, "BadDigest", "the body differs from x-amz-checksum-crc32")

    def _get(self, at: Target, body: bytearray) -> None:
        if not at.name:
            self._list(at)
            return
        stat = self.server.objects.stat(at.key)
        start, end = byte_range(self.headers.get("Range"), stat.size)
        self.server.budget.take(end - start)
        self._taken += end - start
        found = self.server.objects.read(at.key, stat, start, end - start, self.headers.get("If-Match"))
        self._send(found)

    def _send(self, found: Found) -> None:
        end, size = found.start + len(found.data), found.stat.size
        ranged = self.headers.get("Range") is not None
        headers = {"ETag": found.etag}
        if found.stat.modified_s is not None:
            headers["Last-Modified"] = email.utils.formatdate(found.stat.modified_s, usegmt=True)
        if ranged:
            headers["Content-Range"] = f"bytes {found.start}-{end - 1}/{size}"
        self._answer(206 if ranged else 200, found.data, headers, kind="application/octet-stream")

    def _list(self, at: Target) -> None:
        if "uploads" in at.query:
            self._answer(200, store_xml.uploads(at.bucket))
            return
        limit, prefix = at.query.get("max-keys", str(_PAGE_MOST)), at.query.get("prefix", "")
        if at.query.get("list-type") != "2" or not _LENGTH.match(limit):
            raise Refused(501, "NotImplemented", "expected a listing of version 2")
        most = max(1, min(int(limit), _PAGE_MOST))
        base = f"{at.bucket}/"
        token = at.query.get("continuation-token", "")
        check_prefix(at.bucket, prefix)
        if token:
            check_key(at.bucket, token)
        found = self.server.objects.list(base + prefix, base + token if token else "", most)
        entries = [entry._replace(key=entry.key.removeprefix(base)) for entry in found]
        following = entries[-1].key if len(entries) == most else None
        self._answer(200, store_xml.listing(at.bucket, prefix, most, entries, following))

    def _head(self, at: Target, body: bytearray) -> None:
        stat = self.server.objects.stat(at.key)
        self._answer(200, b"", {"Content-Length": str(stat.size)}, kind="application/octet-stream")

    def _put(self, at: Target, body: bytearray) -> None:
        self._object_of(at)
        upload_id = at.query.get("uploadId")
        if upload_id is not None:
            number = at.query.get("partNumber", "")
            if not _LENGTH.match(number):
                raise Refused(400, "InvalidArgument", "expected a part number")
            etag = self.server.uploads.part(upload_id, at.key, int(number), body)
            # The upload has these bytes now.
            self._taken = 0
        else:
            etag = self.server.objects.put(at.key, memoryview(body), **self._conditions())
        self._answer(200, b"", {"ETag": etag})

    def _conditions(self) -> dict[str, Any]:
        absent = self.headers.get("If-None-Match")
        if absent not in (None, "*"):
            raise Refused(501, "NotImplemented", "expected If-None-Match: *")
        return {"absent": absent is not None, "if_match": self.headers.get("If-Match")}

    def _post(self, at: Target, body: bytearray) -> None:
        upload_id = at.query.get("uploadId")
        if "delete" in at.query and not at.name:
            names = store_xml.keys_to_delete(bytes(body))
            for name in names:
                check_key(at.bucket, name)
            self.server.objects.delete([f"{at.bucket}/{name}" for name in names])
            self._answer(200, store_xml.deleted())
        elif "uploads" in at.query:
            self._object_of(at)
            self._answer(200, store_xml.upload(at.bucket, at.name, self.server.uploads.begin(at.key)))
        elif upload_id is not None:
            self._object_of(at)
            conditions = self._conditions()
            with self.server.uploads.joined(upload_id, at.key, store_xml.parts(bytes(body))) as whole:
                etag = self.server.objects.put(at.key, memoryview(whole), **conditions)
            self._answer(200, store_xml.uploaded(at.bucket, at.name, etag))
        else:
            raise Refused(501, "NotImplemented", "this request is not supported")

    def _delete(self, at: Target, body: bytearray) -> None:
        self._object_of(at)
        upload_id = at.query.get("uploadId")
        if upload_id is not None:
            self.server.uploads.drop(upload_id)
        else:
            self.server.objects.delete([at.key], self.headers.get("If-Match"))
        self._answer(204, b"")

    def _object_of(self, at: Target) -> None:
        if not at.name:
            raise Refused(501, "NotImplemented", "buckets are neither created nor removed")

    def _answer(
        self,
        status: int,
        body: bytes | memoryview,
        headers: dict[str, str] | None = None,
        kind: str = "application/xml",
    ) -> None:
        """Sends a response."""
        self._answered = True
        self.close_connection = self.close_connection or self.server.stopping
        headers = headers or {}
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Type", kind)
            if "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD" and body:
            self.wfile.write(body)
