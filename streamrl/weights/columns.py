"""In which order to patch with many deltas: stretch by stretch, so that memory is read once and not once for each.

    delta 6.51   | a  | b  | c  |          column 1: a of 6.51, a of 6.52, ...      fits the cache
    delta 6.52   | a  | b  | c  |    ─►    column 2: b of 6.51, b of 6.52, ...
    ...

Deltas may be cut differently (another number of ranks made them): a column ends where all of them have a cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from streamrl.weights.delta import Piece
from streamrl.weights.format import Coding
from streamrl.weights.manifest import Manifest


def columns(manifests: Sequence[Manifest], blobs: Mapping[str, bytes]) -> Iterator[list[Piece]]:
    """What changes in each stretch, in the order of the manifests, which are deltas, each on the one before."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    starts: dict[str, set[int]] = {}  # where all so far have a cut
    for manifest in manifests:
        own: dict[str, set[int]] = defaultdict(set)
        for shard in manifest.shards:
            blob = memoryview(blobs[shard.blob_name])
            for part, place in shard.parts():
                own[part.tensor].add(part.start)
                if part.coding is not Coding.SAME:
                    pieces[part.tensor].append(Piece(said=part, coded=blob[place]))
        starts = {tensor: cuts & starts.get(tensor, cuts) for tensor, cuts in own.items()}
    for tensor, changed in pieces.items():
        cuts, stretches = sorted(starts[tensor]), defaultdict[int, list[Piece]](list)
        for piece in changed:
            stretches[bisect_right(cuts, piece.said.start)].append(piece)
        yield from stretches.values()
