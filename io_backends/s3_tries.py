"""How requests to an object store are set up and tried: options, errors, waits.

Options are those of s3fs, said for the client of our own: credentials, endpoint, region, certificates, addressing, who pays.

Invariant: each option is honoured, without effect on anything that ckpt does, or named by ``without_equivalent``. None is dropped.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConfigNotFound,
    ConfigParseError,
    ConnectionClosedError,
    ConnectionError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    InvalidConfigError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    SSLError,
    SSOError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from ckpt.errors import AccessError, CancelledError, CkptError, ConflictError, NoSpaceError, NotFoundError, StorageError, UsageError

from . import checks

PROTOCOLS = ("s3", "s3a")
"""What s3fs calls itself, in the order in which fsspec reads its configuration."""

_CREDENTIALS = {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token"}
_SHORT = {long: short for short, long in _CREDENTIALS.items()}
_SPELLED = {"username": "key", "password": "secret"}
_CLIENT = {*_CREDENTIALS.values(), "region_name", "endpoint_url", "use_ssl", "verify"}
_CONFIG = {
    *("s3", "signature_version", "region_name", "proxies", "proxies_config", "client_cert", "user_agent", "user_agent_extra"),
    *("connect_timeout", "read_timeout", "max_pool_connections", "tcp_keepalive", "use_dualstack_endpoint", "use_fips_endpoint"),
    *("request_checksum_calculation", "response_checksum_validation", "ignore_configured_endpoint_urls"),
}
_PLAIN = {"anon", "endpoint_url", "profile", "use_ssl", "requester_pays", *_CREDENTIALS, *_SPELLED}
_WITHOUT_EFFECT = {
    *("default_block_size", "default_fill_cache", "default_cache_type"),  # of files that s3fs opens; ckpt opens none
    *("use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache"),  # of caches that ckpt does not have
    "fixed_upload_size",  # all parts of an upload have one size here
}
_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off", ""}


@dataclass(frozen=True, kw_only=True, eq=False)
class S3Options:
    """What decides who asks which store, beside the environment. Values do not show."""

    profile: str | None = None
    client: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Arguments of botocore's ``create_client``."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Arguments of botocore's ``Config``."""
    anonymous: bool = False
    requester_pays: bool = False

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The settings that are not left to the environment; values do not show."""
        flags = (("profile", self.profile), ("anon", self.anonymous), ("requester_pays", self.requester_pays))
        return tuple(sorted([name for name, value in flags if value] + [_SHORT.get(name, name) for name in (*self.client, *self.config)]))

    @cached_property
    def token(self) -> str:
        """Equal for equal options."""
        text = repr((self.profile, _sorted(self.client), _sorted(self.config), self.anonymous, self.requester_pays))
        return hashlib.sha256(text.encode()).hexdigest()


DEFAULT = S3Options()


def without_equivalent(options: Mapping[str, Any]) -> list[str]:
    """The names of options that only s3fs itself can honour; ``client_kwargs.x`` for those inside another one."""
    nested = {"client_kwargs": _CLIENT, "config_kwargs": _CONFIG}
    known = {*_PLAIN, *_WITHOUT_EFFECT, *nested}
    unknown = [name for name, value in options.items() if name not in known and value is not None and value is not False and value != {}]
    for outer, inner in nested.items():
        unknown += [f"{outer}.{name}" for name in _dict(options, outer) if name not in inner]
    return sorted(unknown)


def s3_options(options: Mapping[str, Any]) -> S3Options:
    client, config = _dict(options, "client_kwargs"), _dict(options, "config_kwargs")
    for name, spelled in {**{k: k for k in _CREDENTIALS}, **_SPELLED}.items():
        if options.get(name) is not None:
            _put(client, _CREDENTIALS[spelled], _text(options, name), name)
    if options.get("endpoint_url") is not None:
        _put(client, "endpoint_url", _text(options, "endpoint_url"), "endpoint_url")
    if options.get("use_ssl") is not None and "use_ssl" not in client:  # as s3fs has it
        client["use_ssl"] = options["use_ssl"]
    if "use_ssl" in client:
        client["use_ssl"] = _flag(client, "use_ssl", default=True)
    if isinstance(client.get("verify"), str) and client["verify"].lower() in ("true", "false"):
        client["verify"] = client["verify"].lower() == "true"
    if "region_name" in config:
        _put(client, "region_name", config.pop("region_name"), "config_kwargs.region_name")
    endpoint = client.get("endpoint_url")
    if endpoint is not None and not str(endpoint).startswith(("http://", "https://")):
        message = f"the storage option endpoint_url is no URL of a store: {endpoint!r}"
        raise UsageError(message, hint="write https://host:port")
    anonymous = _flag(options, "anon", default=False)
    if anonymous:
        client = {name: value for name, value in client.items() if name not in _CREDENTIALS.values()}
    else:
        _check_credentials(client)
    return S3Options(
        profile=_text(options, "profile") if options.get("profile") is not None else None,
        client=client,
        config=config,
        anonymous=anonymous,
        requester_pays=_flag(options, "requester_pays", default=False),
    )


def _put(client: dict[str, Any], name: str, value: Any, spelled: str) -> None:
    if client.get(name) not in (None, value):
        raise UsageError(f"the storage options {spelled} and client_kwargs.{name} differ", hint="give one of them")
    client[name] = value


def _check_credentials(client: Mapping[str, Any]) -> None:
    """botocore would pass over a token without a key, and take credentials from elsewhere."""
    given = {short for short, name in _CREDENTIALS.items() if client.get(name) is not None}
    if given and not {"key", "secret"} <= given:
        lost = " and ".join(sorted({"key", "secret"} - given))
        raise UsageError(f"the storage options have {' and '.join(sorted(given))}, but no {lost}", hint="give key and secret together")


def _text(options: Mapping[str, Any], name: str) -> str:
    value = options[name]
    if not isinstance(value, str):
        message = f"the storage option {name} is not text, but {type(value).__name__}"
        raise UsageError(message, hint=f"digits in a variable need quotes: FSSPEC_S3_{name.upper()}='\"123\"'")
    return value


def _flag(options: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = options.get(name)
    word = "" if value is None else str(value).lower()
    if value is None or word in _TRUE | _FALSE:
        return default if value is None else word in _TRUE
    raise UsageError(f"the storage option {name} is true or false, not {value!r}")


def _dict(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = options.get(name) or {}
    if not isinstance(value, Mapping):
        raise UsageError(f"the storage option {name} is not a dict, but {type(value).__name__}")
    return dict(value)


def _sorted(value: Any) -> Any:
    return sorted((k, _sorted(v)) for k, v in value.items()) if isinstance(value, Mapping) else value


# What goes wrong between us and an object store: what is worth another try, and what a failure is called in ``ckpt.errors``. No requests.
#
# Imports botocore, so it is itself imported only once a store is used.

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
_CLOCK = {"RequestTimeTooSkewed", "RequestInTheFuture"}
_REFUSED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AllAccessDisabled", "AccountProblem", "InvalidIdentityToken"}
_REGION = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect", "TemporaryRedirect"}
_CHANGED = {"BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}
_WRITES = {"PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"}
_BUNDLE = ("No such file", "NO_CERTIFICATE_OR_CRL_FOUND", "PEM lib")
_LASTING_TLS = (
    *_BUNDLE,
    *("CERTIFICATE_VERIFY_FAILED", "doesn't match", "UNKNOWN_CA", "CERTIFICATE_REQUIRED"),
    *("HANDSHAKE_FAILURE", "PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL"),
)


class TruncatedError(OSError):
    """The connection ended before the body did."""


class ChangedError(OSError):
    """Other bytes arrived than were sent. ``tag`` is the ETag of what is stored, if anything is."""

    def __init__(self, message: str, tag: str = "") -> None:
        super().__init__(message)
        self.tag = tag


class NoTagError(OSError):
    """The answer about an object has no ETag: half an answer, or a store that gives none."""


def code_of(err: BaseException) -> str:
    """The store's word for what went wrong; its HTTP status where there is no word (answers to HEAD have no body)."""
    return str(err.response.get("Error", {}).get("Code", "")) if isinstance(err, ClientError) else ""


