"""Where exceptions of fsspec file systems become ours, and whether a store keeps the condition of a write.

Invariant: nothing else leaves the generic backend. Implementations raise what their client libraries raise, most of which are no OSErrors,
so everything that is not known by its type, the name of its class or its HTTP status arrives as a StorageError that names the original.
"""

from __future__ import annotations

import errno
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ckpt.errors import AccessError, CkptError, ConflictError, NoSpaceError, NotFoundError, StorageError, UsageError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_STATUS_NAMES = ("status", "status_code", "code")
_REFUSED = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError", "SSOError"),  # botocore
    *("ClientAuthenticationError", "CredentialUnavailableError"),  # azure
    *("GoogleAuthError", "AuthenticationException", "BadAuthenticationType"),  # google, paramiko
}
"""Names of classes, so that none of these libraries needs to be imported."""
_HINTS = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_KEY and FSSPEC_S3_SECRET; "
    "for a public bucket FSSPEC_S3_ANON=true",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS; for a public bucket FSSPEC_GS_TOKEN=anon",
    "az": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN); "
    "for a public container the account's name and AZURE_STORAGE_ANON=true",
}
_HINTS |= {"s3a": _HINTS["s3"], "gcs": _HINTS["gs"], "abfs": _HINTS["az"], "abfss": _HINTS["az"]}
_ACCESS_HINT = "check the credentials and rights; fsspec takes them from where the storage's own tools do"
_SIGNED = re.compile(r"(?i)\b(sig|x-amz-signature|x-goog-signature|x-amz-security-token)=[^&\s\"']+")


@contextmanager
def fsspec_errors(where: str, doing: str, *, reading: bool = False, conceal: Sequence[str] = ()) -> Iterator[None]:
    """Turn any exception of the block into one of ours that names ``where`` and what could not be done, without the texts ``conceal``.

    Absence is NotFoundError when ``reading``, and StorageError when writing.
    """
    try:
        yield
    except CkptError:
        raise
    except Exception as err:
        err.__traceback__ = err.__traceback__ and err.__traceback__.tb_next  # else a circle from Python 3.12 on: see posix_files.py
        raise mapped(err, where, doing, reading=reading, conceal=conceal) from err


def mapped(err: Exception, where: str, doing: str, *, reading: bool, conceal: Sequence[str] = ()) -> CkptError:
    """Our error for ``err``."""
    text = _text(err, conceal)
    message = f"cannot {doing}: {text}"
    if reading and is_absence(err):
        return NotFoundError(message, where=where, hint="check the URL; `ckpt ls` lists the checkpoints there")
    if is_refusal(err):
        return AccessError(message, where=where, hint=access_hint(where))
    if isinstance(err, FileExistsError) or status_of(err) == 412:
        return ConflictError(message, where=where, hint="another save was first; read it again and decide anew")
    if isinstance(err, OSError) and err.errno in _NO_SPACE:
        return NoSpaceError(message, where=where, hint="free some space or raise the quota, or use another storage")
    if isinstance(err, NotImplementedError):
        hint = "this kind of storage can perhaps only be read: copy the checkpoint elsewhere with `ckpt cp`"
        return StorageError(f"cannot {doing}: the fsspec file system does not offer it", where=where, hint=hint)
    if isinstance(err, TypeError) and "unexpected keyword argument" in text:
        hint = "check the name of the storage option; docs/storage.md says where they come from"
        return UsageError(message, where=where, hint=hint)
    if isinstance(err, ValueError) and doing.startswith("open"):
        return UsageError(message, where=where, hint="check the URL's spelling and the storage options")
    return StorageError(message, where=where, hint="try again; if it lasts, look whether the storage's own tools can do it")


def is_absence(err: BaseException) -> bool:
    """Whether the storage says that something is not there."""
    return isinstance(err, _ABSENT) or status_of(err) == 404


def is_refusal(err: BaseException) -> bool:
    """Whether there are no credentials, or they do not allow it."""
    if isinstance(err, PermissionError) or status_of(err) in (401, 403):
        return True
    names = {cls.__name__ for cls in type(err).__mro__}
    # adlfs says ValueError where it has no account, and gcsfs a bare OSError for HTTP 403
    text = str(err)
    unknown_account = isinstance(err, ValueError) and ("connection_string" in text or "unable to connect to account" in text)
    return bool(names & _REFUSED) or unknown_account or (isinstance(err, OSError) and text.startswith("Forbidden"))


def access_hint(where: str) -> str:
    """What to do about missing or refused credentials of this storage."""
    return _HINTS.get(where.partition("://")[0], _ACCESS_HINT)


def _text(err: Exception, conceal: Sequence[str]) -> str:
    text = str(err)
    for secret in conceal:
        text = text.replace(secret, "***")
    text = _SIGNED.sub(r"\1=***", text)
    return f"{type(err).__name__}: {text}" if text else type(err).__name__


def status_of(err: BaseException | None) -> int | None:
    """The HTTP status that an exception of a client library carries, or the one that it was made of, if any."""
    for holder in (err, getattr(err, "response", None), err and err.__cause__, getattr(err and err.__cause__, "response", None)):
        if isinstance(holder, dict):  # botocore
            return int(holder.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
        for name in _STATUS_NAMES:
            value = getattr(holder, name, None)
            if isinstance(value, int | str) and str(value).isdecimal():
                return int(value)
    return None


# Whether a store behind fsspec creates objects only if they are absent, tried once per bucket: some take the condition and ignore it.
#
# Without it two jobs that save to one place could both believe that they did, so such a store is refused, unless somebody has said that
# never more than one job saves to one place (``CKPT_CONDITIONAL_PUT=emulate``).

kept_conditions: dict[tuple[str, str], bool] = {}
"""Whether a bucket of a file system keeps the condition, once that has been tried."""
writable_places: set[tuple[str, str]] = set()
"""File systems and places below which an object could be written."""


def only_if_absent(fs: Any) -> dict[str, Any]:
    """The argument of ``pipe_file`` by which this file system creates an object only if it is absent; none if it has none."""
    parameters = inspect.signature(fs.pipe_file).parameters
    if "mode" not in parameters and "overwrite" in parameters:
        return {"overwrite": False}
    hands_on = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())  # to the file system that it wraps, perhaps
    return {"mode": "create"} if "mode" in parameters or hands_on else {}


def keeps_condition(fs: Any, key: str, where: str, put: Callable[[dict[str, Any]], object]) -> bool:
    """Whether a bucket does. ``put`` writes ``key``, which is fresh, with these arguments of ``pipe_file``."""
    condition = only_if_absent(fs)
    if not condition:
        put({})
        return False
    try:
        with fsspec_errors(where, "write"):
            put(condition)
    except StorageError as err:
        if isinstance(err.__cause__, NotImplementedError | ValueError | TypeError):  # the file system does not know the argument
            return False
        raise
    try:
        with fsspec_errors(where, "write"):
            fs.pipe_file(key, b"again", **condition)
    except ConflictError:
        return True
    return False
