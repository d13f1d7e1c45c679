"""What stands in for a worker ends where a worker would, and lives on where one would."""

from __future__ import annotations

from tests.faults.harness import FaultWorld
from tests.faults.place import Place
from tests.faults.stand_in_worker import Delivery
from tests.helpers import wait_until
from tests.proxy import Proxy

PATIENCE_CALLS = 16  # more than a store is asked within its patience


def test_a_worker_lives_on_whose_store_was_away_for_longer_than_its_patience(place: Place, world: FaultWorld) -> None:
    with Proxy(place.url) as road:
        road.drop_reply_to(b":blobs", times=PATIENCE_CALLS)
        world.start_learner()
        worker = world.start_worker(url=road.url)

        def has_delivered() -> bool:
            assert worker.exit_code is None or Delivery.all_in(worker.output), worker.output
            return bool(Delivery.all_in(worker.output))

        wait_until(has_delivered, description="the worker delivers")
        assert road.num_dropped == PATIENCE_CALLS