def status_of(err: BaseException) -> int:
    return int(err.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) if isinstance(err, ClientError) else 0


def is_stale_key(err: BaseException) -> bool:
    """Whether credentials may have expired. HEAD has no body to say so: there it is a bare 400."""
    return code_of(err) in _STALE_KEY or (code_of(err) == "400" and status_of(err) == 400)


def is_refused(err: BaseException) -> bool:
    """Whether there are no credentials, or the store refuses them or what they ask for: it often does not say which."""
    if isinstance(err, NoCredentialsError | PartialCredentialsError | SSOError | TokenRetrievalError):
        return True
    return status_of(err) in (401, 403) and code_of(err) not in _CLOCK


def is_changed(err: BaseException) -> bool:
    """Whether other bytes arrived than were sent, by their checksum."""
    return isinstance(err, ChangedError) or code_of(err) in _CHANGED


def tag_of(answer: Mapping[str, Any]) -> str:
    """The ETag of an answer; NoTagError if there is none, TruncatedError if it was cut off."""
    if "ETag" not in answer:
        raise NoTagError("the answer has no ETag")
    tag = str(answer["ETag"])
    if tag.startswith('"') and (len(tag) < 2 or not tag.endswith('"')):
        raise TruncatedError(f"half an answer: the ETag is {tag}")
    return tag


