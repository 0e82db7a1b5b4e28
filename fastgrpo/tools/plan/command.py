"""`fastgrpo plan`: arguments, table, exit status."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgrpo.tools.arguments import DONE, FAILED, USAGE, console, number, positive, print_json
from fastgrpo.tools.plan.settings import ALL_LINEAR, CHOICES, PlanSettings

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PretrainedConfig

    from fastgrpo.tools.plan.memory import MemoryPlan

_DESCRIPTION = (
    "Predicts the memory of a GRPO run on one device, term by term, before it starts. No weight is loaded or downloaded and no "
    "GPU is needed. Defaults are TRL's where TRL has one; GB are 10^9 bytes."
)
_EXIT_STATUS = """\
exit status:
  0    it fits, or no capacity is known
  1    it does not fit, or the picture cannot be drawn
  2    wrong usage, or no model that can be described
  130  interrupted with Ctrl-C

example:
  fastgrpo plan ./Qwen3-1.7B --capacity 16 --lora-rank 16 --dtype bfloat16 \\
      --prompt-length 256 --completion-length 512 --micro-batch 8 --picture plan.png
"""
_HELP = {
    "capacity_gb": "memory of a device in GB (default: that of the GPU here, else not judged)",
    "lora_rank": "rank of the adapter (default: full fine-tuning)",
    "lora_targets": "layers with an adapter: all-linear, names with commas, or a regular expression that matches whole names "
    "(default with --lora-rank: all-linear)",
    "quantization": "the base's linear layers in 4 bit (NF4) or 8 bit",
    "dtype": "of the weights; TRL loads a model that it is given by name in float32",
    "mixed_precision": "products in 16 bit, as with TRL's bf16=True or fp16=True; no: in --dtype",
    "optimizer": "adamw keeps its states in the dtype of what trains, adamw_fp32 in float32 beside a float32 copy",
    "beta": "weight of the KL term; above 0 a reference is needed",
    "reference": "auto: the disabled adapter with LoRA, else a second model",
    "num_generations": "completions of a prompt, G",
    "prompt_length": "tokens of the longest prompt",
    "completion_length": "tokens of the longest completion",
    "longest_row": "tokens of the longest prompt and completion together, where that is less than both lengths",
    "micro_batch": "sequences in a forward (per_device_train_batch_size)",
    "accumulation": "micro-batches of an optimizer step (gradient_accumulation_steps)",
    "steps_per_generation": "micro-batches generated together (default: --accumulation)",
    "mini_batch": "sequences alive at once in the update, Options(mini_batch_size)",
    "max_tokens_per_microbatch": "the same by tokens; a longer sequence runs on its own",
    "checkpointing": "gradient checkpointing",
    "offload_activations": "inputs of layers in host memory",
    "packing": "varlen: one row without padding, which auto prefers; left: without padding that all rows share; none: TRL's",
    "share_prefix": "a group's prompt computed once in the update, with varlen",
    "fused_layers": "layers as one function each in the update, which saves less",
    "head": "fastgrpo: logits in chunks; full: all at once",
    "fused_head": "the card is an H100 or H200, where fastgrpo's head keeps no float32 logits",
    "chunk_bytes": "bytes of a chunk of logits, or of what stands in for them (default: 512 MiB)",
    "num_chunks": "exactly so many chunks of logits",
    "logit_chunk_multiplier": "times as many chunks as --chunk-bytes asks for",
    "rollout": "in this process with transformers or vLLM (colocate), or a server on another device",
    "vllm_fraction": "vllm_gpu_memory_utilization",
    "vllm_sleep": "vllm_enable_sleep_mode: the engine makes room for the update",
    "world_size": "devices",
    "sharding": "what the devices share",
    "reserve_gb": "context, library workspaces and fragmentation, in GB",
}
_SHOWN = 0.05
"""GB: what is less rounds to nothing."""
_NAME = re.compile(r"[\w.]*")
_ANY_CAPACITY = 1.0
_OPTION = {"capacity_gb": "capacity", "num_generations": "generations", "reserve_gb": "reserve"}
"""Options that are not called as the field."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `plan` to the command line."""
    parser = commands.add_parser(
        "plan",
        help="predict the memory of a run before it starts, and whether it fits",
        description=textwrap.fill(_DESCRIPTION, 78),
        epilog=_EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a local folder with a config.json, or that file")
    parser.add_argument(
        "--numbers",
        metavar="NAME=N,...",
        help="instead of MODEL: hidden, layers, heads, intermediate, vocabulary [, kv_heads, head_dim, tied]",
    )
    for field in dataclasses.fields(PlanSettings):
        _add_setting(parser, field)
    parser.add_argument("--picture", type=Path, metavar="PATH", help="also draw a bar, as .png or .svg")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run, error=parser.error)


def _add_setting(parser: argparse.ArgumentParser, field: dataclasses.Field[Any]) -> None:
    name, text, kind = field.name, _HELP[field.name], str(field.type)
    options: dict[str, Any] = {"dest": name, "default": None, "help": text}
    if kind == "bool":
        options["action"] = argparse.BooleanOptionalAction
        options["help"] += f" (default: {'yes' if field.default else 'no'})"
    else:
        if name in CHOICES:
            options["choices"] = [choice for choice in CHOICES[name] if choice]
        else:
            options["type"] = positive if kind.startswith("int") else number if kind.startswith("float") else str
            options["metavar"] = "TARGETS" if name == "lora_targets" else "GB" if name.endswith("_gb") else "N"
        if field.default is not None:
            options["help"] += f" (default: {field.default})"
    parser.add_argument(_flag(name), **options)


