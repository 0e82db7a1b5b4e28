"""Completions from a llama.cpp server, for TRL's `rollout_func`.

The server computes with the weights of the GGUF file it was started with and cannot take new ones: every batch is of
policy version 0, step 0 of the first `train()`, and marked stale.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from fastgrpo.rollout.json_client import JsonClient, RequestAborted, RolloutServerError
from fastgrpo.rollout.policy_version import STATIC_KEY, VERSION_KEY
from fastgrpo.rollout.server_arguments import count, fields

logger = logging.getLogger("fastgrpo")

_VERSION_OF_THE_FILE = 0
_COMPARED_TOKENS = 64
_ANSWER_BYTES_A_TOKEN = 1 << 12
_SET_BY_THE_TRAINER = {
    *("prompt", "n_predict", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "samplers"),
    *("seed", "n_probs", "post_sampling_probs", "return_tokens", "cache_prompt", "stream", "n_cmpl", "stop"),
}


def rollout_func(
    url: str,
    *,
    timeout: float = 600.0,
    retries: int = 3,
    max_in_flight: int | None = None,
    sampling: Mapping[str, Any] | None = None,
    api_key: str | None = None,
) -> LlamaCpp:
    """
    A `rollout_func` for `trl.GRPOTrainer` that samples on a llama.cpp server.

    One `/completion` request a completion, with the prompt as the trainer's own token ids. Temperature, `top_p`, `top_k`,
    `min_p`, `repetition_penalty` and `max_completion_length` are the trainer's, applied in transformers' order; seeds follow
    from the trainer's seed, `train()`, step and row, and draw nothing from a global generator. Log-probs are those of the
    distribution that was sampled from, after temperature and truncation, as vLLM's `processed_logprobs`. The server and its
    vocabulary are checked before the first request.

    Args:
        url: of `llama-server`, `"http://localhost:8080"` say.
        timeout: seconds for a completion, from its connection to the last byte.
        retries: times a request is repeated that was not answered at all; a completion changes nothing on the server, so
            that is safe. One that was answered in part, badly or too late is an error at once.
        max_in_flight: requests of a process at a time; None = its share of the server's slots.
        sampling: more fields of the request, by llama.cpp's names, `{"logit_bias": ...}` say.
        api_key: of a server started with `--api-key`.

    Returns:
        A callable of prompts and trainer; give it to `GRPOTrainer(rollout_func=...)`.

    Raises:
        ValueError: an argument that is not allowed.
    """
    if max_in_flight is not None:
        max_in_flight = count("max_in_flight", max_in_flight, 1, ", or None for the server's number of slots")
    sampling = fields("sampling", sampling)
    taken = _SET_BY_THE_TRAINER & set(sampling)
    if taken:
        raise ValueError(f"sampling has {', '.join(sorted(taken))}, which the trainer's config and the rollouts set.")

    def connect() -> JsonClient:
        return JsonClient(url, api_key=api_key, timeout=timeout, retries=retries)

    return LlamaCpp(connect, max_in_flight, sampling)


@dataclass(frozen=True)
class Server:
    """What a llama.cpp server says of itself: parallel slots, tokens in each, and the model's file."""

    slots: int
    context: int
    model: str


