"""Publishing small objects under a condition, which the store itself decides: of two writers one wins, whatever happens to the answers."""

from __future__ import annotations

from ckpt.errors import ConflictError, NotFoundError

from .probing import checks_of, conditional
from .reading import Key, read_tagged
from .requests import conflict, put


def put_if(key: Key, data: bytes, expected: bytes | None) -> None:
    """``Backend.put_if`` for one key."""
    if not conditional(key):
        _put_after_comparing(key, data, expected)
    elif expected is None:
        put(key, data, {"IfNoneMatch": "*"}, checks_of(key))
    else:
        _replace(key, data, _tag_of(key, expected))


def _replace(key: Key, data: bytes, etag: str) -> None:
    # The compare-and-swap of object stores: If-Match with the ETag of the content that the caller expects. The ETag
    # comes from a read whose bytes were compared, so there is no moment between comparing and replacing.
    bare = etag.strip('"')
    if key.bucket in key.client.bare_tags:
        put(key, data, {"IfMatch": bare}, checks_of(key))
        return
    try:
        put(key, data, {"IfMatch": etag}, checks_of(key))
    except ConflictError:
        # Some versions of Ceph compare with the quotes that belong to an ETag, some without.
        if bare == etag or _etag(key) != etag:
            raise
        put(key, data, {"IfMatch": bare}, checks_of(key))
        key.client.bare_tags.add(key.bucket)


def _tag_of(key: Key, content: bytes) -> str:
    """The ETag of the object, which holds exactly ``content``."""
    try:
        stored, etag = read_tagged(key)
    except NotFoundError as err:
        raise conflict(key, "it is absent now") from err
    if stored != content:
        raise conflict(key, "it holds something else now")
    return etag


def _etag(key: Key) -> str:
    try:
        return read_tagged(key)[1]
    except NotFoundError:
        return ""


def _put_after_comparing(key: Key, data: bytes, expected: bytes | None) -> None:
    """Look, then write, then look again: what another writer does in between is found out late, or not at all."""
    try:
        stored: bytes | None = read_tagged(key)[0]
    except NotFoundError:
        stored = None
    if stored != expected:
        raise conflict(key, "the name is taken" if expected is None else "it is absent or holds something else now")
    put(key, data, {}, checks_of(key))
    try:
        stored = read_tagged(key)[0]
    except NotFoundError:
        stored = None
    if stored != data:
        raise conflict(key, "another writer replaced it at once")
