"""What runs are called: as short as tells them apart, in characters that can be shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fastgrpo.runlog import RunRecord


def names_of(records: Sequence[RunRecord]) -> list[str]:
    """
    A name for every run, each once: its folder, with as many folders above as it takes; with its file's name where that is an
    own one or the folder has several logs, and with a number where the file has several runs.

    Args:
        records: the runs.
    """
    paths = [record.path.resolve() for record in records]
    in_folder = {
        folder: {path for path in paths if path.parent == folder} for folder in {path.parent for path in paths}
    }
    parts, least = [], []
    for path in paths:
        alone = path.name == "log.jsonl" and len(in_folder[path.parent]) == 1
        parts.append(path.parent.parts if alone else (*path.parent.parts, path.stem))
        least.append(1 if alone else 2)
    names = ["/".join(own[-depth:]) for own, depth in zip(parts, _depths(parts, least), strict=True)]
    runs = Counter(paths)
    seen: Counter[object] = Counter()
    for index, path in enumerate(paths):
        seen[path] += 1
        if runs[path] > 1:
            names[index] += f", run {seen[path]}"
    return [plain(name) for name in names]


def plain(text: str, longest: int = 200) -> str:
    """The text on one line, with a sign in place of what cannot be shown, and its end where it is longer than anybody reads."""
    text = " ".join(text[: 4 * longest].split())
    text = text if len(text) <= longest else f"{text[:longest]}..."
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text)


def _depths(parts: Sequence[tuple[str, ...]], least: Sequence[int]) -> list[int]:
    """How many of its last parts each path needs to be none of the others."""
    depths = list(least)
    for index, own in enumerate(parts):
        others = {other for other in parts if other != own}
        while depths[index] < len(own) and any(own[-depths[index] :] == other[-depths[index] :] for other in others):
            depths[index] += 1
    return depths
