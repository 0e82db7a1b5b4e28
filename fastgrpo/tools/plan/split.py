"""Which rows of a micro-batch are alive at once within `mini_batch` and `max_tokens_per_microbatch`.

`fastgrpo.trl.parts.Limits` decides it for rows as they come. Planned rows are all alike, so groups differ by their number
only, and it is enough to count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Part:
    """
    Rows that are alive at once.

    Attributes:
        sequences: rows.
        prompts: different ones among them.
    """

    sequences: int = 0
    prompts: int = 0


def largest_part(
    sequences: int, group: int, cost: Callable[[Part], int], most_sequences: int | None, most_tokens: int | None
) -> Part:
    """
    The part of a micro-batch that costs most, split as a patched trainer does it.

    Args:
        sequences: of the micro-batch.
        group: rows of one prompt, which stay together as far as they fit; 1 = rows share nothing.
        cost: tokens that the model computes for a part.
        most_sequences, most_tokens: limits of a part; None = none. A row that exceeds them is a part of its own.
    """

    def allowed(part: Part) -> bool:
        return (most_sequences is None or part.sequences <= most_sequences) and (
            most_tokens is None or cost(part) <= most_tokens
        )

    if allowed(whole := Part(sequences, -(-sequences // group))):
        return whole
    largest = Part()
    open_: list[Part] = []
    for begun in range(0, sequences, group):
        rows = min(group, sequences - begun)
        piece = rows if allowed(Part(rows, 1)) else 1
        ours: set[int] = set()
        for _ in range(rows // piece):
            candidates = [(part, Part(part.sequences + piece, part.prompts + (id(part) not in ours))) for part in open_]
            homes = [(part, after) for part, after in candidates if allowed(after)]
            if homes:
                part, after = min(homes, key=lambda home: cost(home[1]) - cost(home[0]))
                part.sequences, part.prompts = after.sequences, after.prompts
            else:
                part = Part(piece, 1)
                open_.append(part)
            ours.add(id(part))
            largest = max(largest, Part(part.sequences, part.prompts), key=lambda part: (cost(part), part.sequences))
        # What takes no row of another prompt is done; of parts alike one is enough for the few rows of the last prompt.
        alike = {(part.sequences, part.prompts): part for part in reversed(open_)}
        open_ = [part for part in reversed(alike.values()) if allowed(Part(part.sequences + 1, part.prompts + 1))]
    return largest
