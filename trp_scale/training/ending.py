"""RUN_DIR/stop.json: why a run ended, in words for a person and in fields for a batch script.

{"why": "SIGTERM (rank 0)", "status": 0, "step": 120, "again": true, "advice": "...", "rank": 0, "at": "..."}

`again` is true where the same command should simply be started once more: the run was asked to stop by a scheduler, or
it broke and had come further than at its start, so that a fault that comes back does not start it for ever. A network
that is down for a run which has a checkpoint is waited for, however many starts that takes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trp_scale.checkpoint.run_directory import checkpoints
from trp_scale.config.json_files import read_object
from trp_scale.distributed.lease import write_exclusively
from trp_scale.distributed.stop import OF_A_PERSON
from trp_scale.errors import RefusedError, exit_status_and_message
from trp_scale.exit_status import ExitStatus
from trp_scale.storage.transfer import RemoteError
from trp_scale.training.incidents import Incidents
from trp_scale.training.records import FINISHED, nothing_left

STOP_RECORD = "stop.json"


@dataclass(kw_only=True)
class Ending:
    """Record of the end of one start.

    Attributes:
        run_dir: of the run.
        rank: this process's.
        began_with: step of the newest checkpoint when the run was started, -1 without one.
        finished_before: rank 0's record of a start that made all steps, which a refused command does not change.
    """

    run_dir: Path
    rank: int
    began_with: int = -1
    finished_before: bytes = b""

    def begin(self, attempt: int = 0) -> None:
        """Take away the record of the start before, on rank 0, once the other ranks wait.

        Args:
            attempt: ranks that start again in their places: so often. Why they do is noted in incidents.jsonl.
        """
        self.began_with = _newest(self.run_dir)
        if self.rank != 0:
            return
        record = self.run_dir / STOP_RECORD
        if attempt:
            why = "its rank was killed"
            with contextlib.suppress(RefusedError):
                why = str(read_object(record).get("why"))
            Incidents(self.run_dir).add("restart", self.began_with, attempt=attempt, why=why)
        if record.is_file():
            with contextlib.suppress(RefusedError):
                if read_object(record).get("why") == FINISHED:
                    self.finished_before = record.read_bytes()
        record.unlink(missing_ok=True)

    def note_stop(self, why: str, step: int, status: ExitStatus) -> None:
        """All ranks ended the run together."""
        if self.rank != 0:
            return
        finished = status is ExitStatus.DONE and nothing_left(why)
        asked = status is ExitStatus.DONE and not finished
        again = (asked and not why.startswith(OF_A_PERSON)) or (status is ExitStatus.STORAGE and self._got_on())
        advice = "all steps are done" if why == FINISHED else "nothing is left to do" if finished else status.advice
        self._write(why=why, step=step, status=status, again=again, advice=advice)

    def broke(self, error: BaseException, step: int | None = None) -> None:
        """An error ends this rank, and with it the run. The first rank's record stays."""
        status, _ = exit_status_and_message(error)
        if status is ExitStatus.REFUSED and self.finished_before and not self._got_on():
            with contextlib.suppress(OSError):
                (self.run_dir / STOP_RECORD).write_bytes(self.finished_before)
            return
        why = "".join(traceback.format_exception_only(error)).strip()
        self._write(
            why=why,
            step=step,
            status=status,
            again=status is not ExitStatus.REFUSED
            and (self._got_on() or (isinstance(error, RemoteError) and self.began_with >= 0)),
            advice=status.advice,
        )

    def hung(self, step: int, why: str) -> None:
        """The watchdog ends the run."""
        self._write(why=why, step=step, status=ExitStatus.HUNG, again=self._got_on(), advice=ExitStatus.HUNG.advice)

    def _got_on(self) -> bool:
        return _newest(self.run_dir) > self.began_with

    def _write(self, **fields: Any) -> None:
        """Write the record, unless another rank has."""
        origin = {"rank": self.rank, "host": socket.gethostname()}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        document = {**fields, "why": str(fields["why"])[:2000], **origin, "at": now}
        with contextlib.suppress(OSError):  # a full disk must not hide the error that is under way
            write_exclusively(self.run_dir / STOP_RECORD, json.dumps(document, indent=1) + "\n")


def _newest(run_dir: Path) -> int:
    return max((step for step, _ in checkpoints(run_dir)), default=-1)
