"""Why a run ended early, and what was lost: the learner's error, the launcher's note in the run's folder, and what
the operator is told.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from streamrl.errors import DataError, PartError, UserError
from streamrl.files import write_durably
from streamrl.ops.audit.commit import read_commit
from streamrl.ops.launch.parts import RunFolder
from streamrl.ops.monitor.view import View
from streamrl.terminal import plural


def learner_error(folder: RunFolder) -> UserError | PartError | None:
    """Return the error that the learner has left, if any."""
    with suppress(OSError, ValueError):  # no error file, or a full disk truncated it
        failure = json.loads(folder.learner_error.read_text())
        return (UserError if failure["exit_code"] == UserError.exit_code else PartError)(failure["error"])
    return None


def note_why(folder: RunFolder, view: View | None, error: UserError | PartError) -> None:
    """Leave the reason for those who look at the run later; a full disk hides nothing else."""
    if view is not None:
        with suppress(OSError):
            note = {"error": in_one_line(error), "term": view.run.term}
            write_durably(folder.launcher_error, json.dumps(note).encode())


def in_one_line(error: Exception) -> str:
    """What happened, and a part's last words."""
    first, *more = str(error).splitlines()
    return " ".join([first, *(line.strip() for line in more[-1:])])


def describe_lost_work(folder: Path, view: View | None) -> str:
    """Describe what is lost after everything was ended at once."""
    try:
        saved = read_commit(folder).step
    except DataError:  # the run is not recorded yet
        return "ended at once, before the run had started"
    except OSError as error:
        return (
            f"ended at once, without a checkpoint: the run is back at its last one, which cannot be read now: {error}"
        )
    num_lost = view.run.step - saved if view is not None else 0
    repeated = f"{plural(num_lost, 'step')} after it, the current step" if num_lost > 0 else "the current step"
    return (
        f"ended at once, without a checkpoint: the run is back at step {saved}; {repeated} and the "
        "workers' unfinished samples will be repeated"
    )
