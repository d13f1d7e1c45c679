"""Which manifests to apply, which versions and blobs to keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamrl.errors import WeightsError
from streamrl.protocol.weights.catchup import catch_up
from streamrl.protocol.weights.manifest import Manifest, ShardRecord
from streamrl.protocol.weights.retention import collectable, retained
from streamrl.versions import make_version


def chain(*kinds: str, term: int = 1) -> dict[int, Manifest]:
    """`chain("anchor", "delta", ...)`: each delta builds on the version before it."""
    manifests: dict[int, Manifest] = {}
    last = 0
    for n, kind in enumerate(kinds):
        version = make_version(term, n)
        base = 0 if kind == "anchor" else last
        manifests[version] = Manifest(version=version, base=base, step=n, run_uid="u", tensors=(), shards=())
        last = version
    return manifests


MANIFESTS = chain("anchor", "delta", "delta", "anchor", "delta", "delta")
V = sorted(MANIFESTS)


@pytest.mark.parametrize(
    ("have", "target", "path"),
    [
        (0, 0, [0]),
        (0, 2, [0, 1, 2]),
        (0, 5, [3, 4, 5]),
        (V[1], 2, [2]),
        (V[0], 2, [1, 2]),
        (V[1], 5, [3, 4, 5]),
        (V[3], 5, [4, 5]),
        (V[2], 3, [3]),
        (V[5], 5, []),
        (V[5], 4, []),
        (make_version(2, 0), 5, []),
    ],
)
def test_deltas_from_what_is_there_else_the_nearest_anchor_and_its_deltas(have, target, path):
    found = catch_up(have, MANIFESTS[V[target]], MANIFESTS.get)

    assert [manifest.version for manifest in found] == [V[i] for i in path]


def sized(num_bytes: int) -> tuple[ShardRecord, ...]:
    return (ShardRecord(blob_name="b", num_bytes=num_bytes, digest=b"", ranges=()),)


def test_the_cheapest_way_is_taken():
    """Deltas that cost 40; an anchor that costs 180 beside every fifth."""
    manifests = {
        version: replace(manifest, shards=sized(10), anchor=sized(180) if n and n % 5 == 0 else ())
        for n, (version, manifest) in enumerate(chain("anchor", *["delta"] * 12).items())
    }
    numbers = sorted(manifests)

    def way(have: int, target: int) -> list[tuple[int, bool]]:
        path = catch_up(numbers[have] if have else 0, manifests[numbers[target]], manifests.get)
        return [(numbers.index(manifest.version), manifest.base == 0) for manifest in path]

    assert way(9, 12) == [(10, False), (11, False), (12, False)]
    assert way(6, 12) == [(n, False) for n in range(7, 13)], "240 for deltas alone, against 260"
    assert way(5, 12) == [(10, True), (11, False), (12, False)]
    assert way(0, 12) == [(10, True), (11, False), (12, False)]
    assert way(9, 10) == [(10, False)], "who is close takes the delta, whatever lies beside it"
    del manifests[numbers[9]]
    assert way(6, 12) == [(10, True), (11, False), (12, False)], "a hole beyond an anchor does not matter"


def test_manifests_are_looked_up_no_further_back_than_they_can_help():
    manifests = {v: replace(m, shards=sized(10)) for v, m in chain("anchor", *["delta"] * 12).items()}
    numbers = sorted(manifests)
    manifests[numbers[8]] = replace(manifests[numbers[8]], anchor=sized(100))
    asked: list[int] = []

    def look_up(version: int) -> Manifest | None:
        asked.append(numbers.index(version))
        return manifests[version]

    assert len(catch_up(0, manifests[numbers[12]], look_up)) == 5
    assert asked == [11, 10, 9, 8]


def test_a_hole_is_an_error_that_names_it():
    manifests = dict(MANIFESTS)
    del manifests[V[4]]

    with pytest.raises(WeightsError, match=r"version 1\.4, which leads to 1\.5, no longer exists"):
        catch_up(V[3], MANIFESTS[V[5]], manifests.get)


def test_a_manifest_under_another_number_is_a_hole():
    with pytest.raises(WeightsError, match="no longer exists"):
        catch_up(0, MANIFESTS[V[5]], lambda version: MANIFESTS[V[0]])


def test_a_chain_without_end_is_refused():
    endless = chain("anchor", *["delta"] * 5000)

    with pytest.raises(WeightsError, match="without an anchor"):
        catch_up(0, endless[max(endless)], endless.get)


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [
        ("", ""),
        ("a", "0"),
        ("add", "012"),
        ("adad", "0123"),
        ("adadad", "2345"),
        ("aaad", "123"),
    ],
)
def test_the_last_two_anchors_and_what_builds_on_them_are_kept(kinds, kept):
    manifests = chain(*("anchor" if kind == "a" else "delta" for kind in kinds))

    keep = retained({version: manifest.base == 0 for version, manifest in manifests.items()})

    assert keep == {make_version(1, int(n)) for n in kept}


def test_versions_of_an_older_term_count_as_any_other():
    anchors = {
        make_version(1, 0): True,
        make_version(1, 1): False,
        make_version(2, 0): True,
        make_version(3, 0): True,
    }

    assert retained(anchors) == {make_version(2, 0), make_version(3, 0)}


def test_only_this_runs_blobs_of_this_term_and_older_ones_are_collected():
    names = [
        "u/000001/0-0-aa",
        "u/000002/0-0-aa",
        "u/000002/0-0-aa.part",
        "u/000002/1-0-bb",
        "u/000003/0-0-aa",
        "other/000001/0-0-aa",
        "u/strange",
        "strange",
    ]

    gone = collectable(names, keep=["u/000002/1-0-bb"], run_uid="u", term=2)

    assert gone == ["u/000001/0-0-aa", "u/000002/0-0-aa", "u/000002/0-0-aa.part"]
