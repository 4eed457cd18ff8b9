"""One rank's error ends the run: it is printed once, by the rank that met it first, and the process leaves at once."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_rl.platform import device_type

PATIENCE_SECONDS = 8.0  # torchrun ends the other ranks within a second or two of the first exit
SAME_SECONDS = 3.0  # that local rank 0 has for saying first what all ranks have met
FOLLOWING = ("Connection closed by peer", "Connection reset by peer", "NCCL", "Socket Timeout", "Broken pipe")

_asked_to_stop: list[int] = []  # the SIGTERM that catch_sigterm met


def is_consequence(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or any(text in str(error) for text in FOLLOWING)


@contextmanager
def ending_together() -> Iterator[None]:
    """ValueError: one line and exit code 2. Anything else: the traceback and exit code 1. No rank waits for another.

    A rank that fails because another has gone, or that met the same bad input as local rank 0, keeps silent long
    enough for torchrun to end it, so that the first error is what the user reads.
    """
    try:
        yield
    except (ValueError, FloatingPointError, OSError) as error:
        _wait(error)
        if os.environ.get("MEGATRON_RL_TRACEBACK") == "1":
            traceback.print_exc()
        _leave(f"error: {error}", 2)
    except KeyboardInterrupt:
        _leave("interrupted", 130)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        _wait(error)
        _leave(f"rank {os.environ.get('RANK', '0')} failed:\n{traceback.format_exc()}", 1)


def catch_sigterm() -> Callable[[], bool]:
    """From now on SIGTERM asks for a stop, which the function returned tells of; a second one ends the process.

    torchrun sends it to the other ranks of one that failed, too, and ends by SIGKILL who still lives 30 seconds later.
    """

    def note(number: int, frame: object) -> None:
        if _asked_to_stop:
            os._exit(128 + number)
        _asked_to_stop.append(number)

    signal.signal(signal.SIGTERM, note)
    return lambda: bool(_asked_to_stop)


def _wait(error: BaseException) -> None:
    if is_consequence(error):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun's ends this rank now, or has come already
        if _asked_to_stop:
            os._exit(128 + _asked_to_stop[0])
        time.sleep(PATIENCE_SECONDS)
    elif os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(SAME_SECONDS)


def _leave(text: str, code: int) -> None:
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    if device_type() == "cuda" or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(code)  # a normal exit would wait for process groups whose peers do not answer
    sys.exit(code)
