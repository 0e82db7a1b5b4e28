"""What is said about a vLLM server that cannot serve adapters; the answers are those of vLLM 0.31."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from fastgrpo.rollout.lora_server import LoraServer, LoraServerError

NOT_ENABLED = {
    "error": {
        "message": "Call to add_lora method failed: Worker failed with error 'LoRA is not enabled. Use --enable-lora to enable "
        "LoRA.', please check the stack trace above for the root cause",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}
NOT_FOUND = {
    "error": {"message": "Loading lora x failed: No adapter found for /x", "type": "NotFoundError", "code": 404}
}


@pytest.fixture
def answering():
    """Starts a server that answers everything with one status and body; its LoraServer and what it was asked."""
    servers = []

    def start(status, body):
        asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                length = int(self.headers["Content-Length"])
                asked.append((self.path, json.loads(self.rfile.read(length))))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return LoraServer(f"http://127.0.0.1:{server.server_port}/", "some/model", 16, timeout=10), asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (404, {"detail": "Not Found"}, "without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (500, NOT_ENABLED, "without --enable-lora"),
        (404, NOT_FOUND, "cannot read /x; trainer and server need a folder that both see"),
        (500, {"error": {"message": "out of memory"}}, "HTTP 500: out of memory"),
        (502, "no JSON", "HTTP 502: no JSON"),
    ],
)
def test_what_a_server_lacks_is_said_with_the_line_that_starts_it(answering, status, body, why):
    server, asked = answering(status, body)
    with pytest.raises(LoraServerError) as refused:
        server.load("a-1", Path("/x"))
    assert why in str(refused.value) and server.url in str(refused.value)
    assert "vllm serve some/model --enable-lora --max-lora-rank 16" in str(refused.value)
    assert asked == [("/v1/load_lora_adapter", {"lora_name": "a-1", "lora_path": "/x"})]


def test_a_server_that_does_not_answer_is_named():
    server = LoraServer("http://127.0.0.1:9", "some/model", 8)
    for request in (server.models, lambda: server.load("a", Path("/x")), lambda: server.unload("a")):
        with pytest.raises(LoraServerError, match=r"http://127.0.0.1:9 does not answer /v1/.* Start it: "):
            request()