class LlamaCpp:
    """
    What `rollout_func` makes.

    Args:
        connect: opens a client for one batch.
        max_in_flight: see `rollout_func`.
        sampling: see `rollout_func`.

    Attributes:
        rollout_path: who samples, in words.
    """

    def __init__(self, connect: Callable[[], JsonClient], max_in_flight: int | None, sampling: dict[str, Any]) -> None:
        self._connect, self._max_in_flight, self._sampling = connect, max_in_flight, sampling
        self._url = connect().url
        self._server: Server | None = None
        self._calls: tuple[Any, int] = (None, 0)
        self._run: tuple[Any, int] = (None, -1)  # state and number of the train() that was served last
        self._warned = False
        self.rollout_path = f"llama.cpp server {self._url}"

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """
        Samples one completion for every prompt; TRL repeats a prompt for each of its completions.

        Args:
            prompts: texts or conversations.
            trainer: the `GRPOTrainer`.

        Returns:
            `prompt_ids`, `completion_ids`, `logprobs` with a list a prompt; `policy_version` 0 and `stale` True.

        Raises:
            ValueError: a trainer whose rollouts this server cannot make.
            RolloutServerError: the server did not answer as it should; the trainer is as it was.
        """
        _refuse(trainer)
        tokenized, images, _ = trainer._tokenize_prompts(prompts)
        prompt_ids = [list(map(int, ids)) for ids in tokenized]
        if images is not None:
            raise ValueError("llama.cpp rollouts take text only; these prompts have images.")
        client = self._connect()
        try:
            if self._server is None:
                self._server = _checked_server(client, trainer)
            self._check_lengths(prompt_ids, trainer)
            rows = self._rows(client, prompt_ids, trainer)
        except RolloutServerError:
            self._server = None  # another one may stand there next time
            raise
        finally:
            client.abort()
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [tokens for tokens, _ in rows],
            "logprobs": [logprobs for _, logprobs in rows],
            VERSION_KEY: _VERSION_OF_THE_FILE,
            STATIC_KEY: True,
        }

    def _rows(
        self, client: JsonClient, prompt_ids: list[list[int]], trainer: Any
    ) -> list[tuple[list[int], list[float]]]:
        common = {**self._sampling, **sampling_fields(trainer, self._server.context)}
        seeds = self._seeds(trainer, len(prompt_ids))
        share = max(1, self._server.slots // trainer.accelerator.num_processes)
        vocabulary, ends = _vocabulary_size(trainer), _end_ids(trainer)

        def row(index: int) -> tuple[list[int], list[float]]:
            ids = prompt_ids[index]
            about = f"row {index} of {len(prompt_ids)} ({len(ids)} prompt tokens, up to {common['n_predict']} new)"
            where = f"{self._url}: POST /completion for {about}"
            try:
                body = {**common, "prompt": ids, "seed": seeds[index]}
                room = _ANSWER_BYTES_A_TOKEN * (len(ids) + common["n_predict"])
                answer = client.call("POST", "/completion", body, about, room)
                tokens, logprobs = parse_completion(answer, len(ids), common["n_predict"], vocabulary, where)
            except BaseException:
                client.abort()  # nobody waits for the others
                raise
            kept = self._until_end(tokens, answer, ends)
            return tokens[:kept], logprobs[:kept]

        pool = ThreadPoolExecutor(self._max_in_flight or share, "fastgrpo-llama-cpp")
        futures: list[Future] = []
        try:
            futures = [pool.submit(row, index) for index in range(len(prompt_ids))]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [error for future in done if (error := future.exception()) is not None]
            if failed:
                raise next((error for error in failed if not isinstance(error, RequestAborted)), failed[0])
            return [future.result() for future in futures]
        finally:
            client.abort()  # after Ctrl-C
            pool.shutdown(cancel_futures=True)

    def _check_lengths(self, prompt_ids: list[list[int]], trainer: Any) -> None:
        for index, ids in enumerate(prompt_ids):
            if not ids:
                raise ValueError(f"prompt {index} of this batch has no tokens; llama.cpp needs at least one.")
            if len(ids) + trainer.max_completion_length > self._server.context:
                raise RolloutServerError(
                    f"{self._url}: a prompt of {len(ids)} tokens and max_completion_length={trainer.max_completion_length} do "
                    f"not fit into the {self._server.context} tokens of a slot; start the server with a larger -c (it is "
                    f"divided by its {self._server.slots} slots, -np), or take shorter prompts or completions."
                )

    def _seeds(self, trainer: Any, rows: int) -> list[int]:
        training, process = trainer.model.training, trainer.accelerator.process_index
        if training and self._run[0] is not trainer.state:  # each train() makes one, and counts its steps from 0
            self._run = (trainer.state, self._run[1] + 1)
        key = (trainer.args.seed, self._run[1], trainer.state.global_step, training, process)
        last, count = self._calls
        self._calls = (key, count + 1 if key == last else 0)
        return [
            int.from_bytes(hashlib.sha256(repr((*self._calls, row)).encode()).digest()[:4], "little") % (2**32 - 1)
            for row in range(rows)
        ]

    def _until_end(self, tokens: list[int], answer: Mapping[str, Any], ends: set[int]) -> int:
        """Tokens up to the first one that ends the row for the trainer, as TRL cuts its own."""
        first = next((index for index, token in enumerate(tokens) if token in ends), None)
        if first is not None:
            return first + 1
        if answer.get("stop_type") == "eos" and not self._warned:
            self._warned = True
            logger.warning(
                "fastgrpo: %s ended a completion with token %d, which is no end for the trainer (%s are): TRL counts it as cut "
                "off. Add it to generation_config.eos_token_id of the model, or leave it out of the GGUF file's.",
                self.rollout_path,
                tokens[-1],
                sorted(ends),
            )
        return len(tokens)


def sampling_fields(trainer: Any, context: int) -> dict[str, Any]:
    """
    The trainer's sampling, as fields of a `/completion` request.

    Args:
        trainer: a `GRPOTrainer`.
        context: tokens of a slot; the repetition penalty looks back over all of them, as transformers' does.

    Returns:
        The fields. Samplers run in transformers' order: repetition penalty, temperature, `top_k`, `top_p`, `min_p`; only
        those that do something are named, so that the server's own defaults have no part.
    """
    penalty, top_k, top_p, min_p = (
        trainer.repetition_penalty or 1.0,
        max(trainer.top_k or 0, 0),
        1.0 if trainer.top_p is None else trainer.top_p,
        trainer.min_p or 0.0,
    )
    active = {
        "penalties": penalty != 1.0,
        "temperature": True,
        "top_k": top_k > 0,
        "top_p": top_p < 1.0,
        "min_p": min_p > 0,
    }
    return {
        "n_predict": trainer.max_completion_length,
        "samplers": [name for name, used in active.items() if used],
        "temperature": trainer.temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repeat_penalty": penalty,
        "repeat_last_n": context,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "dynatemp_range": 0.0,
        "mirostat": 0,
        "ignore_eos": False,
        "n_probs": 1,
        "post_sampling_probs": True,
        "return_tokens": True,
        "cache_prompt": False,
        "stream": False,
    }


def parse_completion(
    answer: Any, prompt_tokens: int, most: int, vocabulary: int, where: str
) -> tuple[list[int], list[float]]:
    """
    Token ids and log-probs of a `/completion` answer.

    Args:
        answer: its JSON.
        prompt_tokens: tokens that were sent.
        most: tokens that were asked for.
        vocabulary: size of the trainer's.
        where: server and request, for messages.

    Returns:
        Ids and log-probs of the distribution they were sampled from, at least one, as many of one as of the other.

    Raises:
        RolloutServerError: an answer that lacks something, or whose numbers do not fit.
    """
    tokens, entries = (_list_of(answer, name, where) for name in ("tokens", "completion_probabilities"))
    if not 1 <= len(tokens) <= most or len(entries) != len(tokens):
        raise RolloutServerError(
            f"{where} was answered with {len(tokens)} tokens and {len(entries)} probabilities, where 1 to {most} of both were "
            "asked for."
        )
    read = answer.get("tokens_evaluated", prompt_tokens)
    if read != prompt_tokens or answer.get("truncated"):
        raise RolloutServerError(
            f"{where} was computed on {read} prompt tokens{', cut off,' if answer.get('truncated') else ''} where "
            f"{prompt_tokens} were sent; start the server without context shift, and with a context that holds both."
        )
    logprobs = []
    for position, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
        if not _is_id(token) or not 0 <= token < vocabulary:
            raise RolloutServerError(
                f"{where} was answered with token {token!r}, where the trainer's model has {vocabulary}: its model has "
                "another vocabulary; start it with a GGUF file of the trainer's model."
            )
        probability = entry.get("prob") if isinstance(entry, dict) and entry.get("id") == token else None
        if not isinstance(probability, float | int) or not 0 < probability <= 1 + 1e-5:
            raise RolloutServerError(
                f"{where} gave no probability of its token {token} at position {position}: {entry!r:.200}. This needs a "
                "llama.cpp that knows post_sampling_probs (2025 or later)."
            )
        logprobs.append(min(math.log(probability), 0.0))
    return tokens, logprobs


def _list_of(answer: Any, name: str, where: str) -> list[Any]:
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, list):
        keys = ", ".join(sorted(answer)) if isinstance(answer, dict) else type(answer).__name__
        raise RolloutServerError(f"{where} was answered without {name!r} (it has {keys}); is it a llama.cpp server?")
    return value


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse(trainer: Any) -> None:
    if getattr(trainer, "tools", None):
        raise ValueError(
            "llama.cpp rollouts do not know tools or environments: TRL would generate what follows a tool's result in this "
            "process, with other weights. Leave them out, or generate with vLLM."
        )
    if trainer.args.generation_kwargs:
        raise ValueError(
            "generation_kwargs are for transformers or vLLM; give llama.cpp's fields as rollout_func(url, sampling={...})."
        )