def is_throttled(err: BaseException) -> bool:
    """Whether the store asks for fewer requests."""
    return status_of(err) in (429, 503) or code_of(err) in ("SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded")


def is_passing(err: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(err, ClientError):
        code, status = code_of(err), status_of(err)
        return code in _PASSING or _lost_directory(err) or status == 429 or (status >= 500 and status not in (501, 507))
    if isinstance(err, CredentialRetrievalError):
        return True  # the service on the machine that hands them out has hiccups
    if isinstance(err, SSLError):
        return not any(words in str(err) for words in _LASTING_TLS)
    if isinstance(err, BotoCoreError):
        return isinstance(err, ConnectionError | HTTPClientError | IncompleteReadError)
    return True  # sockets and half answers


def _lost_directory(err: ClientError) -> bool:
    """A write answered with "no such key": some stores keep directories, and remove an emptied one from under an object that comes."""
    return code_of(err) == "NoSuchKey" and err.operation_name in _WRITES


def is_misconfigured(err: BaseException) -> bool:
    """Whether that is how wrong settings look before the first answer of a store. After it they were right once, and may be so again."""
    if isinstance(err, CredentialRetrievalError):
        return "custom-process" in str(err)
    return isinstance(err, FileNotFoundError | PermissionError) or (isinstance(err, SSLError) and "WRONG_VERSION_NUMBER" in str(err))


# ---- in our words


def translated(err: Exception, what: str, where: str, *, tries: int = 1, options: S3Options = DEFAULT) -> CkptError:
    """The error of ours for what a request raised. Hints are about the environment; options that win over it are named behind them."""
    ours = _in_our_words(err, what, where, tries, options)
    about_settings = not isinstance(err, ClientError) or isinstance(ours, AccessError) or code_of(err) == "NoSuchBucket"
    if options.names and about_settings:
        ours.hint = f"{ours.hint}; storage options, or fsspec's configuration, win over the environment: {', '.join(options.names)}"
    return ours


def _in_our_words(err: Exception, what: str, where: str, tries: int, options: S3Options) -> CkptError:
    message = f"cannot {what}: {words_of(err)}{f', {tries} times' if tries > 1 else ''}"
    if is_changed(err):
        hint = "something between this process and the store changes bytes: check proxies, network cards and memory"
        return StorageError(message, where=where, hint=hint)
    if isinstance(err, NoTagError):
        hint = "ckpt needs ETags to read all bytes of one version: set up the store to give them (JuiceFS gateway: --keep-etag)"
        return StorageError(message, where=where, hint=hint)
    return _of_answer(err, message, where) if isinstance(err, ClientError) else _of_client(err, message, where, options)


def _of_answer(err: ClientError, message: str, where: str) -> CkptError:
    code, status = code_of(err), status_of(err)
    headers: dict[str, str] = err.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    if code == "NoSuchBucket":
        hint = "create the bucket, or check its name and AWS_ENDPOINT_URL; ckpt makes no buckets"
        return NotFoundError(f"the bucket does not exist: {message}", where=where, hint=hint)
    if code == "NoSuchUpload":
        hint = "look for a clean-up, or a lifecycle rule of the bucket, that ends uploads which are still written to"
        return StorageError(f"{message}: another process ended the upload", where=where, hint=hint)
    if _lost_directory(err):
        return StorageError(message, where=where, hint="the store lost what was being written: save again, and report it to its operator")
    if status == 404:
        return NotFoundError(message, where=where, hint="check the URL; `ckpt ls` lists the checkpoints there")
    if code in _FULL or status == 507:
        return NoSpaceError(message, where=where, hint="free space in the bucket, or raise its quota")
    if code in _CLOCK:
        hint = f"set the clock of this machine; the store's says {headers.get('date', 'another time')}"
        return AccessError(message, where=where, hint=hint)
    if code in _REGION or 300 <= status < 400:
        return StorageError(message, where=where, hint=_elsewhere(headers))
    if status in (401, 403) or code in _REFUSED or is_stale_key(err):
        hint = "check the credentials (storage options, FSSPEC_S3_KEY, AWS_PROFILE, AWS_ACCESS_KEY_ID, ~/.aws) and what they allow"
        return AccessError(message, where=where, hint=hint)
    if status == 412:
        return ConflictError(message, where=where, hint="another save was first; read it again and decide anew")
    if status == 405:
        return StorageError(message, where=where, hint="check that AWS_ENDPOINT_URL is the endpoint of an S3 store")
    return StorageError(message, where=where, hint="check the store and the network to it, and try again")


def _elsewhere(headers: Mapping[str, str]) -> str:
    """Redirects are not followed: the signature is for one host."""
    region, location = headers.get("x-amz-bucket-region"), headers.get("location")
    if region:
        return f"the bucket is in another region: set AWS_REGION={region}"
    if location:
        return f"the store sends us to {location}: set AWS_ENDPOINT_URL to what serves this bucket, AWS_REGION to its region"
    return "the bucket is served elsewhere: check AWS_REGION and AWS_ENDPOINT_URL"


def _of_client(err: Exception, message: str, where: str, options: S3Options) -> CkptError:
    if isinstance(err, SSLError):
        return _of_tls(err, message, where, options)
    if isinstance(err, SSOError | TokenRetrievalError):
        profile = options.profile or os.environ.get("AWS_PROFILE")
        return AccessError(message, where=where, hint=f"log in: aws sso login{f' --profile {profile}' if profile else ''}")
    if isinstance(err, FileNotFoundError | PermissionError) and err.filename:
        hint = f"credentials come from {err.filename}: check AWS_WEB_IDENTITY_TOKEN_FILE, and credential_process in ~/.aws/config"
        return AccessError(message, where=where, hint=hint)
    if isinstance(err, json.JSONDecodeError) or (isinstance(err, CredentialRetrievalError) and "custom-process" in str(err)):
        return AccessError(message, where=where, hint="run the credential_process of ~/.aws/config by hand; it has to print credentials")
    if isinstance(err, NoCredentialsError | PartialCredentialsError | CredentialRetrievalError):
        hint = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket FSSPEC_S3_ANON=true"
        return AccessError(message, where=where, hint=hint)
    if isinstance(err, ProfileNotFound | ParamValidationError | InvalidConfigError | ConfigParseError | ConfigNotFound):
        return UsageError(message, where=where, hint="check the URL, AWS_PROFILE and ~/.aws/config")
    if isinstance(err, EndpointConnectionError | ConnectionClosedError):
        hint = "check AWS_ENDPOINT_URL (http or https, host, port), the store and the network to it"
        return StorageError(message, where=where, hint=hint)
    if isinstance(err, HALF_ANSWERS) or (isinstance(err, BotoCoreError) and not is_passing(err)):
        return StorageError(message, where=where, hint="check AWS_ENDPOINT_URL, AWS_REGION, AWS_CA_BUNDLE and ~/.aws/config")
    return StorageError(message, where=where, hint="check the store and the network to it, and try again")


def _of_tls(err: SSLError, message: str, where: str, options: S3Options) -> CkptError:
    text = str(err)
    if any(words in text for words in _BUNDLE):
        verify = options.client.get("verify")
        bundle = (
            (verify if isinstance(verify, str) else None)
            or os.environ.get("AWS_CA_BUNDLE")
            or "the file that ca_bundle of ~/.aws/config names"
        )
        return UsageError(f"{message}: the certificates in {bundle} cannot be read", where=where, hint="check AWS_CA_BUNDLE and ca_bundle")
    if "WRONG_VERSION_NUMBER" in text:
        return StorageError(message, where=where, hint="the port speaks no TLS: write http:// in AWS_ENDPOINT_URL, or another port")
    if "doesn't match" in text:
        hint = "the certificate is of another host: name that host in AWS_ENDPOINT_URL, or give the store its own certificate"
        return StorageError(message, where=where, hint=hint)
    return StorageError(message, where=where, hint="name your authority's certificates in AWS_CA_BUNDLE; check AWS_ENDPOINT_URL")


def words_of(err: BaseException) -> str:
    """What the store said; the exception where it was none of its answers."""
    if not isinstance(err, ClientError):
        return f"{type(err).__name__}: {err}"
    error: dict[str, Any] = err.response.get("Error", {})
    request = err.response.get("ResponseMetadata", {}).get("RequestId", "")
    text = " ".join(str(error[k]) for k in ("Code", "Message") if error.get(k))
    return f"{text} (HTTP {status_of(err)}{f', request {request}' if request else ''})"


# How often and how long one request to an object store is tried.

log = logging.getLogger("ckpt")

FIRST, LONGEST = 0.1, 10.0
"""Seconds of the first and of the longest pause between two tries."""
STRANGE = 20.0
"""Seconds of trying to reach a store that has never answered: more likely it is not where the settings say."""
SILENT = 5.0
"""Seconds of trying before the log hears of it."""
MOST_CHANGED = 5
"""Times that a request is sent whose bytes do not arrive as they were sent, or whose answer has no ETag."""


@dataclass(kw_only=True, slots=True)
class Acquaintance:
    """What a client knows of its store."""

    reached: bool = False
    """It has answered at all."""
    accepted: bool = False
    """It has accepted one of our signatures."""
    tagged: bool = False
    """It has given an ETag, so an answer without one was cut off."""
    options: S3Options = DEFAULT
    """What decides, beside the environment, which store that is."""

    def note(self, err: ClientError | None) -> None:
        """An answer came: an error, or success."""
        self.reached = True
        self.accepted = self.accepted or err is None or status_of(err) in (404, 409, 412, 416)


class Tries:
    """One request's tries: pauses that grow, with chance in them, until it has failed for ``patience`` seconds.

    ``failed`` counts: a request that was tried before may have had its effect although nobody heard of it.
    """

    def __init__(self, what: str, where: str, patience: float, store: Acquaintance, over: Callable[[], bool] | None = None) -> None:
        self.what = what
        self.where = where
        self.failed = 0
        self._patience = patience
        self._store = store
        self._over = over
        self._changed = 0
        self._furthest = 0
        self._began = time.monotonic()
        self._warned = False

    def went_on(self) -> None:
        """Some bytes came: the patience is new."""
        self._began = time.monotonic()

    def sent(self, count: int) -> None:
        """So many bytes of a try were sent. Only what no try before has reached is progress: else a store that takes all of them and fails
        then would be tried for ever."""
        if count > self._furthest:
            self._furthest = count
            self.went_on()

    def again(self, err: Exception) -> None:
        """Pause before the next try; raises what ``err`` is in our words if there is none."""
        self.failed += 1
        if isinstance(err, ClientError):
            self._store.note(err)
        if self._over is not None and self._over():
            raise CancelledError(f"cannot {self.what}: it was given up", where=self.where) from err
        without_tags = isinstance(err, NoTagError) and not self._store.tagged
        if is_changed(err) or without_tags or (code_of(err) == "SignatureDoesNotMatch" and self._store.accepted):
            # A changed body breaks its checksum, a changed header the signature; half a head has no ETag
            # Time does not help: a few tries do, or nothing does.
            self._changed += 1
            if self._changed >= MOST_CHANGED:
                raise translated(err, self.what, self.where, tries=self.failed, options=self._store.options) from err
            checks.count(throttled=False)
            log.warning("cannot %s %s: %s; sending it again", self.what, self.where, words_of(err))
            time.sleep(random.uniform(FIRST / 2, FIRST))
            return
        trying = time.monotonic() - self._began
        if not is_passing(err) or trying >= self._patience_for(err):
            raise translated(err, self.what, self.where, tries=self.failed, options=self._store.options) from err
        if trying > SILENT and not self._warned:
            self._warned = True
            log.warning("cannot %s %s for %.0f s now, still trying: %s", self.what, self.where, trying, words_of(err))
        checks.count(throttled=is_throttled(err))
        # Exponential backoff with jitter: thousands of ranks that were throttled at the same moment must not come back at the same moment.
        longest = min(LONGEST, FIRST * 2.0 ** min(self.failed - 1, 16), max(FIRST, self._patience - trying))
        time.sleep(random.uniform(longest / 2, longest))

    def _patience_for(self, err: Exception) -> float:
        if self._store.reached or isinstance(err, ClientError):
            return self._patience
        return 0.0 if is_misconfigured(err) else min(self._patience, STRANGE)
