from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import fastgrpo.kernels.library as library


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test looks for the library anew."""
    monkeypatch.delenv(library.LIBRARY_VARIABLE, raising=False)
    library._load.cache_clear()
    yield
    library._load.cache_clear()


def shared_library(folder: Path, source: str) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to make a library with")
    (folder / "made.c").write_text(source + "\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "made.so", folder / "made.c"], check=True)
    return folder / "made.so"


def test_pure_installation_says_why_there_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "_PACKAGED", tmp_path / "absent.so")
    info = library.library_info()
    assert info.path is None
    assert info.reason == "pure-Python wheel: built without a CUDA or HIP compiler"
    assert info.targets == ()
    assert library.load_library() is None


def test_packaged_file_that_does_not_load_is_a_reason_and_no_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    monkeypatch.setattr(library, "_PACKAGED", broken)
    info = library.library_info()
    assert info.path is None
    assert str(broken) in info.reason
    assert "does not load" in info.reason


def test_named_file_that_does_not_exist_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.so")
    monkeypatch.setenv("FASTGRPO_LIBRARY", missing)
    with pytest.raises(FileNotFoundError, match=r"FASTGRPO_LIBRARY is .*missing\.so.*no such file.*unset"):
        library.library_info()


def test_named_file_that_is_no_library_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("no library")
    monkeypatch.setenv("FASTGRPO_LIBRARY", str(text))
    with pytest.raises(OSError, match=r"text\.so does not load.*(too short|invalid ELF)"):
        library.library_info()


def test_named_library_of_another_project_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTGRPO_LIBRARY", str(shared_library(tmp_path, "int other(void) { return 0; }")))
    with pytest.raises(OSError, match="not a fastgrpo library"):
        library.library_info()


def test_named_library_wins_and_tells_what_it_was_built_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = shared_library(
        tmp_path,
        "const char* fastgrpo_build_info(void) {\n"
        r'  return "{\"version\": \"1.2.3\", \"compiler\": \"nvcc 13.0\", \"targets\": \"sm_80 compute_80\"}";'
        "\n}",
    )
    monkeypatch.setenv("FASTGRPO_LIBRARY", str(built))
    info = library.library_info()
    assert info == library.LibraryInfo(built, "1.2.3", "nvcc 13.0", ("sm_80", "compute_80"), "")
    assert library.load_library() is library.load_library()


def test_library_of_this_installation_loads_where_there_is_one() -> None:
    info = library.library_info()
    if info.path is None:
        pytest.skip(info.reason)
    assert info.version
    assert {"sm_75", "sm_80", "compute_80", "sm_90a", "sm_100a", "sm_120"} <= set(info.targets) or all(
        target.startswith("gfx") for target in info.targets
    )


def test_module_looks_at_nothing_when_imported() -> None:
    script = (
        "import importlib.util, os, sys; os.environ['FASTGRPO_LIBRARY'] = '/nowhere'\n"
        f"spec = importlib.util.spec_from_file_location('library', {library.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['library'] = module\n"
        "spec.loader.exec_module(module)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_device_without_memory_to_tell_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, device = [-1, 1], torch.device("cuda", 3)

    class Library:
        def fastgrpo_made_up_serves(self, columns: int, index: int) -> int:
            assert (columns, index) == (7, 3)
            return answers.pop(0)

    monkeypatch.setattr(library, "_answers", {})
    monkeypatch.setattr(library, "load_library", Library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    found = [library.answer_of_device(device, "fastgrpo_made_up_serves", 7) for _ in range(3)]
    assert found == [False, True, True] and not answers


def test_without_a_card_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not library.answer_of_device(torch.device("cuda"), "fastgrpo_fused_head_serves")
