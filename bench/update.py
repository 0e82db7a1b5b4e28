"""`python -m bench update`: one optimizer step of a real `GRPOTrainer` without generation, stock and patched."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from torch import Tensor

import fastgrpo
from bench import report
from bench.measure import MIB, Timing, extra_peak_bytes, interleave
from bench.peers import Problem, peers
from bench.vision import INPUTS, RESERVED, Processor
from bench.workloads import ASKED_FOR, QUICK, QUICK_VISION, QUICK_VISION_IN_PARTS, SMOLLM2, WORKLOADS, Workload

STOCK, PATCHED = "TRL", "fastgrpo"
LORA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_COLUMNS = (
    "",
    "time / ours",
    "CPU time / ours",
    "memory / TRL's",
    "head's / TRL's",
    "extra MiB",
    "head's MiB",
    "|g - TRL's| / |g|",
    "|g - fp32's| / |g|",
    "median s (min-max)",
    "first s",
)


def run(
    device: torch.device,
    precision: str,
    train: list[str],
    old_pass: bool,
    rounds: int,
    quick: bool,
    only: list[str] | None = None,
    so_far: Callable[[dict], None] = lambda run: None,
) -> dict[str, Any]:
    """
    Measures the update with LoRA and in full, without and with gradient checkpointing, and prints the tables.

    Args:
        device: where to run.
        precision: `"float32"`, or `"bfloat16"` for autocast (TRL's own default).
        train: of `"lora"` (rank 16 on all linear layers) and `"full"`.
        old_pass: with the no-grad pass for old log-probs, as `num_iterations=2` needs it.
        rounds: see `interleave`.
        quick: a tiny model, to see that everything works.
        only: workloads whose name holds one of these; None = all but those of `ASKED_FOR`.
        so_far: given what there is of the run after each case.

    Returns:
        The run, see `report.record`.
    """
    report.quiet()
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    workloads = (QUICK,) if quick else WORKLOADS.get(device.type, (SMOLLM2,))
    if only:
        workloads += (QUICK_VISION, QUICK_VISION_IN_PARTS) if quick else ASKED_FOR
    if only is not None and not any(text in workload.name for workload in workloads for text in only):
        names = ", ".join(workload.name for workload in workloads)
        raise SystemExit(f"no workload's name holds {' or '.join(only)}; they are {names}")
    shapes: list[dict[str, Any]] = []
    settings = {"shapes": shapes, "precision": precision, "train": train, "old_pass": old_pass, "rounds": rounds}
    for workload in workloads:
        if only is not None and not any(text in workload.name for text in only):
            continue
        batch = synthetic_batch(workload, device)
        tokens = count_tokens(batch)
        shapes.append({"workload": asdict(workload), "tokens": tokens})
        report.say(
            f"{workload.name}, random weights, {precision}: {batch['prompt_ids'].shape[0]} sequences, padded to "
            f"{batch['prompt_ids'].shape[1]} + {batch['completion_ids'].shape[1]} tokens: {tokens['padded']} padded for "
            f"{tokens['real']} real ({tokens['padded'] / tokens['real']:.2f}x), {tokens['scored']} of them scored"
        )
        lines: list[dict[str, Any]] = []
        for kind, checkpointing in workload.cases:
            if kind not in train:
                continue
            name = f"{kind}, {'gradient' if checkpointing else 'no'} checkpointing"
            if old_pass:
                name += ", with old pass"
            stock, patched = _measure(workload, batch, device, precision, kind, checkpointing, old_pass, rounds)
            key = f"{workload.name}/{precision}/{name}"
            ratios[f"{key}/time: fastgrpo over TRL"] = 1 / stock["time_over_fastgrpo"]
            ratios[f"{key}/memory of the update: fastgrpo over TRL"] = patched["update_mib"] / stock["update_mib"]
            ratios[f"{key}/memory of the head: fastgrpo over TRL"] = patched["head_mib"] / stock["head_mib"]
            lines += [{"workload": workload.name, "case": name, **line} for line in (stock, patched)]
            rows += lines[-2:]
            so_far(report.record("update", device, settings, rows, ratios))
        title = f"One update: {'old pass, ' if old_pass else ''}loss forward and backward, {precision}"
        report.table(title, _COLUMNS, _cells(lines))
    return report.record("update", device, settings, rows, ratios)


def synthetic_batch(workload: Workload, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """
    A generation batch as `GRPOTrainer` builds it: prompts left-padded, completions right-padded, random ids.

    Args:
        workload: sizes.
        device: where it lives.
        seed: of the lengths, the ids and the advantages.

    Returns:
        What `GRPOTrainer._generate_and_score_completions` returns.
    """
    generator = torch.Generator().manual_seed(seed)
    count = workload.prompts * workload.completions
    low, high = workload.prompt_tokens
    prompt_lengths = torch.linspace(low, high, workload.prompts).long().repeat_interleave(workload.completions)
    lengths = torch.randn(count, generator=generator).mul(workload.completion_spread).exp() * workload.completion_median
    lengths = lengths.round().long().clamp(4, workload.completion_max)
    prompt_width, width = int(prompt_lengths.max()), int(lengths.max())
    prompt_mask = (torch.arange(prompt_width) >= prompt_width - prompt_lengths.unsqueeze(1)).long()
    completion_mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
    last = workload.vocabulary - (RESERVED if workload.vision else 0)
    ids = torch.randint(2, last, (count, prompt_width + width), generator=generator)
    prompt_ids = ids[:, :prompt_width].view(workload.prompts, workload.completions, -1)[:, :1]
    prompt_ids = prompt_ids.expand(-1, workload.completions, -1).reshape(count, prompt_width)
    if not workload.shared:
        prompt_ids = ids[:, :prompt_width]
    batch = {
        "prompt_ids": prompt_ids * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": ids[:, prompt_width:] * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.randn(count, generator=generator),
        "num_items_in_batch": completion_mask.sum(),
    }
    if workload.vision:
        batch |= workload.vision.show(batch, workload.vocabulary, workload.completions, generator)
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def count_tokens(batch: dict[str, Any]) -> dict[str, int]:
    """Padded, real and scored tokens of a batch."""
    scored = int(batch["completion_mask"].sum())
    return {
        "padded": batch["prompt_ids"].numel() + batch["completion_ids"].numel(),
        "real": int(batch["prompt_mask"].sum()) + scored,
        "scored": scored,
    }


def build_trainer(
    workload: Workload,
    batch: dict[str, Any],
    device: torch.device,
    precision: str,
    kind: str,
    checkpointing: bool,
    old_pass: bool,
    output_dir: str,
) -> trl.GRPOTrainer:
    """
    A trainer whose generation returns `batch`; everything behind it is TRL's.

    Args:
        workload, batch, device: what to train on, and where.
        precision, kind, old_pass: see `run`.
        checkpointing: gradient checkpointing.
        output_dir: a folder that TRL wants.

    Returns:
        The trainer, not patched.
    """
    torch.manual_seed(0)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>")),
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
    )
    # TRL loads a base that is not trained in 16 bits; the adapters, and the model's rotary frequencies, stay in float32.
    frozen_in_16 = precision == "bfloat16" and device.type == "cuda" and kind == "lora"
    with device:
        auto = transformers.AutoModelForImageTextToText if workload.vision else transformers.AutoModelForCausalLM
        model = auto.from_config(workload.config(), dtype=torch.bfloat16 if frozen_in_16 else torch.float32)
    count = batch["prompt_ids"].shape[0]
    accumulation = count // workload.micro_batch
    arguments = trl.GRPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=workload.micro_batch,
        gradient_accumulation_steps=accumulation,
        num_generations=workload.completions,
        num_iterations=2 if old_pass else 1,
        max_completion_length=workload.completion_max,
        gradient_checkpointing=checkpointing,
        bf16=precision == "bfloat16",
        use_cpu=device.type == "cpu",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["<eos>"] * workload.prompts}),
        processing_class=Processor(tokenizer=tokenizer) if workload.vision else tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=LORA_LAYERS) if kind == "lora" else None,
    )
    if checkpointing:
        trainer.model.gradient_checkpointing_enable(arguments.gradient_checkpointing_kwargs)
    if kind == "lora":
        _start_adapters(trainer.model)
    trainer.current_gradient_accumulation_steps = accumulation
    trainer._generate_and_score_completions = lambda _: _with_old_logprobs(trainer, batch) if old_pass else dict(batch)
    return trainer


def one_update(trainer: trl.GRPOTrainer) -> float:
    """
    The micro-batches of one optimizer step through `GRPOTrainer.training_step`; gradients stay in the parameters.

    Args:
        trainer: from `build_trainer`, patched or not.

    Returns:
        The loss.
    """
    trainer.model.zero_grad(set_to_none=True)
    trainer._step, trainer._buffered_inputs = 0, None
    trainer.state.global_step += 1  # as every optimizer step does
    torch.manual_seed(0)  # TRL shuffles the batch
    steps = range(trainer.current_gradient_accumulation_steps)
    return sum(float(trainer.training_step(trainer.model, {}, None)) for _ in steps)


def _with_old_logprobs(trainer: trl.GRPOTrainer, batch: dict[str, Any]) -> dict[str, Tensor]:
    # What TRL does there: in evaluation of gradients, in micro-batches, checkpointing off.
    from trl.trainer import grpo_trainer

    with (
        torch.no_grad(),
        grpo_trainer.disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs),
    ):
        old, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1),
            batch["completion_ids"].shape[1],
            batch_size=trainer.args.per_device_train_batch_size,
            **{name: batch[name] for name in INPUTS if name in batch},
        )
    return batch | {"old_per_token_logps": old}


def _start_adapters(model: torch.nn.Module) -> None:
    # LoRA starts with B = 0, where A has no gradient to compare.
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            value = torch.randn(parameter.shape, generator=generator) * 0.01
            parameter.data.copy_(value.to(parameter.device, parameter.dtype))


def _measure(
    workload: Workload,
    batch: dict[str, Any],
    device: torch.device,
    precision: str,
    kind: str,
    checkpointing: bool,
    old_pass: bool,
    rounds: int,
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        # Two trainers, built alike: patching one anew for every call would time the check at patch time too.
        trainers = {
            name: build_trainer(workload, batch, device, precision, kind, checkpointing, old_pass, folder)
            for name in (STOCK, PATCHED)
        }
        started = time.perf_counter()
        fastgrpo.patch(trainers[PATCHED], fastgrpo.Options(**dict(workload.options)))
        patch_seconds = time.perf_counter() - started
        runs: dict[str, Callable[[], float]] = {
            name: lambda trainer=trainer: one_update(trainer) for name, trainer in trainers.items()
        }
        lines: dict[str, dict[str, Any]] = {}
        gradients: dict[str, list[Tensor]] = {}
        # Patched first: in a fresh process its first update has nothing warmed up for it.
        for name, update in reversed(runs.items()):
            losses: list[float] = []
            seconds: list[float] = []

            def first(update=update, losses=losses, seconds=seconds) -> None:
                started = time.perf_counter()
                losses.append(update())  # a number, for which the device has been waited
                seconds.append(time.perf_counter() - started)

            # The call that counts memory is also the warm-up.
            update_bytes = extra_peak_bytes(first, device)
            gradients[name] = _gradients(trainers[name])
            lines[name] = {
                "path": name,
                "loss": losses[0],
                "update_mib": update_bytes / MIB,
                # On a CPU it ran under the profiler that counts memory.
                "first_seconds": seconds[0] if device.type == "cuda" else None,
            }
        lines[PATCHED]["patch_seconds"] = patch_seconds
        if workload.reference and checkpointing and precision != "float32":
            exact = build_trainer(workload, batch, device, "float32", kind, checkpointing, old_pass, folder)
            with torch.no_grad():
                for to, of in zip(exact.model.parameters(), trainers[STOCK].model.parameters(), strict=True):
                    to.copy_(of)
            one_update(exact)
            reference = _gradients(exact)
            del exact
            for name, found in gradients.items():
                lines[name]["grad_error"] = _distance(found, reference)
            del reference
        problem = _head_problem(trainers[PATCHED], batch, precision)
        task = "frozen" if kind == "lora" else "trained"
        for name, peer in zip((PATCHED, STOCK), peers(torch.float32), strict=False):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                lines[name]["head_mib"] = extra_peak_bytes(lambda peer=peer: peer.run(problem, task), device) / MIB
        difference = _distance(gradients[PATCHED], gradients[STOCK])
        gradients.clear()
        timings = interleave(runs, rounds, 0, device)
        for name, timing in timings.items():
            lines[name] |= {
                "seconds": timing.seconds,
                "cpu_seconds": timing.cpu_seconds,
                "time_over_fastgrpo": timing.over(timings[PATCHED]),
                "cpu_time_over_fastgrpo": timing.cpu_over(timings[PATCHED]),
                "grad_difference": difference,
            }
        fastgrpo.unpatch(trainers[PATCHED])
    return [lines[STOCK], lines[PATCHED]]


def _gradients(trainer: trl.GRPOTrainer) -> list[Tensor]:
    """Those an update has left, taken off the parameters."""
    found = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    trainer.model.zero_grad(set_to_none=True)
    return found


def _distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Relative to what is expected, of all gradients together."""
    difference = sum((a.double() - b.double()).square().sum() for a, b in zip(found, expected, strict=True))
    return float((difference / sum(b.double().square().sum() for b in expected)).sqrt())


def _head_problem(trainer: trl.GRPOTrainer, batch: dict[str, Any], precision: str) -> Problem:
    # The head's share of the first micro-batch: TRL's sees every position, fastgrpo's the scored ones.
    rows = trainer.args.per_device_train_batch_size
    weight = trainer.accelerator.unwrap_model(trainer.model).get_output_embeddings().weight.detach()
    mask = torch.cat([torch.zeros_like(batch["prompt_mask"]), batch["completion_mask"]], 1)[:rows, 1:]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)[:rows, 1:]
    hidden = torch.randn(*ids.shape, weight.shape[1], device=weight.device)
    targets = ids.masked_fill(mask == 0, -100)
    return Problem(hidden.to(getattr(torch, precision)), weight, targets, batch["advantages"][:rows])


def _cells(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    for stock, patched in zip(rows[::2], rows[1::2], strict=True):
        yield [patched["case"], *[""] * (len(_COLUMNS) - 1)]
        for line in (stock, patched):
            cpu_ratio = line["cpu_time_over_fastgrpo"]
            yield [
                f"  {line['path']}",
                f"{line['time_over_fastgrpo']:.2f}",
                "" if cpu_ratio is None else f"{cpu_ratio:.2f}",
                f"{line['update_mib'] / stock['update_mib']:.2f}",
                f"{line['head_mib'] / stock['head_mib']:.2f}",
                f"{line['update_mib']:.0f}",
                f"{line['head_mib']:.0f}",
                "" if line is stock else f"{line['grad_difference']:.1e}",
                f"{line['grad_error']:.1e}" if "grad_error" in line else "",
                str(Timing(line["seconds"])),
                "" if line["first_seconds"] is None else f"{line['first_seconds']:.2f}",
            ]
        yield []
