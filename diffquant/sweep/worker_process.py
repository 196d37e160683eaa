"""Entry point of a worker process: reads its pickled worker from stdin, and ends when stdin closes.

It reads stdin before importing anything heavy, so that the parent can go on.
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
    """Run the worker; returns 0 when nothing is left to do, 1 for an error, and 130 if it was interrupted."""
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
    # Unbuffered: a thread waiting here would hold the buffer's lock when the process ends.
    pieces: list[bytes] = []
    while count:
        pieces.append(os.read(_STDIN, count))
        if not pieces[-1]:
            raise KeyboardInterrupt
        count -= len(pieces[-1])
    return b"".join(pieces)


def _end_with_parent() -> None:
    os.read(_STDIN, 1)
    # Processes in a shell's background ignore SIGINT, which this would send.
    _thread.interrupt_main(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
