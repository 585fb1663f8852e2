"""XML of S3's requests and responses, as far as the S3 tier uses it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from .store_api import Entry
from .store_errors import Refused

_HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n'
_SPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


def _text(value: str) -> str:
    # XML 1.0 cannot hold control characters.
    return escape("".join(c if c.isprintable() else "?" for c in value))


def error(code: str, message: str) -> bytes:
    """The body of an error."""
    return f"{_HEAD}<Error><Code>{_text(code)}</Code><Message>{_text(message)}</Message></Error>".encode()


def listing(bucket: str, prefix: str, limit: int, entries: Sequence[Entry], token: str | None) -> bytes:
    """A page of a listing, with the token of the next one. Keys are without the bucket."""

    def contents(entry: Entry) -> str:
        modified = datetime.fromtimestamp(entry.modified_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        key = _text(entry.key)
        return f"<Contents><Key>{key}</Key><LastModified>{modified}</LastModified><Size>{entry.size}</Size></Contents>"

    following = "" if token is None else f"<NextContinuationToken>{_text(token)}</NextContinuationToken>"
    return (
        f"{_HEAD}<ListBucketResult {_SPACE}><Name>{_text(bucket)}</Name><Prefix>{_text(prefix)}</Prefix>"
        f"<KeyCount>{len(entries)}</KeyCount><MaxKeys>{limit}</MaxKeys>"
        f"<IsTruncated>{'false' if token is None else 'true'}</IsTruncated>{following}"
        f"{''.join(map(contents, entries))}</ListBucketResult>"
    ).encode()


def deleted() -> bytes:
    """The response to a batch removal in quiet mode that removed everything."""
    return f"{_HEAD}<DeleteResult {_SPACE}></DeleteResult>".encode()


def upload(bucket: str, key: str, upload_id: str) -> bytes:
    """The response to the begin of an upload."""
    return (
        f"{_HEAD}<InitiateMultipartUploadResult {_SPACE}><Bucket>{_text(bucket)}</Bucket><Key>{_text(key)}</Key>"
        f"<UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
    ).encode()


def uploaded(bucket: str, key: str, etag: str) -> bytes:
    """The response to the end of an upload."""
    return (
        f"{_HEAD}<CompleteMultipartUploadResult {_SPACE}><Bucket>{_text(bucket)}</Bucket><Key>{_text(key)}</Key>"
        f"<ETag>{_text(etag)}</ETag></CompleteMultipartUploadResult>"
    ).encode()


def uploads(bucket: str) -> bytes:
    """A listing without uploads: those of this server expire by themselves."""
    return (
        f"{_HEAD}<ListMultipartUploadsResult {_SPACE}><Bucket>{_text(bucket)}</Bucket>"
        "<IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"
    ).encode()


def _elements(body: bytes, name: str) -> Iterable[dict[str, str]]:
    if b"<!" in body:
        raise Refused(400, "MalformedXML", "document types are not accepted")
    try:
        root = ElementTree.fromstring(body)
    except (ElementTree.ParseError, ValueError, LookupError) as bad:
        raise Refused(400, "MalformedXML", f"the body is no XML: {bad}") from bad
    for element in root:
        if element.tag.rpartition("}")[2] == name:
            yield {child.tag.rpartition("}")[2]: child.text or "" for child in element}


def keys_to_delete(body: bytes) -> list[str]:
    """The keys of a batch removal."""
    keys = [element.get("Key", "") for element in _elements(body, "Object")]
    if not keys or not all(keys) or len(keys) > 1000:
        raise Refused(400, "MalformedXML", f"expected 1 to 1,000 keys, got {len(keys)}")
    return keys


def parts(body: bytes) -> list[tuple[int, str]]:
    """Numbers and ETags of the parts of an upload."""
    found = [(element.get("PartNumber", ""), element.get("ETag", "")) for element in _elements(body, "Part")]
    if not all(number.isascii() and number.isdigit() and len(number) < 6 for number, _ in found):
        raise Refused(400, "MalformedXML", "a part has no number")
    return [(int(number), etag) for number, etag in found]
