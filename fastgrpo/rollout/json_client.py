"""JSON over HTTP for rollouts: deadlines, repeats where nothing was answered, and an end to all requests at once."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from fastgrpo.rollout.server_arguments import address, count, key, seconds

_CONNECT_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 0.5
_BUSY = (429, 503)
_PIECE_BYTES = 1 << 14
_ANSWER_BYTES = 1 << 22
_ANSWER_BYTES_A_SENT_ONE = 8


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
        ValueError: an argument of another form.
    """

    def __init__(self, url: str, *, api_key: str | None, timeout: float, retries: int) -> None:
        self._address, self.url = address(url), url.rstrip("/")
        self._headers = {"Connection": "close", "Accept": "application/json"}
        self._key = key(api_key)
        if self._key is not None:
            self._headers["Authorization"] = f"Bearer {self._key}"
        secure = self._address.scheme == "https"
        self._default_port = http.client.HTTPS_PORT if secure else http.client.HTTP_PORT
        self._port = self._address.port or self._default_port
        self._tls = _tls() if secure else None
        self._timeout, self._retries = seconds(timeout), count("retries", retries, 0)
        self._lock, self._open, self._aborted = threading.Lock(), set[socket.socket](), threading.Event()

    def call(self, method: str, path: str, body: Any = None, about: str = "", room: int = 0) -> Any:
        """
        One request and its answer.

        Args:
            method: `"GET"` or `"POST"`.
            path: behind the server's url, with the leading slash.
            body: what is sent as JSON; None = nothing.
            about: what the request was for, for messages.
            room: bytes that the answer may have beyond 4 MiB and 8 times the request's.

        Returns:
            The answer's JSON.

        Raises:
            RolloutServerError: no answer, an HTTP error, an answer that is not whole, too large or no JSON, or one that came
                too late.
            RequestAborted: `abort` was called.
        """
        request = f"{self.url}: {method} {path}{f' for {about}' if about else ''}"
        deadline = time.monotonic() + self._timeout
        pause = _FIRST_PAUSE_SECONDS
        for attempt in range(self._retries + 1):
            try:
                return self._once(method, path, body, request, deadline, room)
            except _NotAnswered as error:
                if attempt == self._retries or time.monotonic() + pause >= deadline:
                    tries = f"tried {attempt + 1} times" if attempt else "tried once"
                    raise self._error(f"{request} was not answered ({tries}): {error}") from error.__cause__
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

    def _once(self, method: str, path: str, body: Any, request: str, deadline: float, room: int) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = dict(self._headers)
        if data is not None:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
        most = _ANSWER_BYTES + _ANSWER_BYTES_A_SENT_ONE * len(data or b"") + room
        connection = http.client.HTTPConnection(self._address.host, self._port)
        connection.default_port = self._default_port  # the Host header leaves it out
        used = response = None
        try:
            used = connection.sock = self._connected(deadline)
            connection.response_class = partial(_Response, deadline=deadline)
            try:
                used.settimeout(_left(deadline))
                connection.request(method, self._address.path + path, _sent(data, used, deadline), headers)
                response = connection.getresponse()
            except ConnectionError as error:  # RemoteDisconnected is one
                raise _NotAnswered(f"the connection was closed without an answer ({self._words(error)})") from error
            content = _content(response, most)
        except _NotAnswered:
            self._unless_aborted()
            raise
        except TimeoutError as error:
            self._unless_aborted()
            raise self._error(
                f"{request} took longer than {self._timeout:g} s; give a longer timeout, fewer max_in_flight, or shorter "
                "completions."
            ) from error
        except _TooLarge as error:
            raise self._error(
                f"{request} was answered with {error}, where at most {most} can come of what was asked; is it a llama.cpp "
                "server?"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            self._unless_aborted()
            raise self._error(
                f"{request} broke off: {self._words(error)}; {self._advice(error)}"
            ) from self._shown_cause(error)
        finally:
            with self._lock:
                self._open.discard(used)
            for each in (response, connection, used):  # the server sees it at once, whoever keeps the error
                if each is not None:
                    each.close()
        return self._decoded(response, content, request)

    def _connected(self, deadline: float) -> socket.socket:
        """A socket to the server, its TLS handshake done."""
        used = self._reached(deadline)
        try:
            used.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                used = self._tls.wrap_socket(used, server_hostname=self._address.host, do_handshake_on_connect=False)
            with self._lock:
                self._open.add(used)
            self._unless_aborted()
            if self._tls is not None:
                self._shake_hands(used, deadline)
        except BaseException:
            with self._lock:
                self._open.discard(used)
            used.close()
            raise
        return used

    def _reached(self, deadline: float) -> socket.socket:
        """A socket to the first of the host's addresses that takes one."""
        addresses = socket.getaddrinfo(self._address.host, self._port, type=socket.SOCK_STREAM)
        failed: Exception | None = None
        for family, kind, protocol, _, where in addresses:
            used = socket.socket(family, kind, protocol)
            try:
                used.settimeout(min(_CONNECT_SECONDS, _left(deadline)))
                used.connect(where)
            except BaseException as error:
                used.close()
                if not isinstance(error, OSError):
                    raise
                failed = error
            else:
                return used
        if isinstance(failed, TimeoutError):
            within = min(_CONNECT_SECONDS, self._timeout)
            raise _NotAnswered(f"no connection within {within:g} s; is the server running there?") from failed
        raise _NotAnswered(f"{self._words(failed)}; is the server running there?") from failed

    def _shake_hands(self, used: ssl.SSLSocket, deadline: float) -> None:
        used.settimeout(min(_CONNECT_SECONDS, _left(deadline)))
        try:
            used.do_handshake()
        except TimeoutError as error:
            raise _NotAnswered("no TLS handshake came; is it an http:// server?") from error
        except (ConnectionError, ssl.SSLEOFError) as error:
            raise _NotAnswered(f"no TLS handshake came ({self._words(error)}); is it an http:// server?") from error

    def _decoded(self, response: http.client.HTTPResponse, content: bytes, request: str) -> Any:
        if response.status in _BUSY:
            raise _NotAnswered(f"HTTP {response.status}, {self._shown(content)}")
        if response.status != 200:
            raise self._error(
                f"{request} was refused with HTTP {response.status}: {self._shown(content)}{self._remedy(response)}"
            )
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise self._error(
                f"{request} was answered with what is no whole JSON ({len(content)} bytes, {type(error).__name__}): "
                f"{self._shown(content)}"
            ) from None

    def _remedy(self, response: http.client.HTTPResponse) -> str:
        if response.status in (401, 403):
            given = "was not accepted" if self._key else "is None"
            return f"; api_key {given}, give the one that the server was started with (--api-key)"
        if 300 <= response.status < 400:
            there = self._without_key(response.getheader("Location", "nowhere"))
            return f"; it points to {there!r:.300}: give the url where the server itself is"
        if response.status == 404:
            return "; is the path of the url right, and is it a llama.cpp server?"
        return ""

    def _advice(self, error: Exception) -> str:
        if isinstance(error, socket.gaierror):
            return f"there is no such host as {self._address.host!r}, or no name server; check the url"
        if isinstance(error, ssl.SSLCertVerificationError):
            return "its certificate is not trusted here; SSL_CERT_FILE names further authorities"
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            return "is it an http:// server?"
        if isinstance(error, http.client.BadStatusLine):
            return f"that is not HTTP; does the port speak {'HTTPS' if self._address.scheme == 'http' else 'HTTP'}?"
        return "did the server stop?"

    def _shown(self, content: bytes) -> str:
        text = self._without_key(content.decode(errors="replace").strip())
        return repr(text if len(text) <= 200 else f"{text[:150]} ... {text[-40:]}")

    def _words(self, error: BaseException) -> str:
        text = self._without_key(" ".join(str(error).split()))
        return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__

    def _without_key(self, text: str) -> str:
        return text if self._key is None else text.replace(self._key, "***")

    def _shown_cause(self, error: Exception) -> Exception | None:
        return None if self._key is not None and self._key in str(error) else error

    def _error(self, message: str) -> RolloutServerError:
        return RolloutServerError(self._without_key(message))

    def _unless_aborted(self) -> None:
        if self._aborted.is_set():
            raise RequestAborted


class _TooLarge(Exception):
    """The answer's size, in words."""


class _Reader(io.RawIOBase):
    """A socket's file, every read of which ends at a deadline."""

    def __init__(self, file: io.RawIOBase, used: socket.socket, deadline: float) -> None:
        self._file, self._used, self._deadline = file, used, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._used.settimeout(_left(self._deadline))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """An answer of which status line, headers and body have one deadline together, however slowly they drip."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_Reader(self.fp.detach(), sock, deadline))


def _sent(data: bytes | None, used: socket.socket, deadline: float) -> Iterator[bytes] | None:
    """A request's body in pieces, each sent in the time that is left."""
    if data is None:
        return None

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(data), _PIECE_BYTES):
            used.settimeout(_left(deadline))
            yield data[start : start + _PIECE_BYTES]

    return pieces()


def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _content(response: http.client.HTTPResponse, most: int) -> bytes:
    """The whole body, if it has at most so many bytes."""
    if response.length is not None and response.length > most:
        raise _TooLarge(f"{response.length} bytes")
    pieces, size = [], 0
    while piece := response.read1(_PIECE_BYTES):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise _TooLarge(f"more than {most} bytes")
    if response.length:  # of the length it announced, what is missing
        raise http.client.IncompleteRead(b"".join(pieces), response.length)
    return b"".join(pieces)
