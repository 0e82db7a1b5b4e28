"""What a rollout server's client is given, checked before anything is sent: every error says what is allowed."""

from __future__ import annotations

import ipaddress
import json
import math
import numbers
import operator
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

_LONGEST_TIMEOUT = 1_000_000  # seconds; sockets count milliseconds in 32 bits
_EXAMPLE = "give one like 'http://localhost:8080'"


class Address(NamedTuple):
    """A server's url in parts; `path` without a slash at its end."""

    scheme: str
    host: str
    port: int | None
    path: str


def address(url: Any) -> Address:
    """
    The parts of `http://host:port/path` or `https://...`.

    Raises:
        ValueError: anything else; one that may hold a password is not shown.
    """
    if not isinstance(url, str):
        raise ValueError(f"url is {url!r}; {_EXAMPLE}.")
    if "@" in url:
        raise ValueError("the url holds a user or password, which would be printed in messages; give api_key instead.")
    if not url.isprintable() or any(map(str.isspace, url)):
        raise ValueError(f"url is {url!r}, with blanks or control characters; {_EXAMPLE}.")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"url is {url!r} ({error}); {_EXAMPLE}.") from None
    if parts.scheme not in ("http", "https") or not host or "?" in url or "#" in url:
        raise ValueError(f"url is {url!r}; {_EXAMPLE}.")
    if port == 0:
        raise ValueError(f"url is {url!r}; give a port from 1 to 65535.")
    if not _is_host(host):
        raise ValueError(f"url is {url!r}, whose host {host!r} is no name or address of a computer; {_EXAMPLE}.")
    if not parts.path.isascii():
        raise ValueError(f"url is {url!r}; write its path with percent signs: urllib.parse.quote({parts.path!r}).")
    return Address(parts.scheme, host, port, parts.path.rstrip("/"))


def _is_host(host: str) -> bool:
    try:
        if ":" in host:
            ipaddress.IPv6Address(host)
            return True
        return re.fullmatch(rb"[\w.-]{1,255}", host.encode("idna")) is not None
    except ValueError:  # UnicodeError is one
        return False


def key(api_key: Any) -> str | None:
    """
    An API key as it is sent, or None.

    Raises:
        ValueError: what cannot stand in a header; the key is not shown.
    """
    if api_key is None:
        return None
    allowed = "give a str of printable ASCII characters without blanks, or None; the key is not shown here"
    if not isinstance(api_key, str):
        raise ValueError(f"api_key is of type {type(api_key).__name__}; {allowed}.")
    if not api_key:
        raise ValueError(f"api_key is empty; {allowed}.")
    wrong = next((at for at, character in enumerate(api_key) if not "!" <= character <= "~"), None)
    if wrong is not None:
        where = "at its end" if wrong == len(api_key) - 1 else f"at position {wrong}"
        kind = "a blank or line break" if api_key[wrong].isspace() else "a character that is not printable ASCII"
        raise ValueError(f"api_key has {kind} {where}; {allowed}.")
    return api_key


def seconds(timeout: Any) -> float:
    """A timeout; ValueError unless it is a number of seconds above 0 and at most 1,000,000."""
    number = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
    if not number or not 0 < timeout <= _LONGEST_TIMEOUT or not math.isfinite(timeout):
        raise ValueError(f"timeout is {timeout!r}; give seconds above 0, at most {_LONGEST_TIMEOUT:,}.")
    return float(timeout)


def count(name: str, value: Any, least: int, otherwise: str = "") -> int:
    """An integer from `least` on; else a ValueError with the argument's name and, at its end, what else it may be."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} is {value!r}; give an integer, {least} or more{otherwise}.")
    return number


def fields(name: str, value: Any) -> dict[str, Any]:
    """
    A copy of what goes into a request's JSON, as JSON reads it back; None = nothing.

    Raises:
        ValueError: no mapping of strings to what JSON can say; NaN and infinities are none.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r:.200}; give a dict of fields by llama.cpp's names, or None.")
    copy = {}
    for field, content in value.items():
        if not isinstance(field, str):
            raise ValueError(f"{name} has the key {field!r:.200}; give llama.cpp's names, which are str.")
        try:
            copy[field] = json.loads(json.dumps(content, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{name}[{field!r}] is a {type(content).__name__} that JSON cannot say ({error}); give finite numbers, "
                "strings, booleans, None, or lists and dicts of them."
            ) from None
    return copy
