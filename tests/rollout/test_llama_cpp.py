"""`rollout_func` against a server that answers well, badly, late or not at all."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_tokenizer
from weather import FakeLlama, closing, dripping, fake_llama, good_answer, reply, truncated

from fastgrpo.rollout import json_client
from fastgrpo.rollout.json_client import RolloutServerError
from fastgrpo.rollout.llama_cpp import rollout_func

PROMPTS = ["1+1=", "a", "7-3=", "hello there."]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture
def server(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLlama]:
    monkeypatch.setattr(json_client, "_FIRST_PAUSE_SECONDS", 0.01)
    with fake_llama(tokenizer.decode) as fake:
        yield fake


@pytest.fixture
def trainer(tokenizer: Any) -> SimpleNamespace:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=61))
    model = SimpleNamespace(training=True, config=config)
    return SimpleNamespace(
        model=model,
        processing_class=tokenizer,
        accelerator=SimpleNamespace(num_processes=1, process_index=0, unwrap_model=lambda model: model),
        args=SimpleNamespace(seed=3, generation_kwargs=None),
        state=SimpleNamespace(global_step=4),
        tools=[],
        eos_token_ids=[1],
        max_completion_length=12,
        temperature=0.9,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        _tokenize_prompts=lambda prompts: (tokenizer(text=prompts)["input_ids"], None, {}),
    )


def test_rows_come_back_in_order_with_ids_and_log_probs(server, trainer, tokenizer):
    def slow_first(handler: Any, body: dict[str, Any]) -> None:
        time.sleep(0.05 if body["prompt"] == tokenizer("1+1=")["input_ids"] else 0)
        answer = good_answer(body)
        answer["tokens"] = [body["prompt"][0], 1]
        answer["completion_probabilities"][0] = {"id": body["prompt"][0], "prob": 0.25}
        reply(handler, answer)

    server.completion = slow_first
    output = rollout_func(server.url)(PROMPTS, trainer)
    assert output["prompt_ids"] == [tokenizer(text)["input_ids"] for text in PROMPTS]
    assert output["completion_ids"] == [[ids[0], 1] for ids in output["prompt_ids"]]
    assert output["logprobs"] == [[pytest.approx(math.log(0.25)), pytest.approx(math.log(0.5))]] * 4
    assert output["policy_version"] == 0 and output["stale"] is True


def test_requests_carry_the_trainer_s_sampling_and_seeds_of_their_own(server, trainer):
    sample = rollout_func(server.url, sampling={"logit_bias": [[5, -1.0]]})
    sample(PROMPTS, trainer)
    plain = server.bodies[0]
    assert plain["samplers"] == ["temperature"] and plain["temperature"] == 0.9 and plain["n_predict"] == 12
    assert (
        plain["cache_prompt"] is False
        and plain["return_tokens"]
        and plain["post_sampling_probs"]
        and plain["n_probs"] == 1
    )
    assert plain["top_k"] == 0 and plain["repeat_penalty"] == 1.0 and plain["logit_bias"] == [[5, -1.0]]
    trainer.top_k, trainer.top_p, trainer.min_p, trainer.repetition_penalty = 5, 0.8, 0.1, 1.2
    sample(PROMPTS, trainer)
    full = server.bodies[-1]
    assert full["samplers"] == ["penalties", "temperature", "top_k", "top_p", "min_p"]
    assert (full["top_k"], full["top_p"], full["min_p"], full["repeat_penalty"]) == (5, 0.8, 0.1, 1.2)
    assert full["repeat_last_n"] == 64
    trainer.top_k = -1  # what vLLM calls "all"
    sample(PROMPTS, trainer)
    assert server.bodies[-1]["top_k"] == 0 and "top_k" not in server.bodies[-1]["samplers"]
    seeds = [body["seed"] for body in server.bodies]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**32 - 1 for seed in seeds)


def test_seeds_repeat_with_the_step_and_differ_between_processes(server, trainer):
    def seeds() -> list[int]:
        server.bodies.clear()
        rollout_func(server.url, max_in_flight=1)(PROMPTS, trainer)
        return [body["seed"] for body in server.bodies]

    first = seeds()
    assert first == seeds()
    trainer.accelerator.process_index = 1
    second = seeds()
    trainer.state.global_step = 5
    assert not set(first) & set(second) and not set(second) & set(seeds())


@pytest.mark.parametrize(("processes", "given", "most"), [(1, None, 3), (2, None, 1), (8, None, 1), (1, 2, 2)], ids=str)
def test_no_more_requests_are_under_way_than_the_server_has_slots(processes, given, most, server, trainer):
    running, seen, lock = set(), [], threading.Lock()

    def slow(handler: Any, body: dict[str, Any]) -> None:
        with lock:
            running.add(handler)
            seen.append(len(running))
        time.sleep(0.02)
        with lock:
            running.discard(handler)  # before the answer, which lets the next one come
        server.good(handler, body)

    server.completion = slow
    trainer.accelerator.num_processes = processes
    rollout_func(server.url, max_in_flight=given)(PROMPTS * 2, trainer)
    assert max(seen) == most and len(seen) == 8


def test_the_server_is_checked_once_and_again_after_an_error(server, trainer):
    sample = rollout_func(server.url)
    sample(["a"], trainer)
    sample(["a"], trainer)
    assert len(server.paths) == 2 + 2
    server.completion = truncated
    with pytest.raises(RolloutServerError):
        sample(["a"], trainer)
    server.completion = server.good
    sample(["a"], trainer)
    assert len(server.paths) == 5 + 3


def test_what_was_not_answered_is_repeated(server, trainer):
    server.refuses = 2
    assert len(rollout_func(server.url)(["a"], trainer)["completion_ids"]) == 1
    closes = iter([True, False])

    def closing_once(handler: Any, body: dict[str, Any]) -> None:
        (closing if next(closes) else server.good)(handler, body)

    server.completion = closing_once
    rollout_func(server.url)(["a"], trainer)
    first, second = server.bodies[-2:]
    assert first == second


def test_repeats_are_bounded(server, trainer):
    server.refuses = 10
    with pytest.raises(
        RolloutServerError, match=r"GET /props .* was not answered \(tried 3 times\): HTTP 503.*Loading"
    ):
        rollout_func(server.url, retries=2)(["a"], trainer)
    assert server.refuses == 7


def test_a_server_that_is_down_is_named(trainer):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(
        RolloutServerError, match=f"{url}: GET /props .*tried once.*refused; is the server running there"
    ):
        rollout_func(url, retries=0)(["a"], trainer)


BAD_ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "fewer probabilities": ({"completion_probabilities": []}, "2 tokens and 0 probabilities, where 1 to 12"),
    "no tokens": ({"tokens": [], "completion_probabilities": []}, "0 tokens and 0 probabilities"),
    "too many tokens": ({"tokens": [5] * 13, "completion_probabilities": [{}] * 13}, "13 tokens"),
    "tokens missing": ({"tokens": None}, "without 'tokens'"),
    "another prompt": ({"tokens_evaluated": 5}, "computed on 5 prompt tokens where 1 were sent"),
    "a prompt cut off": ({"truncated": True}, "cut off"),
    "a token too large": (
        {"tokens": [61], "completion_probabilities": [{"id": 61, "prob": 0.5}]},
        "token 61, where the trainer's model has 61: .* another vocabulary",
    ),
    "text for a token": ({"tokens": ["a"], "completion_probabilities": [{"id": "a", "prob": 0.5}]}, "token 'a'"),
    "no probability": (
        {"completion_probabilities": [{"id": 17, "logprob": -1.0}] * 2},
        "no probability of its token 17",
    ),
    "another token's": ({"completion_probabilities": [{"id": 1, "prob": 0.5}] * 2}, "no probability of its token 17"),
    "a probability of 0": ({"completion_probabilities": [{"id": 17, "prob": 0.0}, {"id": 1, "prob": 1}]}, "token 17"),
    "a null": ({"completion_probabilities": [{"id": 17, "prob": None}, {"id": 1, "prob": 1}]}, "token 17"),
}


@pytest.mark.parametrize("case", BAD_ANSWERS)
def test_an_answer_that_does_not_fit_is_an_error_with_its_request(case, server, trainer):
    changes, problem = BAD_ANSWERS[case]
    server.completion = lambda handler, body: reply(handler, good_answer(body) | changes)
    with pytest.raises(RolloutServerError, match=f"{server.url}: POST /completion for row 0 of 1 .*{problem}"):
        rollout_func(server.url)(["a"], trainer)
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("completion", "problem"),
    [
        (truncated, "broke off: IncompleteRead"),
        (lambda handler, body: truncated(handler, body, announced=False), "what is no whole JSON"),
        (lambda handler, body: reply(handler, {"error": "no"}, 400), "refused with HTTP 400.*no"),
        (lambda handler, body: reply(handler, [1, 2]), "without 'tokens' .it has list"),
    ],
)
def test_a_broken_answer_is_an_error_and_not_repeated(completion, problem, server, trainer):
    server.completion = completion
    with pytest.raises(RolloutServerError, match=f"{server.url}: POST /completion for row 0 of 1 .*{problem}"):
        rollout_func(server.url)(["a"], trainer)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("slow", [dripping, lambda *_: time.sleep(1)], ids=["dripping", "silent"])
def test_an_answer_that_takes_too_long_is_an_error_and_not_repeated(slow, server, trainer):
    server.completion = slow
    began = time.monotonic()
    with pytest.raises(RolloutServerError, match=r"POST /completion for row 0 .* took longer than 0\.3 s"):
        rollout_func(server.url, timeout=0.3)(["a"], trainer)
    assert time.monotonic() - began < 5 and len(server.bodies) == 1


def test_one_failure_ends_the_other_requests(server, trainer):
    gone = threading.Event()

    def one_fails(handler: Any, body: dict[str, Any]) -> None:
        if len(body["prompt"]) == 1:
            time.sleep(0.1)
            reply(handler, {"error": "no"}, 500)
            return
        for _ in range(500):  # until the other side hangs up
            handler.connection.settimeout(0.01)
            try:
                if handler.connection.recv(1) == b"":
                    gone.set()
                    return
            except TimeoutError:
                pass

    server.completion = one_fails
    with pytest.raises(RolloutServerError, match=r"row 1 of 8 .*HTTP 500"):
        rollout_func(server.url)(PROMPTS * 2, trainer)
    assert gone.wait(5) and len(server.bodies) <= 3


def test_another_vocabulary_is_found_before_the_first_completion(server, trainer):
    server.decode = lambda ids: "x" * len(ids)
    with pytest.raises(RolloutServerError, match=r"m\.gguf has another vocabulary .* tokens \[3, 4.*'0 1 2.* 'xxx"):
        rollout_func(server.url)(["a"], trainer)
    assert not server.bodies


def test_what_is_no_llama_cpp_server_is_said(server, trainer):
    server.properties = {"hello": "world"}
    with pytest.raises(RolloutServerError, match=r"says nothing of slots and context .*is it a llama\.cpp server"):
        rollout_func(server.url)(["a"], trainer)


def test_slots_without_end_are_no_slots(server, trainer):
    server.properties = server.properties | {"total_slots": float("inf")}
    with pytest.raises(RolloutServerError, match=r"GET /props says nothing of slots and context"):
        rollout_func(server.url)(["a"], trainer)


def test_rows_that_do_not_fit_into_a_slot_are_refused(server, trainer):
    trainer.max_completion_length = 63
    rollout_func(server.url)(["a"], trainer)
    with pytest.raises(
        RolloutServerError, match="prompt of 2 tokens and max_completion_length=63 do not fit into the 64"
    ):
        rollout_func(server.url)(["a", "ab"], trainer)
    with pytest.raises(ValueError, match="prompt 1 of this batch has no tokens"):
        rollout_func(server.url)(["a", ""], trainer)


def test_rows_end_with_the_trainer_s_first_end_token(server, trainer, caplog):
    server.completion = lambda handler, body: reply(
        handler,
        good_answer(body)
        | {"tokens": [5, 17, 6, 7], "completion_probabilities": [{"id": id, "prob": 0.5} for id in (5, 17, 6, 7)]},
    )
    trainer.eos_token_ids = [17, 18]
    output = rollout_func(server.url)(["a"], trainer)
    assert output["completion_ids"] == [[5, 17]] and len(output["logprobs"][0]) == 2
    trainer.eos_token_ids = [1]
    sample = rollout_func(server.url)
    assert sample(["a"], trainer)["completion_ids"] == [[5, 17, 6, 7]]
    sample(["a"], trainer)
    assert [record.getMessage() for record in caplog.records if "no end for the trainer" in record.getMessage()] != []
    assert len(caplog.records) == 1
    del trainer.eos_token_ids  # TRL 1.12
    trainer.processing_class.eos_token_id, before = 5, trainer.processing_class.eos_token_id
    assert rollout_func(server.url)(["a"], trainer)["completion_ids"] == [[5]]
    trainer.processing_class.eos_token_id = before


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tools": [print]}, "do not know tools"),
        ({"args": SimpleNamespace(seed=3, generation_kwargs={"x": 1})}, "rollout_func.url, sampling="),
        ({"_tokenize_prompts": lambda prompts: ([[5]], [["image"]], {})}, "text only"),
    ],
)
def test_trainers_it_cannot_serve_are_refused(change, problem, server, trainer):
    vars(trainer).update(change)
    with pytest.raises(ValueError, match=problem):
        rollout_func(server.url)(["a"], trainer)
    assert not server.bodies


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"url": "localhost:8080"}, "give one like 'http://localhost:8080'"),
        ({"url": "ftp://x"}, "give one like"),
        ({"url": "http://me:secret@x"}, "give api_key instead"),
        ({"timeout": 0}, "seconds above 0"),
        ({"retries": -1}, "0 or more"),
        ({"max_in_flight": 0}, "1 or more"),
        ({"sampling": {"temperature": 1.0, "seed": 1}}, "sampling has seed, temperature"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, problem):
    with pytest.raises(ValueError, match=problem) as error:
        rollout_func(**{"url": "http://localhost:1", **arguments})
    assert "secret" not in str(error.value)


def test_the_key_is_sent_and_never_shown(server, trainer):
    seen = []

    def unauthorized(handler: Any, body: dict[str, Any]) -> None:
        seen.append(handler.headers["Authorization"])
        reply(handler, {"error": "Invalid API Key"}, 401)

    server.completion = unauthorized
    with pytest.raises(RolloutServerError, match="HTTP 401") as error:
        rollout_func(server.url, api_key="hidden")(["a"], trainer)
    assert seen == ["Bearer hidden"] and "hidden" not in str(error.value)


def test_a_path_in_front_of_the_server_s_is_kept(server, trainer):
    rollout_func(f"{server.url}/api/")(["a"], trainer)
    assert server.paths == ["/api/props", "/api/detokenize", "/api/completion"]
