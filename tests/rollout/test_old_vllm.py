"""A vLLM with which TRL's trainer cannot be imported is named, with the range and the pip line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
try:
    import fastgrpo.auto
except ImportError as error:
    print(error)
from fastgrpo.tools.cli import main
print("code", main(["doctor", "--json"]))
"""


def test_a_vllm_that_breaks_trl_is_named_by_auto_and_doctor(tmp_path: Path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.10.0'\n")
    (tmp_path / "vllm-0.10.0.dist-info").mkdir()
    (tmp_path / "vllm-0.10.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.10.0\n")
    ran = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    first, *doctor = ran.stdout.splitlines()
    assert first.startswith("vllm 0.10.0 is installed; trl ") and 'pip install "vllm>=' in first, ran.stdout
    assert doctor[-1] == "code 1" and "vllm 0.10.0 is installed; trl" in "".join(doctor), ran.stdout
    assert '"status": "wrong"' in "".join(doctor) and "Traceback" not in ran.stderr
