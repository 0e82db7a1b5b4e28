"""The layer of the model: trainable parameters, tokenizer, context."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fastgrpo.tools.doctor.case import Case, Line
from fastgrpo.tools.evaluate import prompt_ids
from fastgrpo.tools.plan.shape import build, measure, read_config

_COMPLETION = 256
"""TRL's `max_completion_length`."""


def check_policy(case: Case) -> Iterator[Line]:
    """What trains, whether there is something to pad with, and whether prompts leave room for completions."""
    if case.model is None:
        yield Line("trained", "skipped", "no --model given")
        return
    try:
        name, config = read_config(case.model)
        shape = measure(name, build(config, "bfloat16", case.lora_rank, case.lora_targets))
    except ValueError as error:
        layer = "trained" if "lora_targets" in str(error) else "model"
        text = str(error).replace("lora_targets=", "target_modules=")
        remedy = "name layers that exist; `all-linear` takes all" if layer == "trained" else "give a local folder"
        yield Line(layer, "wrong", text, remedy)
        return
    trained = shape.adapter_parameters if case.lora_rank else shape.parameters
    how = f"LoRA of rank {case.lora_rank}" if case.lora_rank else "all of the model"
    yield Line("trained", "ok", f"{trained / 1e6:.3g} M of {shape.parameters / 1e6:.3g} M parameters ({how})")
    if shape.parameters < 1.5e9:
        yield Line(
            "trained",
            "hint",
            f"{shape.parameters / 1e9:.2g} B parameters; below 1.5 B, models seldom learn to reason at length "
            "(Unsloth's reinforcement learning guide)",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(case.model), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what a folder without a tokenizer raises is as varied as such folders
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        yield Line(
            "tokenizer", "wrong", f"{case.model} has no tokenizer that loads: {reason}", "save it beside the model"
        )
        return
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    yield from check_tokenizer(case, tokenizer, context)


def check_tokenizer(case: Case, tokenizer: PreTrainedTokenizerBase, context: int | None) -> Iterator[Line]:
    """Padding, and prompts against the context of the model."""
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        yield Line(
            "tokenizer",
            "wrong",
            "it has neither a pad token nor an end-of-sequence token, so rows cannot be padded",
            "set tokenizer.pad_token",
        )
        return
    if tokenizer.pad_token_id is None:
        text = f"there is no pad token; TRL pads with the end token {tokenizer.eos_token!r}"
        yield Line("tokenizer", "hint", text, "set tokenizer.pad_token where another token is meant")
    completion = int(case.settings.get("max_completion_length") or _COMPLETION)
    if not case.rows or context is None:
        yield Line("tokenizer", "ok", f"{len(tokenizer)} tokens; context {context or 'unknown'}")
        return
    lengths = [len(prompt_ids(tokenizer, row["prompt"])) for row in case.rows]
    longest = max(lengths)
    too_long = sum(length + completion > context for length in lengths)
    if too_long:
        yield Line(
            "tokenizer",
            "wrong",
            f"{too_long} of {len(lengths)} prompts are too long: the longest has {longest} tokens, with {completion} of "
            f"completion more than the model's context of {context}",
            "drop or shorten them; TRL does not",
        )
        return
    yield Line("tokenizer", "ok", f"longest prompt {longest} + completion {completion} of {context} tokens of context")


def check_settings(case: Case) -> Iterator[Line]:
    """Hints where settings are outside common advice."""
    settings = case.settings
    guide = "Unsloth's reinforcement learning guide"
    steps = settings.get("max_steps")
    if steps and 0 < int(steps) < 300:
        yield Line("settings", "hint", f"max_steps is {steps}; rewards often rise only after 300 ({guide})")
    if case.rows and len(case.rows) < 500:
        yield Line("settings", "hint", f"the dataset has {len(case.rows)} rows; 500 or more are advised ({guide})")
    delta, epsilon = settings.get("delta"), float(settings.get("epsilon") or 0.2)
    if delta is not None and float(delta) <= 1 + epsilon:
        yield Line(
            "settings",
            "hint",
            f"delta is {delta}, not above 1 + epsilon = {1 + epsilon:g}, so it cuts what epsilon leaves (INTELLECT-2 report)",
            "raise delta",
        )
