"""The layout of checkpoints on disk, and the rename that commits one.

    run folder/
      run.json                       the run's uid
      terms/000006                  which learner is the newest, and its parent checkpoint (learner.checkpoints.terms)
      journal/                       how each ticket ended, one file per commit (learner.checkpoints.journal)
      checkpoints/
        .tmp-e000006-s00000130/      being written, by every rank
        e000006-s00000120/           complete: manifest.json has size and digest of every file that the ranks wrote
          validation.json            validation metrics of its weights, once known

All files are synced, then the journal and the manifest are written, and then the folder is renamed: that rename is the
only commit point of a run. Each rank syncs and digests its own file, so no rank reads another's files, which its
machine may not even see yet. The manifest also holds the stream's state and names the newest journal file, so that all
of it commits at once. If tickets have ended since without an optimizer step (for example, the run's last groups are
dropped), the tensors are unchanged: then only a new manifest is renamed into place.

A term removes only checkpoints of its own lineage, and none that a newer term resumes from; a lineage abandoned by a
replaced learner stays. Torch-free; blocks on the disk, for as long as reading or syncing every file takes.

A checkpoint is damaged if one of its files is missing, or is not what was sealed. If the file system cannot tell, as a
network's now and then, its error is raised: resuming from an older checkpoint would abandon the newest for good.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog
from pydantic import TypeAdapter

from streamrl.crashpoints import crashpoint
from streamrl.errors import DataError, Fenced
from streamrl.files import MISSING, fsync_folder, fsync_tree, write_durably
from streamrl.learner.checkpoints.journal import write_journal
from streamrl.learner.checkpoints.scores import BEST_METRIC, read_score
from streamrl.learner.checkpoints.sealed import MANIFEST, Files, describe, digest_of, files_in, seal, size_of, unseal
from streamrl.learner.checkpoints.terms import (
    CheckpointName,
    Lineage,
    Term,
    claim_term,
    highest_term,
    parents_named_after,
)
from streamrl.learner.groups.ledger import FeedState

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """A checkpoint's content besides its tensors."""

    run_uid: str
    step: int  # optimizer steps made
    stream: FeedState
    data_fingerprint: str
    extra: Mapping[str, Any] = field(default_factory=dict)  # JSON, for the training loop

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "stream": self.stream.to_json()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> CheckpointState:
        """Parse a state; unknown items, of older versions of this program, are ignored."""
        return TypeAdapter(CheckpointState).validate_python(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    name: CheckpointName
    folder: Path
    state: CheckpointState


class CheckpointRoot:
    """The checkpoints in a run's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folder = root / "checkpoints"

    def claim_term(self, run_uid: str, *, confirm: Callable[[], object] = lambda: None, known: int = 0) -> Term:
        """Claim the next term, with the newest complete checkpoint of the surviving lineage as its parent."""

        def newest(lineage: Lineage) -> CheckpointName | None:
            checkpoint = self.newest_complete(lineage)
            return checkpoint.name if checkpoint else None

        return claim_term(self.root, run_uid=run_uid, newest=newest, confirm=confirm, known=known)

    def folder_of(self, name: CheckpointName) -> Path:
        """The folder of a committed checkpoint."""
        return self._folder / str(name)

    def temp_folder(self, name: CheckpointName) -> Path:
        """The folder that ranks write to; each knows it without communication."""
        return self._folder / f".tmp-{name}"

    def new_folder(self, name: CheckpointName) -> Path:
        """Make an empty temporary folder; one rank calls this while the others wait at a barrier."""
        folder = self.temp_folder(name)
        shutil.rmtree(folder, ignore_errors=True)  # left by a failed attempt, for example on a full disk
        folder.mkdir(parents=True)
        return folder

    def discard(self, name: CheckpointName) -> None:
        """Remove a checkpoint that could not be written."""
        shutil.rmtree(self.temp_folder(name), ignore_errors=True)

    def commit(self, name: CheckpointName, state: CheckpointState, *, files: Files | None = None) -> Checkpoint:
        """Seal what all ranks have written and rename it; once this returns, it is the newest checkpoint.

        Fenced if a newer term has the run. `files`: what the ranks have written and synced; if None, this reads and
        syncs whatever is in the folder.

        If a checkpoint of this name exists, only its state is replaced: no step was made since, so the ranks need not
        write.
        """
        crashpoint("checkpoint.written")
        folder, final = self.temp_folder(name), self.folder_of(name)
        is_resealed = final.exists()
        if is_resealed:
            files = unseal(final / MANIFEST)["files"]
        elif files is None:
            files = {path: describe(folder / path) for path in files_in(folder)}
            fsync_tree(folder)
        else:
            fsync_folder(folder)
        crashpoint("checkpoint.synced")
        stream = state.stream
        journal = write_journal(self.root, str(name), stream.uncommitted, after=stream.journal, run_uid=state.run_uid)
        crashpoint("journal.written")
        state = replace(state, stream=stream.committed(journal))
        sealed = seal(files=files, state=state.to_json())
        if is_resealed:
            self._refuse_replaced(name)
            write_durably(final / MANIFEST, sealed)
            crashpoint("checkpoint.sealed")
            self.discard(name)
        else:
            write_durably(folder / MANIFEST, sealed)
            crashpoint("checkpoint.sealed")
            self._refuse_replaced(name)
            folder.rename(final)
            crashpoint("checkpoint.renamed")
            fsync_folder(self._folder)
        crashpoint("checkpoint.committed")
        return Checkpoint(name=name, folder=final, state=state)

    def _refuse_replaced(self, name: CheckpointName) -> None:
        """Raise Fenced if a newer term has the run; called as late as possible.

        A checkpoint that slips through between this check and the rename is in no lineage; but the state of one that a
        newer term resumes from must not change under it.
        """
        highest = highest_term(self.root)
        if highest > name.term:
            raise Fenced(
                f"{self.root}: term {highest} has the run; checkpoint {name} of the replaced learner is refused"
            )

    def names(self, lineage: Lineage) -> list[CheckpointName]:
        """Checkpoints of the lineage, the newest first, without checking that they are complete."""
        try:
            names = [CheckpointName.parse(path.name) for path in self._folder.iterdir()]
        except MISSING:
            return []
        return sorted((name for name in names if name and lineage.holds(name)), reverse=True)

    def newest_complete(self, lineage: Lineage, *, digests: bool = True) -> Checkpoint | None:
        """The checkpoint to resume from; None only if the lineage has never made one. OSError if that cannot be known
        now."""
        reasons = []
        for name in self.names(lineage):
            try:
                return self.open(name, digests=digests)
            except DataError as error:
                log.warning("checkpoint ignored", checkpoint=str(name), reason=str(error))
                reasons.append(str(error))
        if reasons or lineage.has_parent:
            newest = f"; the newest: {reasons[0]}" if reasons else ""
            raise DataError(f"{self._folder}: none of the run's checkpoints is complete{newest}")
        return None

    def open(self, name: CheckpointName, *, digests: bool = False) -> Checkpoint:
        """Open this checkpoint; DataError says what is wrong with it. Checking digests reads every file. OSError if its
        files cannot be read now, which says nothing about them."""
        folder = self.folder_of(name)
        content = unseal(folder / MANIFEST)
        for path, (size, digest) in content["files"].items():
            file = folder / path
            if size_of(file) != size:
                raise DataError(f"{file}: missing, or not of {size} bytes")
            if digests and digest_of(file) != digest:
                raise DataError(f"{file}: contents do not match their digest")
        return Checkpoint(name=name, folder=folder, state=CheckpointState.from_json(content["state"]))

    def prune(
        self,
        lineage: Lineage,
        *,
        term: int,
        keep_last: int,
        keep_best: int,
        best_by: str = BEST_METRIC,
        keep: Collection[CheckpointName] = (),  # kept in any case
    ) -> list[CheckpointName]:
        """Remove checkpoints that need not be kept, and leftovers of unfinished work; return the names removed.

        A learner that has been replaced removes nothing: what is kept is the newer one's to say.
        """
        if highest_term(self.root) > term:
            return []
        self._clean_up(term)
        readable = list(self.readable(lineage))
        retained = {*keep, *(c.name for c in (*readable[:keep_last], *best_first(readable, best_by)[:keep_best]))}
        return [c.name for c in readable if c.name not in retained and self._remove(c.name, term)]

    def readable(self, lineage: Lineage) -> Iterator[Checkpoint]:
        """Checkpoints of the lineage whose files are all present, the newest first."""
        for name in self.names(lineage):
            try:
                yield self.open(name)
            except DataError:
                log.warning("damaged checkpoint left in place", checkpoint=str(name))

    def _remove(self, name: CheckpointName, term: int) -> bool:
        """Remove a checkpoint unless a newer term resumes from it.

        Rename first, check second: a newer term writes its record first and checks for its parent second, so at least
        one of the two sees the other.
        """
        folder, trash = self.folder_of(name), self._folder / f".trash-{name}"
        folder.rename(trash)
        crashpoint("prune.aside")
        if name in parents_named_after(self.root, term):
            trash.rename(folder)
            return False
        shutil.rmtree(trash, ignore_errors=True)
        crashpoint("prune.removed")
        return True

    def _clean_up(self, term: int) -> None:
        needed = parents_named_after(self.root, term)
        for folder in self._folder.glob(".t*-e*"):
            kind, _, text = folder.name.partition("-")
            name = CheckpointName.parse(text)
            unfinished_write = kind == ".tmp" and name and name.term < term
            unfinished_removal = kind == ".trash" and name and name not in needed
            if unfinished_write or unfinished_removal:
                shutil.rmtree(folder, ignore_errors=True)


def best_first(checkpoints: Iterable[Checkpoint], metric: str = BEST_METRIC) -> list[Checkpoint]:
    """The validated checkpoints by this metric, the best first; on ties the newest first."""
    scored = [
        (score, checkpoint.name, checkpoint)
        for checkpoint in checkpoints
        if (score := read_score(checkpoint.folder, metric)) is not None
    ]
    return [checkpoint for _, _, checkpoint in sorted(scored, key=lambda entry: entry[:2], reverse=True)]
