"""What wires fastgrpo into TRL's `GRPOTrainer`."""

import fastgrpo.trl.beside_vllm  # noqa: F401 (before all else that imports TRL's trainer)
from fastgrpo.trl.compat import UnsupportedError
from fastgrpo.trl.config import Options
from fastgrpo.trl.patch import Patch, patch, unpatch

__all__ = ["Options", "Patch", "UnsupportedError", "patch", "unpatch"]
