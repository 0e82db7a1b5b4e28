"""JSON over HTTP for rollouts: deadlines, repeats where nothing was answered, and an end to all requests at once."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

_CONNECT_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 0.5
_BUSY = (429, 503)
_PIECE_BYTES = 1 << 16


class RolloutServerError(RuntimeError):
    """A request for rollouts that did not get a usable answer; the message names the server, the request and what came."""


class RequestAborted(Exception):
    """The request was ended from this side, because another one failed or the user interrupted."""


class _NotAnswered(Exception):
    """No part of an answer came, so the request may be repeated."""


class JsonClient:
    """
    Sends JSON requests to one server, from any number of threads.

    Args:
        url: `http://host:port` or `https://...`, with a path in front of the server's own where it has one.
        api_key: sent as a bearer token; never part of a message.
        timeout: seconds for a request, from its connection to the last byte of its answer.
        retries: times a request is repeated that was not answered at all: connection refused or closed, or the server
            busy or loading (429, 503). One that was answered in part, badly or too late is an error at once.

    Raises:
        ValueError: a `url` of another form, a `timeout` that is not above 0, or `retries` below 0.
    """

    def __init__(self, url: str, *, api_key: str | None, timeout: float, retries: int) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"url is {url!r}; give one like 'http://localhost:8080'.")
        if parts.username or parts.password:
            raise ValueError(
                "the url holds a user or password, which would be printed in messages; give api_key instead."
            )
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout!r}; give seconds above 0.")
        if retries < 0:
            raise ValueError(f"retries is {retries!r}; give 0 or more.")
        self.url = url.rstrip("/")
        self._connection_class = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}[
            parts.scheme
        ]
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self._headers = {"Connection": "close", "Accept": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout, self._retries = timeout, retries
        self._lock, self._open, self._aborted = threading.Lock(), set[socket.socket](), threading.Event()

    def call(self, method: str, path: str, body: Any = None, about: str = "") -> Any:
        """
        One request and its answer.

        Args:
            method: `"GET"` or `"POST"`.
            path: behind the server's url, with the leading slash.
            body: what is sent as JSON; None = nothing.
            about: what the request was for, for messages.

        Returns:
            The answer's JSON.

        Raises:
            RolloutServerError: no answer, an HTTP error, an answer that is not whole or no JSON, or one that came too late.
            RequestAborted: `abort` was called.
        """
        request = f"{self.url}: {method} {path}{f' for {about}' if about else ''}"
        deadline = time.monotonic() + self._timeout
        pause = _FIRST_PAUSE_SECONDS
        for attempt in range(self._retries + 1):
            try:
                return self._once(method, path, body, request, deadline)
            except _NotAnswered as error:
                if attempt == self._retries or time.monotonic() + pause >= deadline:
                    tries = f"tried {attempt + 1} times" if attempt else "tried once"
                    raise RolloutServerError(f"{request} was not answered ({tries}): {error}") from error.__cause__
            if self._aborted.wait(pause):
                raise RequestAborted
            pause *= 2
        raise AssertionError

    def abort(self) -> None:
        """Ends every request under way and refuses new ones; the server sees closed connections and stops computing."""
        self._aborted.set()
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):  # closed in the meantime
                    each.shutdown(socket.SHUT_RDWR)

    def _once(self, method: str, path: str, body: Any, request: str, deadline: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers if data is None else {**self._headers, "Content-Type": "application/json"}
        connection = self._connection_class(self._host, self._port, timeout=_CONNECT_SECONDS)
        used = None
        try:
            used = self._connected(connection)
            used.settimeout(_left(deadline))
            try:
                connection.request(method, self._path + path, data, headers)
                response = connection.getresponse()
            except (ConnectionError, http.client.RemoteDisconnected) as error:
                raise _NotAnswered(f"the connection was closed without an answer ({_words(error)})") from error
            content = _content(response, used, deadline)
        except _NotAnswered:
            self._unless_aborted()
            raise
        except TimeoutError as error:
            self._unless_aborted()
            raise RolloutServerError(
                f"{request} took longer than {self._timeout:g} s; give a longer timeout, fewer max_in_flight, or shorter "
                "completions."
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self._unless_aborted()
            raise RolloutServerError(f"{request} broke off: {_words(error)}; did the server stop?") from error
        finally:
            with self._lock:
                self._open.discard(used)
            connection.close()
        return _decoded(response, content, request)

    def _connected(self, connection: http.client.HTTPConnection) -> socket.socket:
        try:
            connection.connect()
        except ConnectionError as error:
            raise _NotAnswered(f"{_words(error)}; is the server running there?") from error
        except TimeoutError as error:
            raise _NotAnswered(f"no connection within {_CONNECT_SECONDS:g} s; is the server running there?") from error
        with self._lock:
            self._open.add(connection.sock)
        self._unless_aborted()
        return connection.sock

    def _unless_aborted(self) -> None:
        if self._aborted.is_set():
            raise RequestAborted


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _content(response: http.client.HTTPResponse, used: socket.socket, deadline: float) -> bytes:
    """The whole body by the deadline, however slowly it drips."""
    pieces = []
    while True:
        used.settimeout(_left(deadline))
        piece = response.read1(_PIECE_BYTES)
        if not piece:
            break
        pieces.append(piece)
    if response.length:  # of the length it announced, what is missing
        raise http.client.IncompleteRead(b"".join(pieces), response.length)
    return b"".join(pieces)


def _decoded(response: http.client.HTTPResponse, content: bytes, request: str) -> Any:
    if response.status in _BUSY:
        raise _NotAnswered(f"HTTP {response.status}, {_shown(content)}")
    if response.status != 200:
        raise RolloutServerError(f"{request} was refused with HTTP {response.status}: {_shown(content)}")
    try:
        return json.loads(content)
    except ValueError as error:
        raise RolloutServerError(
            f"{request} was answered with what is no whole JSON ({len(content)} bytes): {_shown(content)}"
        ) from error


def _shown(content: bytes) -> str:
    text = content.decode(errors="replace").strip()
    return repr(text if len(text) <= 200 else f"{text[:150]} ... {text[-40:]}")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
