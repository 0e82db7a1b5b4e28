"""The `fastgrpo` command. It imports hardly anything before it knows what to do at Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Sequence

from fastgrpo.tools.process import (
    DONE,
    FAILED,
    INTERRUPTED,
    UNREAD,
    drop_output,
    finish_output,
    interrupted_at_once_in_imports,
    say_interrupted,
    stdout_for_json,
)

_FULL = (errno.ENOSPC, errno.EDQUOT)


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs the command line.

    Args:
        argv: arguments without the program's name; None = those of the process.

    Returns:
        exit status: 0 done, 1 failed or bad environment, 2 wrong usage, 130 interrupted, 141 nobody reads the output any more.
    """
    try:
        status = _run(argv)
        finish_output()
        return status
    except BrokenPipeError:
        drop_output()
        return UNREAD
    except OSError as error:
        if error.errno not in _FULL:
            raise
        drop_output()
        with contextlib.suppress(OSError):
            print(f"fastgrpo: the output cannot be written: {error.strerror}.", file=sys.stderr)
        return FAILED


def _run(argv: Sequence[str] | None) -> int:
    try:
        with interrupted_at_once_in_imports():
            from fastgrpo.tools.commands import parser

            arguments, unknown = parser().parse_known_args(argv)
            if unknown:
                arguments.error(f"unrecognized arguments: {' '.join(unknown)}")
            with stdout_for_json(getattr(arguments, "json", False)):
                return int(arguments.run(arguments))
    except SystemExit as leaving:  # argparse has printed help, version or what is wrong
        return int(leaving.code or DONE)
    except KeyboardInterrupt:
        say_interrupted()
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
