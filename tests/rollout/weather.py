"""A small HTTP server that answers as llama.cpp does, in any weather."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def good_answer(body: dict[str, Any]) -> dict[str, Any]:
    """Two tokens, an `a` and the end, as llama.cpp answers a `/completion`."""
    tokens = [17, 1]
    return {
        "content": "a",
        "tokens": tokens,
        "tokens_evaluated": len(body["prompt"]),
        "truncated": False,
        "stop_type": "eos",
        "completion_probabilities": [{"id": token, "token": "", "bytes": [], "prob": 0.5} for token in tokens],
    }


class FakeLlama:
    """
    What the server does and saw.

    Attributes:
        completion: gets the handler and the request's JSON and answers it; `good` by default.
        refuses: number of the next requests of any kind that are answered with 503.
        paths: of all requests.
        bodies: the `/completion` requests.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode, self.completion, self.refuses = decode, self.good, 0
        self.bodies: list[dict[str, Any]] = []
        self.properties: Any = {"default_generation_settings": {"n_ctx": 64}, "total_slots": 3, "model_path": "m.gguf"}
        self.paths: list[str] = []
        self.lock, self.url = threading.Lock(), ""

    def good(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        reply(handler, good_answer(body))


def reply(handler: BaseHTTPRequestHandler, value: Any, status: int = 200) -> None:
    """Answers with JSON."""
    content = json.dumps(value).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def truncated(handler: BaseHTTPRequestHandler, body: dict[str, Any], announced: bool = True) -> None:
    """The first half of an answer; its length may be that of the whole."""
    content = json.dumps(good_answer(body)).encode()
    half = content[: len(content) // 2]
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content if announced else half)))
    handler.end_headers()
    handler.wfile.write(half)


def dripping(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """A byte every twentieth of a second, so that no single wait is long."""
    content = json.dumps(good_answer(body)).encode()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    for byte in content:
        handler.wfile.write(bytes([byte]))
        time.sleep(0.05)


def closing(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """No answer at all."""
    handler.close_connection = True


@contextmanager
def fake_llama(decode: Callable[[list[int]], str]) -> Iterator[FakeLlama]:
    """A server on a free port of this machine."""
    fake = FakeLlama(decode)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(lambda _: reply(self, fake.properties))

        def do_POST(self) -> None:
            if self.path.endswith("/detokenize"):
                self._answer(lambda body: reply(self, {"content": fake.decode(body["tokens"])}))
            else:
                self._answer(self._complete)

        def _complete(self, body: dict[str, Any]) -> None:
            with fake.lock:
                fake.bodies.append(body)
            fake.completion(self, body)

        def _answer(self, how: Callable[[Any], None]) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with fake.lock:
                fake.paths.append(self.path)
                busy = fake.refuses > 0
                fake.refuses -= busy
            try:
                if busy:
                    reply(self, {"error": {"code": 503, "message": "Loading model"}}, 503)
                else:
                    how(json.loads(content) if content else None)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the other side has gone

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
