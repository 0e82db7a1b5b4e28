"""One deadline for all of a request, a largest answer, and messages that say what to do."""

from __future__ import annotations

import json
import socket
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from fastgrpo.rollout import json_client
from fastgrpo.rollout.json_client import JsonClient, RolloutServerError

Speak = Callable[[socket.socket], None]


@pytest.fixture
def speaking() -> Iterator[Callable[[Speak], str]]:
    """Starts a server that speaks as it is told, once a request's head came; its address without a scheme."""
    sockets, threads = [], []

    def start(speak: Speak) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        sockets.append(listening)

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, suppress(OSError):
                        connection.settimeout(5)
                        connection.recv(1 << 16)
                        speak(connection)

        threads.append(threading.Thread(target=serve, daemon=True))
        threads[-1].start()
        return f"127.0.0.1:{listening.getsockname()[1]}"

    yield start
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
    for each in threads:
        each.join(6)


def client(url: str, timeout: float = 5.0, api_key: str | None = None) -> JsonClient:
    return JsonClient(url, api_key=api_key, timeout=timeout, retries=0)


def answer(status: str, content: bytes, *headers: str) -> Speak:
    head = "\r\n".join((f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *headers, "", ""))
    return lambda connection: connection.sendall(head.encode() + content)


def drips(start: bytes, piece: bytes) -> Speak:
    def speak(connection: socket.socket) -> None:
        connection.sendall(start)
        for _ in range(40):
            time.sleep(0.05)
            connection.sendall(piece)

    return speak


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"", b"H"),
        (b"HTTP/1.1 200 OK\r\n", b"X"),
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n1\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"1"),
    ],
    ids=["status line", "header", "headers", "continues", "chunks", "trailers", "body"],
)
def test_one_deadline_holds_for_every_part_of_an_answer(start, piece, speaking):
    url = f"http://{speaking(drips(start, piece))}"
    began = time.monotonic()
    with pytest.raises(RolloutServerError, match=rf"{url}: GET /props took longer than 0\.2 s"):
        client(url, 0.2).call("GET", "/props")
    assert time.monotonic() - began < 1


def test_a_tls_handshake_that_does_not_come_is_over_at_the_deadline(speaking):
    url = f"https://{speaking(lambda connection: connection.recv(1))}"
    began = time.monotonic()
    with pytest.raises(
        RolloutServerError, match=rf"{url}: GET /props .*no TLS handshake came; is it an http:// server"
    ):
        client(url, 0.2).call("GET", "/props")
    assert time.monotonic() - began < 1


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"1" * (1 << 16))


@pytest.mark.parametrize(
    ("speak", "size"),
    [
        (lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 300000000\r\n\r\n1"), "300000000"),
        (endless, "more than 4195"),
    ],
    ids=["announced", "endless"],
)
def test_an_answer_has_a_largest_size(speak, size, speaking):
    url = f"http://{speaking(speak)}"
    tracemalloc.start()
    with pytest.raises(
        RolloutServerError, match=rf"{url}: POST /x for it was answered with {size}\d* bytes, where at most"
    ):
        client(url).call("POST", "/x", {"a": 1}, "it", room=1000)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 16 << 20


def test_an_answer_just_as_large_as_allowed_is_read(speaking, monkeypatch):
    monkeypatch.setattr(json_client, "_ANSWER_BYTES", 100)
    url = f"http://{speaking(answer('200 OK', json.dumps('x' * 123).encode()))}"
    assert client(url).call("GET", "/x", room=25) == "x" * 123
    with pytest.raises(RolloutServerError, match="125 bytes, where at most 124"):
        client(url).call("GET", "/x", room=24)


def test_a_long_request_arrives_to_its_end(speaking):
    got = bytearray()

    def speak(connection: socket.socket) -> None:
        while not got.endswith(b"]}"):
            got.extend(connection.recv(1 << 16))
        answer("200 OK", b"{}")(connection)

    client(f"http://{speaking(speak)}").call("POST", "/x", {"prompt": list(range(50_000))})
    assert got.endswith(b" 49998, 49999]}")  # its start came with the head or not


MESSAGES: dict[str, tuple[Speak, str]] = {
    "nested too deep": (
        answer("200 OK", b"[" * 200_000 + b"]" * 200_000),
        "no whole JSON .400000 bytes, RecursionError",
    ),
    "a number too long": (answer("200 OK", b"1" * 5000), "no whole JSON"),
    "unauthorized": (answer("401 Unauthorized", b"no"), "HTTP 401: 'no'; api_key is None, give the one"),
    "forbidden": (answer("403 Forbidden", b"no"), "HTTP 403: 'no'; api_key is None, give the one"),
    "moved": (
        answer("302 Found", b"", "Location: http://there/v1"),
        "HTTP 302: ''; it points to 'http://there/v1': give the url",
    ),
    "no such path": (answer("404 Not Found", b"no"), "HTTP 404: 'no'; is the path of the url right"),
    "no HTTP": (lambda connection: connection.sendall(b"SSH-2.0\r\n"), "not HTTP; does the port speak HTTPS"),
    "half": (
        lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1"),
        "did the server stop",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_an_error_says_what_to_do(case, speaking):
    speak, words = MESSAGES[case]
    url = f"http://{speaking(speak)}"
    with pytest.raises(RolloutServerError, match=f"{url}: GET /props .*{words}"):
        client(url).call("GET", "/props")


def test_https_to_an_http_port_is_said(speaking):
    url = f"https://{speaking(answer('400 Bad Request', b''))}"
    with pytest.raises(RolloutServerError, match=r"is it an http:// server\?") as error:
        client(url).call("GET", "/props")
    assert "did the server stop" not in str(error.value)


def test_a_host_that_nobody_knows_is_said(monkeypatch):
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(
        RolloutServerError, match="Name or service not known; there is no such host as 'nowhere'"
    ) as error:
        client("http://nowhere:1").call("GET", "/props")
    assert "did the server stop" not in str(error.value)


@pytest.mark.parametrize(
    "speak",
    [
        answer("401 Unauthorized", b"hidden is no key"),
        answer("500 Error", b"x" * 145 + b"hidden" + b"x" * 145),
        answer("302 Found", b"", "Location: http://x/?key=hidden"),
        answer("503 Busy", b"hidden"),
        answer("200 OK", b"hidden"),
        lambda connection: connection.sendall(b"hidden\r\n"),
    ],
)
def test_a_key_that_the_server_says_is_not_shown(speak, speaking):
    with pytest.raises(RolloutServerError) as error:
        client(f"http://{speaking(speak)}", api_key="hidden").call("GET", "/props")
    assert "hidd" not in "".join(traceback.format_exception_only(error.value))
    assert error.value.__cause__ is None or "hidd" not in str(error.value.__cause__)


def test_a_refused_key_is_said(speaking):
    url = f"http://{speaking(answer('401 Unauthorized', b''))}"
    with pytest.raises(RolloutServerError, match="api_key was not accepted"):
        client(url, api_key="hidden").call("GET", "/props")
