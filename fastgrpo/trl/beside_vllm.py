"""The first import of TRL's trainer: where an installed vLLM that TRL does not support breaks it, the error says so."""

from fastgrpo.rollout.vllm import VLLMVersionError, version_obstacle, vllm_version

try:
    from trl import GRPOTrainer  # noqa: F401
except (ImportError, RuntimeError, AttributeError) as error:
    if vllm_version() is None or not version_obstacle():
        raise
    raise VLLMVersionError(
        f"{version_obstacle()} (or pip uninstall vllm: TRL imports any vLLM with its trainer, used or not, and fails with "
        "this one)"
    ) from error
