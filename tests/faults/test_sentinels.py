"""T33: sentinels make another server the master, again and again, while a learner and two workers are at work."""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.ops.audit import audit_folder
from streamrl.protocol.transport.connection import connect
from streamrl.protocol.transport.operator import set_control
from tests.faults.harness import FaultWorld
from tests.faults.place import Place
from tests.faults.replicas import Sentinels, Server, sentinels, server
from tests.faults.report import report
from tests.faults.stand_in_worker import Delivery
from tests.helpers import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(420)]
NUM_SERVERS = 3
RECOVERY_S = 15.0  # a second until they call it down, the vote, the promotion
_WITHIN_S = 60.0


@pytest.mark.parametrize("num_failovers", [2, 12])
def test_each_ticket_is_accounted_for_over_failovers_by_sentinels(tmp_path: Path, num_failovers: int) -> None:
    with a_service(tmp_path) as service:
        place = Place(
            folder=tmp_path / "runs",
            name="run",
            url=service.sentinels.url,
            num_prompts=200,
            max_epochs=10_000,
            reply_timeout_s=1.0,
            failing_every=7,
            deadline_s=400,
        )
        (tmp_path / "runs").mkdir()
        with FaultWorld(place) as world:
            learner = world.start_learner()
            workers = [world.start_worker(name=f"w{number}") for number in range(2)]
            recoveries = []
            for number in range(num_failovers):
                service.wait_until_fit()
                goes_on(world)
                recoveries.append(service.fail_over(number, lambda: goes_on(world)))
            service.wait_until_fit()
            with connect(place.url, schema.Redis()) as client:
                set_control(client, world.keys, "drain", by="the test")
            learner.ends_with(0)
            for worker in workers:
                worker.ends_with(0)
            audit = audit_folder(place.run_folder, redis_url=place.url)
            endings = world.endings()
    report("T33", audit, injections=num_failovers, recovery_s=max(recoveries))
    assert audit.issued == audit.trained + sum(audit.dropped.values()) + audit.dead
    assert audit.outstanding == 0
    trained = {ticket for ticket, ending in endings.items() if ending.outcome == "trained"}
    assert len(trained) == audit.trained > 0
    assert trained <= {one.ticket for part in workers for one in Delivery.all_in(part.output)}
    assert statistics.median(recoveries) <= RECOVERY_S, "a single one may meet a busy machine"


def goes_on(world: FaultWorld) -> None:
    """Until a checkpoint was made that was not there; nobody has ended."""
    before = world.newest_checkpoint()

    def has_gone_on() -> bool:
        parts = [*world.parts("learner"), *world.parts("worker")]
        assert not [part.name for part in parts if part.exit_code is not None], "somebody has ended"
        return world.newest_checkpoint() > before

    try:
        wait_until(has_gone_on, description="the run goes on", timeout_s=_WITHIN_S)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{world.last_words()}") from None


class Service:
    """A master, two replicas, three sentinels; who dies is replaced, and who only slept comes back as a replica."""

    def __init__(self, folder: Path, parts: ExitStack) -> None:
        self._folder, self._parts, self._num_made = folder, parts, 0
        self._servers = [parts.enter_context(server(folder / "server-0"))]
        self._servers += [self._another() for _ in range(NUM_SERVERS - 1)]
        self.sentinels: Sentinels = parts.enter_context(sentinels(folder, master=self._servers[0]))

    @property
    def master(self) -> Server:
        port = self.sentinels.master_port()
        return next(one for one in self._servers if one.port == port)

    def wait_until_fit(self) -> None:
        def is_fit() -> bool:
            self._lead_to(self.master)
            return self.sentinels.all_know(NUM_SERVERS - 1)

        wait_until(
            is_fit, description="the sentinels know one another and all replicas", timeout_s=_WITHIN_S, poll_s=0.2
        )

    def fail_over(self, number: int, goes_on: Callable[[], None]) -> float:
        """By turns it dies, or sleeps and wakes up as a master among others; seconds until the run goes on."""
        old = self.master
        sleeps = number % 2 == 1
        old.process.send_signal(signal.SIGSTOP if sleeps else signal.SIGKILL)
        began = time.monotonic()
        wait_until(
            lambda: self.sentinels.master_port() != old.port,
            description="another one is the master",
            timeout_s=_WITHIN_S,
            poll_s=0.1,
        )
        if sleeps:
            old.process.send_signal(signal.SIGCONT)
        goes_on()
        took_s = time.monotonic() - began
        if not sleeps:
            self._servers.remove(old)
            self._servers.append(self._another(of=self.master))
        return took_s

    def _lead_to(self, master: Server) -> None:
        """Who was started while the sentinels made up their minds may follow a replica, and none of them sees it."""
        for one in self._servers:
            state = one.admin.info("replication")
            if one is not master and state["role"] == "slave" and state["master_port"] != master.port:
                one.admin.replicaof("127.0.0.1", str(master.port))

    def _another(self, *, of: Server | None = None) -> Server:
        self._num_made += 1
        return self._parts.enter_context(
            server(self._folder / f"server-{self._num_made}", replica_of=of or self._servers[0])
        )


@contextmanager
def a_service(folder: Path) -> Iterator[Service]:
    with ExitStack() as parts:
        yield Service(folder, parts)
