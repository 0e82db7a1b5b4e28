"""Layers that need no model: device, versions, kernels, rollout path."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch
from packaging.version import Version

from fastgrpo.kernels.backends import backends
from fastgrpo.kernels.driver import why_driver_is_too_old
from fastgrpo.kernels.library import library_info
from fastgrpo.rollout.vllm import version_obstacle
from fastgrpo.tools.doctor.case import Case, Line
from fastgrpo.tools.wording import reason
from fastgrpo.trl.compat import UnsupportedError, check_installation
from fastgrpo.versions import installed_version

_TORCH_AT_LEAST = "2.10"
_DRIVERS = {"NVIDIA": Path("/proc/driver/nvidia/version"), "AMD": Path("/dev/kfd")}
_SERVER_SECONDS = 5.0
_YES = ("true", "yes", "t", "y", "1")
"""How a configuration that no parser has read yet may say so."""


def check_device(case: Case) -> Iterator[Line]:
    """The device torch sees, against the one that is there, and its dtype."""
    present = [maker for maker, driver in _DRIVERS.items() if driver.exists()]
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        dtype = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
        yield Line("device", "ok", f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, {dtype}")
        return
    if present:
        built = torch.version.cuda or torch.version.hip
        why = f"built for {built}, finds no device" if built else "built without GPU support"
        remedy = (
            "check the driver's version and CUDA_VISIBLE_DEVICES"
            if built
            else f"install a build of torch for {present[0]} GPUs: see the selector on pytorch.org"
        )
        yield Line(
            "device",
            "wrong",
            f"there is a driver for {present[0]} GPUs, but torch {torch.__version__} is {why}",
            remedy,
        )
        return
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    name = (
        accelerator.type
        if accelerator
        else f"cpu, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    )
    yield Line("device", "ok", f"{name}, float32")


def check_versions(case: Case) -> Iterator[Line]:
    """Installed versions against supported ranges, vLLM's where it is to be used."""
    packages = ("torch", "trl", "transformers", "peft", "vllm")
    found = {name: installed_version(name) for name in packages}
    if Version(Version(torch.__version__).base_version) < Version(_TORCH_AT_LEAST):
        text = f"torch {torch.__version__} is older than {_TORCH_AT_LEAST}"
        yield Line("versions", "wrong", text, f'pip install "torch>={_TORCH_AT_LEAST}"')
        return
    try:
        check_installation()
    except UnsupportedError as error:
        yield Line("versions", "wrong", str(error), "install a version in that range")
        return
    wrong = version_obstacle() if str(case.settings.get("use_vllm")).lower() in _YES else ""
    if wrong:
        yield Line("versions", "wrong", wrong, "install that, or use_vllm=False")
        return
    yield Line("versions", "ok", ", ".join(f"{name} {number}" for name, number in found.items() if number))


def check_kernels(case: Case) -> Iterator[Line]:
    """The compiled library, and what serves each op."""
    try:
        info = library_info()
    except OSError as error:
        yield Line("kernels", "wrong", str(error), "unset the variable, or build the library: pip install .")
        return
    table = backends()
    text = ", ".join(sorted({backend.implementation for name, backend in table.items() if name != "library"}))
    old = why_driver_is_too_old(info.compiler)
    library = f"library {info.version} for {', '.join(info.targets)}"
    if old and torch.cuda.is_available():
        yield Line("kernels", "hint", f"{text}; {library}; {old}", "results are the same, slower; update the driver")
    elif info.path is not None:
        yield Line("kernels", "ok", "; ".join(filter(None, (text, library, table["library"].reason))))
    elif torch.cuda.is_available():
        yield Line(
            "kernels",
            "hint",
            f"{text}; no compiled library: {info.reason}",
            "results are the same, slower; install a wheel with kernels, or build with nvcc or hipcc on PATH",
        )
    else:
        yield Line("kernels", "ok", f"{text}; {info.reason}")


def check_rollouts(case: Case) -> Iterator[Line]:
    """Who generates, and whether a server answers."""
    settings = case.settings
    server = case.server
    if server is None and settings.get("use_vllm") and settings.get("vllm_mode") == "server":
        host = settings.get("vllm_server_host", "0.0.0.0")
        server = settings.get("vllm_server_base_url") or f"http://{host}:{settings.get('vllm_server_port', 8000)}"
    if server is None:
        path = "vLLM, colocate" if settings.get("use_vllm") else "transformers generate, in this process"
        yield Line("rollouts", "ok", path)
        return
    problem = _server_problem(server)
    if problem:
        yield Line("rollouts", "wrong", f"the rollout server {server} {problem}", "start it, or correct its address")
    else:
        yield Line("rollouts", "ok", f"server {server} answers")


def _server_problem(server: str) -> str:
    url = server.rstrip("/") + "/health"
    if not url.startswith(("http://", "https://")):
        return "is no http:// or https:// address"
    try:
        with urllib.request.urlopen(url, timeout=_SERVER_SECONDS) as answer:
            return "" if answer.status == 200 else f"answers {answer.status} to /health"
    except urllib.error.HTTPError as error:
        return f"answers {error.code} to /health"
    except (ValueError, http.client.InvalidURL) as error:
        return f"is no address: {reason(error)}"
    except (OSError, http.client.HTTPException) as error:
        return f"is down: {getattr(error, 'reason', error)}"
