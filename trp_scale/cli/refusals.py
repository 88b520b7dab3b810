"""How a refusal is shown, and which status it gives, whichever command it ends."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable

from trp_scale.config.flags import is_rank_zero_env
from trp_scale.distributed.launchers import FIRST_WORD_SECONDS
from trp_scale.errors import exit_status_and_message
from trp_scale.exit_status import ExitStatus


def run(command: Callable[[], int]) -> int:
    """Run a command and show a refusal as one message without a traceback; of several ranks, rank 0 speaks."""
    try:
        return command()
    except SystemExit as error:  # a wrong flag, which the parser has told on rank 0
        if isinstance(error.__context__, BrokenPipeError):  # as below, by rich
            return ExitStatus.DONE
        if error.code:
            _let_rank_0_speak_first()
        raise
    except BrokenPipeError:  # `trp-scale recipes NAME | head`: nobody reads the rest
        if _is_read():
            raise
        return ExitStatus.DONE
    except BaseException as error:
        status, line = exit_status_and_message(error)
        if not line:
            raise
        _let_rank_0_speak_first()
        print(f"error: {line}", file=sys.stderr, flush=True)
        return status


def _is_read() -> bool:
    """Whether somebody still reads what this process prints."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # that a pipe has no reader is always told
    return not output.poll(0)


def _let_rank_0_speak_first() -> None:
    """All ranks read the same command; when rank 0 stops for it too, the launcher ends this one while it waits."""
    if not is_rank_zero_env():
        time.sleep(FIRST_WORD_SECONDS)
