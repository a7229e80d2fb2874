"""Options of s3fs, said for the client of our own: credentials, endpoint, region, certificates, addressing, who pays.

Invariant: each option is honoured, without effect on anything that ckpt does, or named by ``without_equivalent``. None is dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckpt.errors import UsageError

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
    _check_endpoint(client.get("endpoint_url"))
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


def _check_endpoint(endpoint: object) -> None:
    if endpoint is not None and not str(endpoint).startswith(("http://", "https://")):
        hint = "write https://host:port"
        raise UsageError(f"the storage option endpoint_url is no URL of a store: {endpoint!r}", hint=hint)


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