def run(arguments: argparse.Namespace) -> int:
    """Runs `fastgrpo plan`."""
    if (arguments.model is None) == (arguments.numbers is None):
        arguments.error("give either MODEL or --numbers")
    if arguments.picture and arguments.picture.suffix.lower() not in (".png", ".svg"):
        arguments.error(f"argument --picture: {arguments.picture} ends neither in .png nor in .svg")
    try:
        given = _given(arguments)
        # What is wrong is said before torch is imported, which takes seconds.
        settings = PlanSettings(**{"capacity_gb": _ANY_CAPACITY, **given})
        with console(stderr=True).status("building the model without its weights"):
            from fastgrpo.tools.plan.estimate import estimate_memory

            if "capacity_gb" not in given:
                settings = dataclasses.replace(settings, capacity_gb=_capacity_here())
            plan = estimate_memory(_model(arguments), settings=settings)
            plan.alternatives  # noqa: B018 - planned here, where progress shows
    except (TypeError, ValueError) as error:
        print(f"fastgrpo plan: {as_options(str(error))}", file=sys.stderr)
        return USAGE
    if arguments.json:
        print_json(plan.to_dict())
    else:
        show(plan, console())
    if arguments.picture and not _drawn(plan, arguments.picture):
        return FAILED
    return FAILED if plan.fits is False else DONE


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(PlanSettings)}
    given = {name: value for name, value in given.items() if value is not None}
    names = [name.strip() for name in given.get("lora_targets", ALL_LINEAR).split(",")]
    if names != [ALL_LINEAR] and all(_NAME.fullmatch(name) for name in names):
        given["lora_targets"] = tuple(names)
    return given


def as_options(text: str) -> str:
    """A message of `PlanSettings` with its settings as the options they are on the command line."""
    names = "|".join(sorted((field.name for field in dataclasses.fields(PlanSettings)), key=len, reverse=True))

    def option(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        flag = _flag(name)
        if value is None:
            return flag if "_" in name or match.start() == 0 else name
        if value in ("True", "False"):
            return flag if value == "True" else flag.replace("--", "--no-", 1)
        return f"{flag} {value}"

    return re.sub(rf"(?<![\w./-])(?P<name>{names})\b(?:=(?P<value>'[^']*'|\([^)]*\)|\w+(?:\.\w+)?))?", option, text)


def _flag(name: str) -> str:
    return "--" + _OPTION.get(name, name).replace("_", "-")


def _model(arguments: argparse.Namespace) -> str | PretrainedConfig:
    from fastgrpo.tools.plan.config import config_from_numbers, parse_numbers

    if arguments.numbers is None:
        return arguments.model
    return config_from_numbers(**parse_numbers(arguments.numbers))


def _capacity_here() -> float | None:
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else None


def _drawn(plan: MemoryPlan, path: Path) -> bool:
    from fastgrpo.tools.plan.picture import draw_plan
    from fastgrpo.tools.plot import missing_matplotlib

    missing = missing_matplotlib()
    if missing:
        print(f"fastgrpo plan: no picture: {missing}", file=sys.stderr)
        return False
    try:
        draw_plan(plan, path)
    except OSError as error:
        print(f"fastgrpo plan: {path} cannot be written: {error.strerror}", file=sys.stderr)
        return False
    print(f"picture: {path}", file=sys.stderr)
    return True


def show(plan: MemoryPlan, to: Console) -> None:
    """Prints a plan as a table, with what would change it."""
    from rich.table import Table
    from rich.text import Text

    shape, settings = plan.shape, plan.settings
    title = f"{shape.name}: {shape.parameters / 1e9:.2f} B parameters"
    if not settings.full:
        title += f", adapter of rank {settings.lora_rank}: {shape.adapter_parameters / 1e6:.1f} M"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("GB on each device")
    table.add_column("", justify="right")
    table.add_column("made of", style="dim")
    for name, size in plan.terms.items():
        table.add_row(name, f"{size:.1f}", _parts(plan.details[name]))
    if plan.overlap >= _SHOWN:
        table.add_row(
            "not alive at once", f"{-plan.overlap:.1f}", "most activations are gone when the gradients are complete"
        )
    table.add_section()
    together = "the larger of engine and update counts" if settings.rollout == "vllm" and settings.vllm_sleep else ""
    table.add_row("total", f"{plan.total:.1f}", together, style="bold")
    if plan.free is not None:
        table.add_row(f"free of {plan.capacity:g}", f"{plan.free:.1f}", style="green" if plan.fits else "bold red")
    to.print(table)

    def say(text: str, style: str = "") -> None:
        to.print(Text(text, style=style), soft_wrap=True)

    say(
        f"alive at once at the most, without the reserve: {plan.peaks['update']:.1f} GB in the update, "
        f"{plan.peaks['rollout']:.1f} in the rollout"
    )
    for sentence in plan.comparisons:
        say(sentence)
    for note in plan.notes:
        say(f"note: {as_options(note)}", "yellow")
    if plan.fits is False:
        say("It does not fit.", "bold red")
    for number_, alternative in enumerate(plan.alternatives[:4]):
        lead = "frees most: " if number_ == 0 else "            "
        fits = " (then it fits)" if plan.fits is False and alternative.fits else ""
        say(f"{lead}{alternative.frees_gb:5.1f} GB  {alternative.setting}{fits}", "bold" if number_ == 0 else "")


def _parts(parts: dict[str, float]) -> str:
    shown = [(name, size) for name, size in parts.items() if size > 0]
    if len(shown) == 1:
        return shown[0][0]
    if any(name == "head" for name, _ in shown):
        kept, *rest = shown
        return f"{kept[0]} {kept[1]:.2f} + the larger of " + ", ".join(f"{name} {size:.2f}" for name, size in rest)
    return ", ".join(f"{name} {size:.2f}" for name, size in shown)
