"""Writing one new object: a single request if it is not large, else parts that are sent at once from several threads.

Of parts, a write that covers a whole one is sent from the caller's own memory. Other bytes are gathered until their part is whole, and sent
from there beside the caller, who waits only while ``LANES`` gathered parts of the process are on their way. So memory is bounded as long as
writes come more or less in order: each hole keeps at most one part. A single request is gathered whole; ``S3Client.room`` bounds these.

Invariant: a part of an upload is sent whole or not at all, and the upload is completed from parts that the store has confirmed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from botocore.exceptions import ClientError

from ckpt.concurrency import Pending, run_tasks
from ckpt.errors import ConflictError, StorageError

from .protocol import CopySource
from .s3_client import LANES, OFF, Checks, ConfirmedPart, check_whole
from .s3_probing import checks_of, part_checks_of
from .s3_reading import Key, abort_upload, check_free, delete, head_if_there, marked, new_mark, put
from .s3_tries import ChangedError, Tries, code_of, status_of, tag_of, translated
from .writer_base import WriterBase, WrittenRanges

# How a new object is cut into parts, and parts that are gathered in memory.

PART = 16 << 20
"""Bytes of a part: enough that the request around them costs little, and one that is lost is soon sent again."""
SINGLE = 64 << 20
"""Bytes of an object that is one request where there is room to gather it. As parts it would be six: a store takes so many requests a
second, and a job of thousands of ranks sends all of theirs at once."""
LONG_PART = 64 << 20
MANY_PARTS, MOST_PARTS = 1000, 10_000
"""Parts grow up to ``LONG_PART`` rather than be more than the first of these, and further rather than be more than the second, which no
store takes."""
_MIB = 1 << 20


def part_size(size: int, least: int = PART) -> int:
    """Bytes of each part but the last of an object of ``size`` bytes: whole MiB, all alike (some stores insist)."""
    wanted = max(least, min(LONG_PART, -(-size // MANY_PARTS)), -(-size // MOST_PARTS))
    return -(-wanted // _MIB) * _MIB


class PartRange(NamedTuple):
    """Where some bytes go: into part ``number``, from its byte ``at`` on."""

    number: int
    at: int
    view: memoryview


class Gathered:
    """A part that is gathered from writes that do not cover it."""

    def __init__(self, size: int) -> None:
        self.memory = np.empty(size, dtype=np.uint8).data  # a bytearray would be filled with zeros first
        self.written = WrittenRanges(size)

    @property
    def whole(self) -> bool:
        return self.written.count == len(self.memory)


# Where the bytes of a write go
#
#   the object is ``single``             gathered whole; one PUT at commit, with the condition that the name is free
#   the write covers a whole part        sent from the caller's memory, who waits for it
#   it covers some of a part             gathered; whoever writes the last byte of the part hands it to a thread that sends it (``_take``)
#
# A part that is sent twice would race with itself in the store, which keeps either. So a part is in one of: ``_gathered`` (some bytes are
# missing), ``_sent`` (on its way), ``_parts`` (confirmed). It goes back only if sending it failed, or if all of it is written again.


_NO_COPY = {400, 403, 404, 405, 412, 416, 501}
"""What a store answers that does not copy ranges, or not this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class S3CopySource(CopySource):
    """One version of an object, by its ETag."""

    key: Key
    tag: str


