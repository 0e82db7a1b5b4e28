"""A model of how the blocks of row_cluster.cu exchange partials: every order in which blocks, stores and barriers can move.

A block's life with a row: load it, arm its barrier of this exchange and send its partial to all (or the other way round), wait,
read, write over the row. Stores arrive in any order and any time later. Barriers are PTX's: one arrival and a number of bytes
end a phase.
"""

from __future__ import annotations

import pytest

BYTES = 16
LOAD, SEND, WAIT, READ, WRITE, EXIT, GONE = range(7)


class Fault(AssertionError):
    """What may never happen."""


class Exchange:
    """`buffers` barriers and places a block; `waits=False`: nobody waits for the last row."""

    def __init__(self, blocks: int, skipped: tuple[bool, ...], buffers: int = 2, waits: bool = True) -> None:
        self.blocks, self.skipped, self.buffers, self.waits = blocks, skipped, buffers, waits

    def start(self):
        block = (0, 0, LOAD, frozenset())  # row, exchange, stage, what is left to do of SEND
        barriers = ((0, 1, 0),) * self.buffers  # phase, pending arrivals, bytes that are due
        return self.at_row(((block,) * self.blocks), ((barriers,) * self.blocks), frozenset())

    def at_row(self, blocks, barriers, flying):
        """Blocks at an ignored row go on at once: nothing is exchanged there."""
        moved = []
        for row, exchange, stage, left in blocks:
            while stage == LOAD and row < len(self.skipped) and self.skipped[row]:
                row += 1
            moved.append((row, exchange, EXIT if stage == LOAD and row == len(self.skipped) else stage, left))
        return tuple(moved), barriers, flying

    def next_states(self, state):
        blocks, barriers, flying = state
        for me, (row, exchange, stage, left) in enumerate(blocks):
            buffer, now = exchange % self.buffers, barriers
            if stage == GONE:
                continue
            if stage == LOAD:
                steps = [((row, exchange, SEND, frozenset(("arm", "send"))), now, flying)]
            elif stage == SEND:
                steps = []
                for action in left:
                    rest = left - {action}
                    after = (row, exchange, SEND if rest else WAIT, rest)
                    if action == "arm":
                        steps.append((after, self.count(barriers, me, buffer, 1, BYTES * self.blocks), flying))
                    else:
                        steps.append((after, now, flying | {(exchange, me, other) for other in range(self.blocks)}))
            elif stage == WAIT:
                last = not any(not skipped for skipped in self.skipped[row + 1 :])
                # As try_wait.parity: done where the current phase has another parity.
                done = barriers[me][buffer][0] % 2 != exchange // self.buffers % 2
                steps = [((row, exchange, READ, left), now, flying)] if done or (last and not self.waits) else []
            elif stage == READ:
                steps = [((row, exchange, WRITE, left), now, flying)]
            elif stage == WRITE:
                for other, (other_row, _, other_stage, _) in enumerate(blocks):
                    if other_row == row and other_stage == LOAD:
                        raise Fault(f"block {me} writes over row {row}, which block {other} has yet to load")
                steps = [((row + 1, exchange + 1, LOAD, left), now, flying)]
            else:
                steps = [((row, exchange, GONE, left), now, flying)]
            for block, counted, sent in steps:
                yield self.at_row((*blocks[:me], block, *blocks[me + 1 :]), counted, sent)
        for store in flying:
            exchange, sender, receiver = store
            _, own, stage, _ = blocks[receiver]
            if stage == GONE:
                raise Fault(f"block {sender} stores into block {receiver}, which is gone")
            read = own + (stage == WRITE)
            if read <= exchange - self.buffers:
                raise Fault(f"block {receiver} has not read what {sender} writes over")
            buffer = exchange % self.buffers
            if barriers[receiver][buffer][0] != exchange // self.buffers:
                raise Fault("bytes are counted in another phase than the one that waits for them")
            yield blocks, self.count(barriers, receiver, buffer, 0, -BYTES), flying - {store}

    def count(self, barriers, block: int, buffer: int, arrivals: int, due: int):
        phase, pending, expected = barriers[block][buffer]
        pending, expected = pending - arrivals, expected + due
        if pending < 0:
            raise Fault("a barrier is armed twice in a phase")
        if pending == 0 and expected == 0:
            phase, pending = phase + 1, 1
        row = (*barriers[block][:buffer], (phase, pending, expected), *barriers[block][buffer + 1 :])
        return (*barriers[:block], row, *barriers[block + 1 :])

    def explore(self) -> int:
        """Visits every state; how many there are."""
        first = self.start()
        seen, waiting = {first}, [first]
        while waiting:
            state = waiting.pop()
            following = list(self.next_states(state))
            if not following and not (all(block[2] == GONE for block in state[0]) and not state[2]):
                raise Fault("blocks wait for each other for ever")
            for after in following:
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return len(seen)


ROWS = {
    "all": (False,) * 4,
    "ignored between": (False, True, False, False),
    "ignored last": (False, False, False, True),
}


@pytest.mark.parametrize("rows", ROWS)
def test_two_blocks_agree_in_every_order_and_none_leaves_too_early(rows):
    assert Exchange(2, ROWS[rows]).explore() > 100


def test_three_blocks_agree_in_every_order():
    assert Exchange(3, (False,) * 2).explore() > 1000


@pytest.mark.parametrize(
    ("fault", "changes"),
    [("has not read|another phase|armed twice", {"buffers": 1}), ("which is gone|has yet to load", {"waits": False})],
)
def test_one_buffer_or_an_early_exit_would_be_found(fault, changes):
    with pytest.raises(Fault, match=fault):
        Exchange(2, ROWS["all"], **changes).explore()
