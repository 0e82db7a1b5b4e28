"""Claims about the pages under docs/: complete where they say "every", and their links lead somewhere."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import fastgrpo

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))

pytestmark = pytest.mark.skipif(not PAGES, reason="the pages are not part of an installed package")


def test_the_page_of_options_lists_every_option_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", (ROOT / "docs/options.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == [field.name for field in dataclasses.fields(fastgrpo.Options)]
    for (name, type_and_default), field in zip(rows, dataclasses.fields(fastgrpo.Options), strict=True):
        default = f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
        assert type_and_default.rpartition(", ")[2] == default, name


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_page_of_kernels_has_a_row_for_each():
    folder = ROOT / "csrc"
    source = "\n".join(path.read_text() for path in sorted((folder / "cuda").glob("*.cu")))
    launched = re.findall(r"__global__ void (?:__\w+__\((?:[^()]|\([^()]*\))*\)\s*)*(\w+)\(", source)
    assert len(launched) == source.count("__global__")
    _, _, table = (folder / "README.md").read_text().partition("| kernel |")
    rows = re.findall(r"^\| (`.*?) \|", table.partition("\n\n")[0], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(launched)
