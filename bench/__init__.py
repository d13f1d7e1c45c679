"""Benchmarks of streamrl, each against a peer or a physical limit on the same machine and in the same run.

catalogue.py   the benches by name
report.py      a bench's results: bars, facts, the machine; as a table, as JSON, in RESULTS.md
measure.py     medians of interleaved rounds, and progress on stderr
learning.py    a learner and workers on an embedded Redis, with no model on either side
answering.py   the workers' side of it, in its own process

`python -m bench NAME [--quick] [--json] [--record]`; `python -m bench --help` lists the benches.
"""
