"""What a run must survive, by number, and the test modules that show it: those whose docstring starts with the numbers.

    \"\"\"T1, T3: ranks are killed ...\"\"\"      belongs to T1 and to T3

A scenario that no module names is not built, and the table says so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

SCENARIOS: Mapping[str, str] = {
    "T1": "kill -9 of random ranks",
    "T2": "5 % of Redis' replies dropped",
    "T3": "kill -9 of torchrun's agent",
    "T4": "learner stopped past its lease; a second one beside it",
    "T5": "world size 1, 3, 2 under load",
    "T6": "kill -9 of Redis; and its last second lost",
    "T7": "nothing moves on one link",
    "T8": "workers killed or stopped in mid group",
    "T9": "one rank stopped",
    "T10": "failover with lost writes; FLUSHALL",
    "T11": "byte budget reached; Redis filled by others",
    "T12": "disk full: AOF, checkpoint, weights",
    "T13": "10,000 hostile messages",
    "T14": "a group that kills its rank",
    "T15": "learner 10 x slower",
    "T16": "reward server: 500s, hang, NaN, 1 GB, killed",
    "T17": "one worker 50 versions behind",
    "T18": "a gradient that is no number on one rank",
    "T19": "kill -9 at each point of publishing; damaged weights",
    "T20": "other tokenizer, other dtype, permuted tensor",
    "T21": "resumed 20 steps back",
    "T22": "run deleted under its workers",
    "T23": "each command under each Redis role",
    "T24": "kill -9 or zombie at every crash point",
    "T25": "everything at random",
    "T26": "Redis put back to an older copy, then to a newer one",
    "T27": "copies of several branches put back in any order",
    "T28": "judged: weights through a folder, all faults",
    "T29": "judged: TLS and users of least rights, all faults",
    "T30": "judged: LoRA, all faults",
    "T31": "judged: two ranks, each version against its checkpoint",
    "T32": "judged: stand-ins, one fault upon the other",
    "T33": "Sentinel failover under load: masters die, or sleep and wake up",
    "T34": "replay of a run that lived through faults",
    "T35": "what was served as each version, against the learner's",
    "T36": "hosts: lost, cut off, one more, in any order",
    "T37": "environments and agents of every bad kind",
    "T38": "passwords, certificates and tokens changed under a run",
    "T39": "killed or stopped at each point of fetching weights for others",
}

_NAMED = re.compile(r"(T\d+(?:, T\d+)*): ")


def find_modules(tests: Path) -> dict[str, list[Path]]:
    """Return the test modules by scenario; one without any is not built."""
    found: dict[str, list[Path]] = {scenario: [] for scenario in SCENARIOS}
    for path in sorted(tests.rglob("test_*.py")):
        if match := _NAMED.match(ast.get_docstring(ast.parse(path.read_text())) or ""):
            for scenario in match[1].split(", "):
                found[scenario].append(path)
    return found
