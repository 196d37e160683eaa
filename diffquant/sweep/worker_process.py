"""A process that is started as a worker: it reads which from stdin, and ends when that is closed.

Nothing heavy is imported before that is read, so that who sends it can go on.
"""

import _thread
import os
import pickle
import signal
import sys
from threading import Thread

from diffquant.errors import DiffQuantError
from diffquant.support import interruption
from diffquant.support.escaping import visible

_STDIN = 0


def main() -> int:
    """Work; returns 0 when nothing is left to do, 1 for an error, and 130 when it was ended."""
    interruption.watch()
    try:
        content = _read(int.from_bytes(_read(8)))
        Thread(target=_end_with_parent, daemon=True).start()
        pickle.loads(content).run()
    except KeyboardInterrupt:
        return 130
    except (DiffQuantError, OSError) as error:
        sys.stderr.write(visible(f"error: {error}\n"))
        return 1
    return 0


def _read(count: int) -> bytes:
    # Without Python's buffer, whose lock a thread that waits here would hold when the process ends.
    pieces: list[bytes] = []
    while count:
        pieces.append(os.read(_STDIN, count))
        if not pieces[-1]:
            raise KeyboardInterrupt
        count -= len(pieces[-1])
    return b"".join(pieces)


def _end_with_parent() -> None:
    os.read(_STDIN, 1)
    # What was started in a shell's background ignores SIGINT, which is what this would send.
    _thread.interrupt_main(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
