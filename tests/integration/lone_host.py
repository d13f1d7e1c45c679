"""A further host of an engine, as a process: `python -m tests.integration.lone_host FIRST MODEL CONFIG FOLDER`.

What it is to hold lies in FOLDER, a file `VERSION.safetensors` for each version; nothing is fetched.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

from streamrl.config import schema
from streamrl.errors import WeightsError
from streamrl.held_folders import scratch_folder
from streamrl.process import parse_address
from streamrl.telemetry.logs import configure_logging
from streamrl.telemetry.progress import Progress
from streamrl.workers.engines.base import EngineSettings, Meeting
from streamrl.workers.engines.model import read_model
from streamrl.workers.engines.vllm.headless import HeadlessRanks
from streamrl.workers.engines.vllm.loading.host_mirror import tag_of
from streamrl.workers.hosts.further import FirstHost, FurtherHost
from tests.hosts_world import RUN_UID, SECRET


class FolderCopy:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.mirror = folder / "mirror.safetensors"

    def num_read(self) -> int:
        return 0

    async def bring(self, version: int, *, refetch: bool) -> None:
        published = self._folder / f"{version}.safetensors"
        tag_of(self.mirror).unlink(missing_ok=True)
        if not published.exists():
            raise WeightsError(f"there is no {published.name}")
        shutil.copyfile(published, self.mirror)
        tag_of(self.mirror).write_text(str(version))


async def main(first: str, model: str, config_json: str, folder: str) -> None:
    facts = read_model(model, trust_remote_code=False)
    config = schema.Config.model_validate_json(config_json)
    copy = FolderCopy(Path(folder))

    async def secret() -> bytes:
        return SECRET

    with scratch_folder() as scratch:

        def make_ranks(meeting: Meeting, seed: int) -> HeadlessRanks:
            settings = EngineSettings(model=facts, config=config, seed=seed)
            return HeadlessRanks(settings, meeting, mirror=copy.mirror, scratch=scratch)

        at = parse_address(first, what="FIRST")
        host = FurtherHost(
            name="further",
            first=FirstHost(at=at, run_uid=RUN_UID, start_timeout_s=60.0, grace_s=1.0),
            secret=secret,
            copy=copy,
            make_ranks=make_ranks,
            progress=Progress(part="host/further", role="host"),
        )
        await host.run(asyncio.Event())


if __name__ == "__main__":
    configure_logging("host/further", None)
    asyncio.run(main(*sys.argv[1:]))
