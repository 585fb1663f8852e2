"""Objects of a store with the conditions, ranges and ETags of S3.

An ETag is a digest of an object's size and its first bytes. An object of the cache begins with a header that has the
digests of its sections, so the ETag of two different objects differs, in every process that serves the same store.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .store_api import Entry, Stat
from .store_calls import Calls, Unfinished
from .store_errors import Refused

#: First bytes of an object that its ETag covers.
_HEAD_BYTES = 4096
#: ETags that are remembered, so that a range behind the head costs one call fewer.
_TAGS_MOST = 65_536


class Found(NamedTuple):
    """Bytes `start..start + len(data)` of an object."""

    data: memoryview
    start: int
    stat: Stat
    etag: str


def etag_of(size: int, head: memoryview) -> str:
    """The ETag of an object, with its quotation marks."""
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    digest.update(head[:_HEAD_BYTES])
    return f'"{digest.hexdigest()}"'


class Objects:
    """All objects of a store."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._tags: OrderedDict[str, tuple[int, str]] = OrderedDict()
        self._tags_lock = threading.Lock()
        self._held: set[str] = set()
        self._freed = threading.Condition()

    def stat(self, key: str) -> Stat:
        """Raises `Refused` with NoSuchKey if the object does not exist."""
        found = self._calls.call("stat", key)
        if found is None:
            raise Refused(404, "NoSuchKey", "the object does not exist")
        if not isinstance(found, tuple) or type(found[0]) is not int or found[0] < 0:
            raise self._wrong("stat", f"expected a Stat or None, got {type(found).__name__}")
        return Stat(*found)

    def read(self, key: str, stat: Stat, start: int, length: int, if_match: str | None = None) -> Found:
        """A range within the object that `stat` described; with an ETag, only of that version."""
        length = min(length, stat.size - start)
        head = min(stat.size, _HEAD_BYTES)
        if start > 0 or length < head:
            etag = self._etag(key, stat.size)
            self._check(etag, if_match)
            return Found(self._get(key, start, length, stat.size), start, stat, etag)
        data = self._get(key, start, length, stat.size)
        etag = etag_of(stat.size, data)
        self._check(etag, if_match)
        self._remember(key, stat.size, etag)
        return Found(data, start, stat, etag)

    def put(self, key: str, data: memoryview, *, absent: bool = False, if_match: str | None = None) -> str:
        """Stores an object; with `absent` only if there is none, with an ETag only in place of that version.

        Returns its ETag.
        """
        with self._alone([key]):
            if absent and self._calls.call("stat", key) is not None:
                raise Refused(412, "PreconditionFailed", "the object exists")
            if if_match is not None:
                self._check(self._fresh_etag(key), if_match)
            self._forget(key)
            self._calls.call("put", key, data)
            etag = etag_of(len(data), data)
            self._remember(key, len(data), etag)
            return etag

    def delete(self, keys: Sequence[str], if_match: str | None = None) -> None:
        """Removes objects; with an ETag, one object and only that version."""
        with self._alone(keys):
            if if_match is not None:
                (key,) = keys
                self._check(self._fresh_etag(key), if_match)
            for key in keys:
                self._forget(key)
            self._calls.call("delete", keys)

    def list(self, prefix: str, after: str, limit: int) -> Sequence[Entry]:
        """The first `limit` objects in the order of keys; none if the class does not list."""
        found: list[Entry] = []
        # A class may return fewer objects than it could, and none only at the end.
        while self._calls.lists() and len(found) < limit:
            page = self._page(prefix, found[-1].key if found else after, limit - len(found))
            if not page:
                break
            found += page
        return found

    def _page(self, prefix: str, after: str, limit: int) -> Sequence[Entry]:
        page = [Entry(*entry) for entry in self._calls.call("list", prefix, after, limit)]
        last = after
        for entry in page:
            if not entry.key.startswith(prefix) or entry.key <= last:
                raise self._wrong("list", f"{entry.key!r} does not follow {last!r} below {prefix!r}")
            last = entry.key
        if len(page) > limit:
            raise self._wrong("list", f"expected at most {limit} entries, got {len(page)}")
        return page

    def _get(self, key: str, start: int, length: int, size: int) -> memoryview:
        if length == 0:
            return memoryview(b"")
        data = self._calls.call("get", key, start, length)
        if data is None:
            raise Refused(404, "NoSuchKey", "the object was removed while it was read")
        try:
            view = memoryview(data).cast("B")
        except TypeError as error:
            raise self._wrong("get", f"expected bytes or None, got {type(data).__name__}") from error
        if view.nbytes != length:
            where = f"bytes {start}..{start + length} of an object of {size} bytes"
            raise self._wrong("get", f"expected {where}, got {view.nbytes} bytes")
        return view

    def _etag(self, key: str, size: int) -> str:
        with self._tags_lock:
            known = self._tags.get(key)
        if known is not None and known[0] == size:
            return known[1]
        etag = etag_of(size, self._get(key, 0, min(size, _HEAD_BYTES), size))
        self._remember(key, size, etag)
        return etag

    def _fresh_etag(self, key: str) -> str:
        size = self.stat(key).size
        return etag_of(size, self._get(key, 0, min(size, _HEAD_BYTES), size))

    def _check(self, etag: str, if_match: str | None) -> None:
        if if_match is not None and if_match.strip('"') != etag.strip('"'):
            raise Refused(412, "PreconditionFailed", "the object is another version")

    def _remember(self, key: str, size: int, etag: str) -> None:
        with self._tags_lock:
            self._tags[key] = (size, etag)
            self._tags.move_to_end(key)
            if len(self._tags) > _TAGS_MOST:
                self._tags.popitem(last=False)

    def _forget(self, key: str) -> None:
        with self._tags_lock:
            self._tags.pop(key, None)

    @contextlib.contextmanager
    def _alone(self, keys: Sequence[str]) -> Iterator[None]:
        """No other request changes these objects in this process until the calls of the block have ended, which may be
        after their deadline.
        """
        with self._freed:
            if not self._freed.wait_for(lambda: self._held.isdisjoint(keys), self._calls.deadline_s):
                raise Refused(409, "OperationAborted", "another request about this key did not end: try again later")
            self._held.update(keys)
        try:
            yield
        except Unfinished as late:
            late.ended.add_done_callback(lambda _: self._free(keys))
            raise
        except BaseException:
            self._free(keys)
            raise
        self._free(keys)

    def _free(self, keys: Sequence[str]) -> None:
        with self._freed:
            self._held.difference_update(keys)
            self._freed.notify_all()

    def _wrong(self, method: str, why: Any) -> Refused:
        return Refused(500, "InternalError", f"{self._calls.name}.{method}: {why}")