def _checked_server(client: JsonClient, trainer: Any) -> Server:
    """What the server says of itself, once its vocabulary is the trainer's."""
    properties = client.call("GET", "/props", about="what the server is")
    try:
        context = properties["default_generation_settings"]["n_ctx"]
        server = Server(int(properties["total_slots"]), int(context), str(properties.get("model_path", "")))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RolloutServerError(
            f"{client.url}: GET /props says nothing of slots and context ({error}); is it a llama.cpp server?"
        ) from error
    _check_vocabulary(client, trainer, server)
    return server


def _check_vocabulary(client: JsonClient, trainer: Any, server: Server) -> None:
    """Compares what ordinary tokens all over the vocabulary mean; whitespace apart, which every tokenizer treats its way."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    ids, ours = _comparable_tokens(tokenizer)
    if not ids:
        return
    answer = client.call("POST", "/detokenize", {"tokens": ids}, "its vocabulary")
    theirs = "".join(str(answer.get("content") if isinstance(answer, dict) else "").split())
    if theirs == "".join(ours):
        return
    raise RolloutServerError(
        f"{client.url}: the model {server.model} has another vocabulary than the trainer's: tokens {ids[:8]}... mean "
        f"{' '.join(ours[:8])!r}... here, and {theirs[:40]!r}... there. Start the server with a GGUF file made of the "
        "trainer's model and tokenizer."
    )


def _comparable_tokens(tokenizer: Any) -> tuple[list[int], list[str]]:
    special = set(tokenizer.all_special_ids)
    ids, words = [], []
    for index in range(0, len(tokenizer), max(1, len(tokenizer) // (4 * _COMPARED_TOKENS))):
        word = "".join(tokenizer.decode([index]).split())
        if index not in special and word and word.isascii() and word.isprintable():
            ids.append(index)
            words.append(word)
    step = max(1, len(ids) // _COMPARED_TOKENS)
    return ids[::step][:_COMPARED_TOKENS], words[::step][:_COMPARED_TOKENS]


def _vocabulary_size(trainer: Any) -> int:
    return trainer.accelerator.unwrap_model(trainer.model).config.get_text_config().vocab_size


def _end_ids(trainer: Any) -> set[int]:
    ids = getattr(trainer, "eos_token_ids", None)  # not in TRL 1.12
    if ids is None:
        ids = [getattr(trainer.processing_class, "tokenizer", trainer.processing_class).eos_token_id]
    return set(ids)