class S3Writer(WriterBase):
    """An object of ``size`` bytes that is being written to ``key``, in one request if it is ``single``, else in parts of ``part`` bytes.

    ``room`` bytes of the client's are given back when it is done.
    """

    def __init__(self, key: Key, size: int, part: int, *, conditional: bool, single: bool, room: int = 0) -> None:
        super().__init__(where=key.where, size=size)
        self._key = key
        self._part = size if single else min(part, size)
        self.single = single
        self._room = room
        self._condition = {"IfNoneMatch": "*"} if conditional else {}
        self._parts_lock = threading.Lock()
        """Of the parts below: threads that send them must not wait for a commit, which waits for them."""
        self._starting = threading.Lock()
        self._upload: str | None = None
        self._mark = new_mark()
        self._checks: Checks = OFF
        """Of parts; known when the upload begins."""
        self._sent: set[int] = set()
        """Parts that were sent, or are on their way."""
        self._parts: dict[int, ConfirmedPart] = {}
        """The parts that the store has confirmed, by number from 0."""
        self._gathered: dict[int, Gathered] = {}
        self._sending: list[Pending[None]] = []
        self._unsent: list[BaseException] = []
        self._perhaps_there = False
        """A request that makes the object exist was sent, and nobody knows what became of it."""

    @property
    def block_size(self) -> int:
        """The size of a part; the usual block of an object that is one."""
        return 1 << 20 if self.single else self._part

    # ---- write

    def _put(self, offset: int, views: list[memoryview]) -> None:
        """Bytes of a part that was sent can only be written again together with all others of that part."""
        self._raise_unsent()
        complete: list[PartRange] = []
        partial_ranges: list[PartRange] = []
        for place in self._places(offset, views):
            # A part that is covered by one view is sent from the caller's memory, without a copy. All else is checked and gathered first.
            is_complete = place.view.nbytes == self._length(place.number) and not self.single
            (complete if is_complete else partial_ranges).append(place)
        self._check_unsent(partial_ranges)
        for place in partial_ranges:
            self._gather(place)
        run_tasks([partial(self._send_whole, p) for p in complete], LANES, "ckpt-s3-write")

    def _places(self, offset: int, views: Sequence[memoryview]) -> Iterator[PartRange]:
        for view in views:
            at = 0
            while at < view.nbytes:
                number, inside = divmod(offset, self._part)
                length = min(view.nbytes - at, self._length(number) - inside)
                yield PartRange(number, inside, view[at : at + length])
                at += length
                offset += length

    def _length(self, number: int) -> int:
        return min(self._part, self._size - number * self._part)

    def _check_unsent(self, places: Sequence[PartRange]) -> None:
        with self._parts_lock:
            sent = [p.number for p in places if p.number in self._sent]
        if sent:
            raise StorageError(
                f"part {sent[0]} of {self._part} bytes was sent already: some of its bytes cannot be changed alone",
                where=self._key.where,
                hint="write every byte once, or whole parts (Writer.block_size)",
            )

    def _gather(self, place: PartRange) -> None:
        with self._parts_lock:
            gathered = self._gathered.get(place.number)
            if gathered is None:
                gathered = self._gathered[place.number] = Gathered(self._length(place.number))
        gathered.memory[place.at : place.at + place.view.nbytes] = place.view
        gathered.written.add(place.at, place.at + place.view.nbytes)
        if not self.single and gathered.whole and self._take(place.number, gathered):
            self._key.client.lanes.acquire()
            pending = Pending(partial(self._send_gathered, place.number, gathered), "ckpt-s3-write")
            with self._parts_lock:
                self._sending = [p for p in self._sending if not p.wait(0)] + [pending]

    def _take(self, number: int, gathered: Gathered) -> bool:
        """Whether it is this thread that sends the part: two may have written its last bytes at once."""
        with self._parts_lock:
            if self._gathered.get(number) is not gathered:
                return False
            del self._gathered[number]
            self._sent.add(number)
            return True

    # ---- parts on their way

    def _send_gathered(self, number: int, gathered: Gathered) -> None:
        try:
            self._send(number, gathered.memory)
        except BaseException as err:  # noqa: BLE001  write or commit raises it
            with self._parts_lock:
                self._gathered[number] = gathered  # for commit to try again
                self._sent.discard(number)
                self._unsent.append(err)
        finally:
            self._key.client.lanes.release()

    def _send_whole(self, place: PartRange) -> None:
        with self._parts_lock:
            # A part that is written a second time: the first sending may still be on its way, and of two at once the
            # store keeps either. So the second one waits.
            again = place.number in self._sent
            self._sent.add(place.number)
            self._gathered.pop(place.number, None)  # older bytes
            sending = self._sending if again else []
        for pending in sending:
            pending.wait()  # of two that are on their way at once, the store keeps either
        self._send(place.number, place.view)

    def _send(self, number: int, view: memoryview) -> None:
        upload = self._started()
        sums = self._checks.of(view)
        what = {**self._key.names, "UploadId": upload, "PartNumber": number + 1, **sums.names}

        def request(boto: Any, tries: Tries) -> str:
            tag = tag_of(boto.upload_part(**what, Body=self._key.client.body(view, tries)))
            sums.check(tag)
            return tag

        tag = self._key.client.attempt(f"send part {number + 1}", self._key.where, request, over=self._is_over)
        with self._parts_lock:
            self._parts[number] = ConfirmedPart(tag=tag, crc=sums.crc)

    def _copy(self, offset: int, source: CopySource, at: int, length: int) -> bool:
        """See ``Writer.copy_range``: whole parts, which the store copies from another object of its own."""
        if not length or not isinstance(source, S3CopySource) or source.key.client is not self._key.client:
            return False
        flipped = False
        with self._parts_lock:
            if self.single and length == self._size and not self._gathered:
                self.single, flipped = False, True  # no request copies an object under a condition: it becomes an upload of one part
            ends = offset + length == self._size or not (offset + length) % self._part
            if self.single or offset % self._part or not ends:
                return False
        if flipped:
            check_free(self._key)  # not every store keeps the condition of completing an upload
        copied: list[int] = []
        numbers = range(offset // self._part, -(-(offset + length) // self._part))

        def copy(number: int) -> None:
            begin = number * self._part
            if self._copy_part(number, source, at + begin - offset):
                copied.append(number)

        run_tasks([partial(copy, number) for number in numbers], LANES, "ckpt-s3-copy")
        return len(copied) == len(numbers)

    def _copy_part(self, number: int, source: S3CopySource, at: int) -> bool:
        with self._parts_lock:
            if number in self._sent or number in self._gathered:
                return False
            self._sent.add(number)
        confirmed: ConfirmedPart | None = None
        try:
            confirmed = self._copied(number, source, at, self._length(number))
        finally:
            with self._parts_lock:
                if confirmed is None:
                    self._sent.discard(number)
                else:
                    self._parts[number] = confirmed
        return confirmed is not None

    def _copied(self, number: int, source: S3CopySource, at: int, length: int) -> ConfirmedPart | None:
        what = {**self._key.names, "UploadId": self._started(), "PartNumber": number + 1}
        what |= {"CopySource": source.key.names, "CopySourceIfMatch": source.tag, "CopySourceRange": f"bytes={at}-{at + length - 1}"}

        def request(boto: Any, _: Tries) -> ConfirmedPart | None:
            try:
                answer = boto.upload_part_copy(**what)["CopyPartResult"]
            except ClientError as err:
                if status_of(err) in _NO_COPY and code_of(err) != "NoSuchUpload":
                    return None  # it cannot, or may not, or another object has the name by now: whoever reads it finds out
                raise
            return ConfirmedPart(tag=tag_of(answer), crc=str(answer.get("ChecksumCRC32", "")) if self._checks.way == "crc32" else "")

        return self._key.client.attempt(f"copy part {number + 1}", self._key.where, request, over=self._is_over)

    def _started(self) -> str:
        with self._starting:
            if self._upload is None:
                self._checks = part_checks_of(self._key)
                self._upload = self._key.client.attempt("begin an upload", self._key.where, self._begin, over=self._is_over)
            return self._upload

    def _begin(self, boto: Any, _: Tries) -> str:
        answer = boto.create_multipart_upload(**self._key.names, **marked(self._mark), **self._checks.upload)
        return str(answer["UploadId"])

    def _is_over(self) -> bool:
        """Whether nobody wants the object any more, so that no request is tried again."""
        return self._giving_up or self._state == "aborted"

    def _raise_unsent(self) -> None:
        with self._parts_lock:
            errors, self._unsent = self._unsent, []
        if errors:
            raise errors[0]

    # ---- commit

    def _send_rest(self) -> None:
        """Finish what ``_put`` left to be done later."""
        with self._parts_lock:
            sending = self._sending
        for pending in sending:
            pending.wait()
        self._raise_unsent()
        for number, gathered in [] if self.single else list(self._gathered.items()):  # whole, but could not be sent before
            self._send(number, gathered.memory)
            del self._gathered[number]

    def _make_durable(self) -> None:
        try:
            self._send_rest()
        except BaseException:
            self._state = "open"  # no commit was tried
            raise
        if self.single:
            data = self._gathered[0].memory if self._size else b""
            self._perhaps_there = True
            try:
                put(self._key, data, self._condition, checks_of(self._key), self._mark)
            except ConflictError as err:
                self._perhaps_there = False
                raise self._taken() from err
        else:
            self._complete()

    def _complete(self) -> None:
        parts = [self._confirmed(n) for n in range(-(-self._size // self._part))]
        listed = [part.named(number) for number, part in enumerate(parts, 1)]
        what = {**self._key.names, "UploadId": self._upload, "MultipartUpload": {"Parts": listed}}
        condition = dict(self._condition)

        def request(boto: Any, tries: Tries) -> None:
            try:
                answer = boto.complete_multipart_upload(**what, **condition)
            except ClientError as err:
                # A completed upload has no id any more, and its object has the name: so the second try of a request whose answer was lost
                # looks exactly like a conflict. The mark in the object's metadata tells the two apart.
                if status_of(err) in (404, 409, 412) and self._is_ours(unmarked=tries.failed > 0):
                    return  # the same request, sent before, had its effect
                if status_of(err) in (409, 412) and condition:
                    self._perhaps_there = False
                    raise self._taken() from err
                if status_of(err) != 501 or not condition:
                    raise
                condition.clear()  # the store knows conditions of single requests only
                answer = boto.complete_multipart_upload(**what)
            try:
                check_whole(self._checks, parts, answer)
            except ChangedError as err:
                raise translated(err, "complete the upload", self._key.where) from err

        self._perhaps_there = True
        self._key.client.attempt("complete the upload", self._key.where, request)
        self._upload = None

    def _confirmed(self, number: int) -> ConfirmedPart:
        if number not in self._parts:
            raise StorageError(f"part {number + 1} never arrived", where=self._key.where, hint="write it again, whole")
        return self._parts[number]

    def _is_ours(self, *, unmarked: bool) -> bool:
        """Whether this Writer made the object that is there. Where the store keeps no marks its size has to do, if it may be ours
        ``unmarked``."""
        there = head_if_there(self._key)
        if there is None or there.mark:
            return there is not None and there.mark == self._mark
        return unmarked and there.size == self._size

    def _taken(self) -> ConflictError:
        return ConflictError(
            "cannot create: the name is taken meanwhile", where=self._key.where, hint="use a fresh name, or delete the object"
        )

    # ---- abort

    def _discard(self, *, tried: bool) -> None:
        """What there is shows to nobody before it is complete, so all goes when no write is running any more."""

    def _close(self) -> None:
        for pending in self._sending:
            pending.wait()
        self._gathered.clear()
        room, self._room = self._room, 0
        self._key.client.room.give_back(room)
        if self._state == "committed":
            return
        if self._upload is not None:
            abort_upload(self._key, self._upload)
            self._upload = None
        # If nobody looked whether the name was free, what is there may be somebody's.
        if self._perhaps_there and self._is_ours(unmarked=not (self.single and self._condition)):
            delete(self._key)
