"""Parts of pages that are generated from the code, between `<!-- made: NAME -->` and `<!-- end -->`.

python -m tests.made_pages     writes them again; tests/unit/test_made_pages.py fails if a page differs
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from streamrl.ops.monitor.view import Cause, Level
from streamrl.telemetry.metrics import FAMILIES, METRICS
from tests.pages import PAGES, ROOT
from tests.trouble import causes

METRICS_PAGE = ROOT / "docs" / "metrics.md"
TROUBLE_PAGE = ROOT / "docs" / "troubleshooting.md"
_MADE = re.compile(r"(<!-- made: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_LEVELS: Mapping[Level, str] = {
    "blocking": "blocks the run",
    "attention": "needs attention",
    "info": "information, not a fault",
}
# Prometheus metrics: the prefix of their names, the file that defines them, and a pattern that finds them there: the
# kind, the name and the meaning.
_SERVED = {
    "run": ("", "streamrl/ops/monitor/exporter.py", r'self\._(one|by|family)\(\s*"(\w+)",\s*"([^"]+)"'),
    "worker": ("streamrl_worker_", "workers/http.py", r'yield _(gauge|counter)\(\s*"(\w+)",\s*"([^"]+)"'),
    "reward server": ("", "workers/reward_server/openapi.py", r'(Counter|Gauge|Histogram)\(\s*"(\w+)",\s*"([^"]+)"'),
}
# prometheus_client appends these to a name; the exporter's own names have theirs.
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}


def made() -> dict[str, str]:
    return {
        **of_metrics(),
        **of_prometheus(),
        **{f"cause {name}": _of_cause(found) for name, found in causes().items()},
    }


def of_metrics() -> dict[str, str]:
    """Return a table for each first part of a name."""
    known = {**METRICS, **{f"{name}...": explained for name, explained in FAMILIES.items()}}
    rooms = dict.fromkeys(name.partition("/")[0] for name in known)
    return {
        f"metrics {room}": _table(
            ("metric", "unit", "meaning"),
            ((f"`{name}`", *explained) for name, explained in known.items() if name.startswith(f"{room}/")),
        )
        for room in rooms
    }


def of_prometheus() -> dict[str, str]:
    return {
        f"prometheus {name}": _table(
            ("metric", "meaning"),
            ((_named(begin + each, kind), text.rstrip(".")) for kind, each, text in _served(file, form)),
        )
        for name, (begin, file, form) in _SERVED.items()
    }


def _served(file: str, form: str) -> list[tuple[str, str, str]]:
    return re.findall(form, (ROOT / file).read_text())


def _named(name: str, kind: str) -> str:
    return ", ".join(f"`{name}{suffix}`" for suffix in _SUFFIXES.get(kind.lower(), ("",)))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)


def _of_cause(found: Sequence[Cause]) -> str:
    (cause,) = found
    told = f"**{cause.title[0].upper()}{cause.title[1:]}** ({_LEVELS[cause.level]}). Example: “{cause.evidence}”."
    return "\n\n".join(_filled(text) for text in (told, f"**Do**: {cause.remedy}.")) + "\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def names(page: Path) -> list[str]:
    return [found[2] for found in _MADE.finditer(page.read_text())]


def for_prometheus(exposition: str) -> set[str]:
    """Return the names in what a `/metrics` answers; prometheus_client adds the time of creation to some."""
    families = text_string_to_metric_families(exposition)
    return {sample.name for family in families for sample in family.samples if not sample.name.endswith("_created")}


def told_for_prometheus(of: str) -> set[str]:
    """Return the names in the page's table of what a run, a worker or a reward server serves."""
    (table,) = (found[0] for found in _MADE.finditer(METRICS_PAGE.read_text()) if found[2] == f"prometheus {of}")
    return set(re.findall(r"`(streamrl_\w+)`", table))


def is_explained(metric: str) -> bool:
    """Return whether its page explains it."""
    told = re.findall(r"^\| `(.+?)(\.\.\.)?` \|", METRICS_PAGE.read_text(), re.MULTILINE)
    return any(metric.startswith(name) if goes_on else metric == name for name, goes_on in told)


def renewed(page: Path) -> str:
    """Return the page as it should be."""
    known = made()
    return _MADE.sub(lambda found: f"{found[1]}\n{known[found[2]]}\n{found[3]}", page.read_text())


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(renewed(page))
