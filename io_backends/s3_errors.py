"""What goes wrong between us and an object store: what is worth another try, and what a failure is called in ``ckpt.errors``. No requests.

Imports botocore, so it is itself imported only once a store is used.
"""

from __future__ import annotations

import http.client
import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
)
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from ckpt.errors import AccessError, CancelledError, CkptError, ConflictError, NoSpaceError, NotFoundError, StorageError, UsageError

log = logging.getLogger("ckpt")

FAILURES = (BotoCoreError, ClientError, HTTPError, http.client.HTTPException, OSError)
"""What a request raises, apart from our own errors, which are OSErrors in part."""

HALF_ANSWERS = (ValueError, KeyError, ResponseParserError)
"""What botocore, or we, make of headers or a document in which the connection broke off: the standard library takes headers that end
anywhere for whole ones."""

_PASSING = {
    *("SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "RequestTimeoutException", "Throttling", "ThrottlingException"),
    *("TooManyRequests", "RequestLimitExceeded", "BandwidthLimitExceeded", "OperationAborted", "ConditionalRequestConflict"),
}
_STALE_KEY = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "EntityTooLargeForQuota", "InsufficientStorage"}
_REFUSED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AllAccessDisabled", "AccountProblem", "RequestTimeTooSkewed"}

FIRST, LONGEST = 0.1, 10.0
"""Seconds of the first and of the longest pause between two tries."""
SILENT = 5.0
"""Seconds of trying before the log hears of it."""


class TruncatedError(OSError):
    """The connection ended before the body did."""


def code_of(err: BaseException) -> str:
    """The store's word for what went wrong; its HTTP status where there is no word (answers to HEAD have no body)."""
    return str(err.response.get("Error", {}).get("Code", "")) if isinstance(err, ClientError) else ""


def status_of(err: BaseException) -> int:
    return int(err.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) if isinstance(err, ClientError) else 0


def is_stale_key(err: BaseException) -> bool:
    """Whether credentials may have expired. HEAD has no body to say so: there it is a bare 400."""
    return code_of(err) in _STALE_KEY or (code_of(err) == "400" and status_of(err) == 400)


def tag_of(answer: Mapping[str, Any]) -> str:
    """The ETag of an answer; TruncatedError if it was cut off."""
    tag = str(answer["ETag"])
    if tag.startswith('"') and (len(tag) < 2 or not tag.endswith('"')):
        raise TruncatedError(f"half an answer: the ETag is {tag}")
    return tag


def is_passing(err: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(err, ClientError):
        return code_of(err) in _PASSING or status_of(err) == 429 or (status_of(err) >= 500 and status_of(err) not in (501, 507))
    if isinstance(err, CredentialRetrievalError):
        return True  # the service on the machine that hands them out has hiccups
    if isinstance(err, BotoCoreError):
        return isinstance(err, ConnectionError | HTTPClientError | IncompleteReadError) and "CERTIFICATE_VERIFY_FAILED" not in str(err)
    return True  # sockets and half answers


class Tries:
    """One request's tries: pauses that grow, with chance in them, until it has failed for ``patience`` seconds.

    ``failed`` counts: a request that was tried before may have had its effect although nobody heard of it.
    """

    def __init__(self, what: str, where: str, patience: float, over: Callable[[], bool] | None = None) -> None:
        self.what = what
        self.where = where
        self.failed = 0
        self._patience = patience
        self._over = over
        self._began = time.monotonic()
        self._told = False

    def went_on(self) -> None:
        """Some bytes came: the patience is new."""
        self._began = time.monotonic()

    def again(self, err: Exception) -> None:
        """Pause before the next try; raises what ``err`` is in our words if there is none."""
        self.failed += 1
        if self._over is not None and self._over():
            raise CancelledError(f"cannot {self.what}: it was given up", where=self.where) from err
        trying = time.monotonic() - self._began
        if not is_passing(err) or trying >= self._patience:
            raise translated(err, self.what, self.where, tries=self.failed) from err
        if trying > SILENT and not self._told:
            self._told = True
            log.warning("cannot %s %s for %.0f s now, still trying: %s", self.what, self.where, trying, _said(err))
        longest = min(LONGEST, FIRST * 2.0 ** min(self.failed - 1, 16), max(FIRST, self._patience - trying))
        time.sleep(random.uniform(longest / 2, longest))


def translated(err: Exception, what: str, where: str, *, tries: int = 1) -> CkptError:
    """The error of ours for what a request raised."""
    often = f", {tries} times" if tries > 1 else ""
    message = f"cannot {what}: {_said(err)}{often}"
    code, status = code_of(err), status_of(err)
    if code == "NoSuchBucket":
        hint = "create the bucket, or check its name and AWS_ENDPOINT_URL; ckpt makes no buckets"
        return NotFoundError(f"the bucket does not exist: {message}", where=where, hint=hint)
    if code == "NoSuchUpload":
        hint = "look for a clean-up, or a lifecycle rule of the bucket, that ends uploads which are still written to"
        return StorageError(f"{message}: somebody ended the upload", where=where, hint=hint)
    if status == 404:
        return NotFoundError(message, where=where, hint="check the URL; `ckpt ls` shows what is there")
    if code in _FULL or status == 507:
        return NoSpaceError(message, where=where, hint="free space in the bucket, or raise its quota")
    if status in (401, 403) or code in _REFUSED or is_stale_key(err):
        return AccessError(message, where=where, hint="check the credentials (AWS_PROFILE, AWS_ACCESS_KEY_ID, ~/.aws) and what they allow")
    if isinstance(err, NoCredentialsError | PartialCredentialsError | CredentialRetrievalError):
        hint = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket FSSPEC_S3_ANON=true"
        return AccessError(message, where=where, hint=hint)
    if status == 412:
        return ConflictError(message, where=where, hint="another save was first; read it again and decide anew")
    if isinstance(err, ProfileNotFound | ParamValidationError):
        return UsageError(message, where=where, hint="check the URL, AWS_PROFILE and ~/.aws/config")
    if isinstance(err, HALF_ANSWERS) or (isinstance(err, BotoCoreError) and not is_passing(err)):
        return StorageError(message, where=where, hint="check AWS_ENDPOINT_URL, AWS_REGION, AWS_CA_BUNDLE and ~/.aws/config")
    return StorageError(message, where=where, hint="check the store and the network to it, and try again")


def _said(err: BaseException) -> str:
    if not isinstance(err, ClientError):
        return f"{type(err).__name__}: {err}"
    error: dict[str, Any] = err.response.get("Error", {})
    request = err.response.get("ResponseMetadata", {}).get("RequestId", "")
    text = " ".join(str(error[k]) for k in ("Code", "Message") if error.get(k))
    return f"{text} (HTTP {status_of(err)}{f', request {request}' if request else ''})"
