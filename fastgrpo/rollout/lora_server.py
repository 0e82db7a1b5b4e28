"""LoRA adapters on a `vllm serve` server: loaded, named in requests, and unloaded over HTTP."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 24

START_LINE = (
    "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve {model} --enable-lora --max-lora-rank {rank} "
    "--logprobs-mode processed_logprobs"
)


class LoraServerError(RuntimeError):
    """A server that does not do what was asked of it; the message names the server, the request and the remedy."""


class LoraServer:
    """
    The part of vLLM's HTTP interface that adapters need.

    Args:
        url: of the server, `http://localhost:8000` say.
        model: name or path of the base model, for messages.
        rank: the `--max-lora-rank` that it needs, for messages.
        timeout: seconds a request may take.
    """

    def __init__(self, url: str, model: str, rank: int, timeout: float = 240.0) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        self.start_line = START_LINE.format(model=model, rank=rank)

    def models(self) -> list[dict[str, Any]]:
        """The cards of the served models, the base first."""
        answer = self._request("/v1/models", None)
        try:
            return json.loads(answer)["data"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise self._unreadable("/v1/models", answer) from None

    def load(self, name: str, folder: Path) -> None:
        """Loads an adapter from a folder that the server can read."""
        try:
            self._request("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        except urllib.error.HTTPError as error:
            raise LoraServerError(self._explain(error, name, folder)) from error

    def unload(self, name: str) -> None:
        """Forgets an adapter."""
        try:
            self._request("/v1/unload_lora_adapter", {"lora_name": name})
        except urllib.error.HTTPError as error:
            raise LoraServerError(f"The vLLM server {self.url} did not unload {name!r}: {_words(error)}") from error

    def prompt_logprobs(self, model: str, token_ids: list[int]) -> list[float]:
        """
        Log-probs of a prompt's tokens under a served model.

        Args:
            model: name of a base model or adapter.
            token_ids: at least two.

        Returns:
            One for each token but the first.
        """
        request = {"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        try:
            answer = self._request("/v1/completions", request)
        except urllib.error.HTTPError as error:
            raise LoraServerError(
                f"The vLLM server {self.url} did not score tokens of the trainer's vocabulary with its model {model!r}: "
                f"{_words(error)}"
            ) from error
        try:
            positions = json.loads(answer)["choices"][0]["prompt_logprobs"][1:]
            return [position[str(token)]["logprob"] for position, token in zip(positions, token_ids[1:], strict=True)]
        except (ValueError, TypeError, LookupError, RecursionError):
            raise self._unreadable("/v1/completions", answer) from None

    def _unreadable(self, path: str, answer: bytes) -> LoraServerError:
        return LoraServerError(
            f"The vLLM server {self.url} answered {path} with what a vLLM server does not say ({len(answer)} bytes): "
            f"{answer[:200]!r}. Start it: {self.start_line}"
        )

    def _request(self, path: str, body: dict[str, Any] | None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                content = response.read(_MOST_BYTES + 1)
        except urllib.error.HTTPError:
            raise
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise LoraServerError(
                f"The vLLM server {self.url} does not answer {path} ({error}). Start it: {self.start_line}"
            ) from error
        if len(content) > _MOST_BYTES:
            raise LoraServerError(f"The vLLM server {self.url} answered {path} with more than {_MOST_BYTES} bytes.")
        return content

    def _explain(self, error: urllib.error.HTTPError, name: str, folder: Path) -> str:
        words = _words(error)
        if error.code == 404 and "adapter" not in words:
            why = "it has no such endpoint: it was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        elif "No adapter found" in words or "not exist" in words or "No such file" in words:
            why = f"it cannot read {folder}; trainer and server need a folder that both see"
        elif "LoRA is not enabled" in words:
            why = "it was started without --enable-lora"
        else:
            why = words
        return f"The vLLM server {self.url} did not load the adapter {name!r}: {why.rstrip('.')}. Start it: {self.start_line}"


def _words(error: urllib.error.HTTPError) -> str:
    """What the body of an error says; vLLM puts a message into JSON."""
    text = error.read().decode(errors="replace")
    try:
        body = json.loads(text)
    except ValueError:
        return f"HTTP {error.code} {text[:500]}".strip()
    inner = body.get("error", body) if isinstance(body, dict) else body
    message = inner.get("message", inner.get("detail", inner)) if isinstance(inner, dict) else inner
    return f"HTTP {error.code}: {message}"
