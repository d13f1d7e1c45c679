"""The worker waits for the learner's answer to a canary, and for no longer than it can come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.follow_world import ANSWERED, ASKED, PATIENCE, Follower


@pytest.fixture
async def follower(tmp_path: Path) -> AsyncIterator[Follower]:
    made = Follower(tmp_path)
    yield made
    made.weights.close()


async def test_a_version_is_loaded_before_its_canary_is_answered_and_proved_after(follower: Follower) -> None:
    async with follower.following():
        version = follower.publish(canary=ASKED)
        await follower.serves(version)
        assert follower.weights.proved_version == 0
        follower.answer(version)
        async with asyncio.timeout(10):
            await follower.weights.proved(version.version)
    assert follower.proof.canaries == [ANSWERED]


async def test_a_canary_whose_learner_died_is_not_waited_for_once_there_is_a_newer_version(follower: Follower) -> None:
    async with follower.following():
        await follower.serves(follower.publish(canary=ASKED))
        newer = follower.publish(canary=ANSWERED)
        await follower.serves(newer)
        async with asyncio.timeout(10):
            await follower.weights.proved(newer.version)
    assert follower.proof.canaries == [None, ANSWERED]


async def test_a_canary_that_is_never_answered_leaves_the_proof_to_digests_and_probe(tmp_path: Path) -> None:
    follower = Follower(tmp_path, patience=replace(PATIENCE, answer_s=0.05))
    async with follower.following():
        version = follower.publish(canary=ASKED)
        async with asyncio.timeout(10):
            await follower.weights.proved(version.version)
    assert (follower.proof.canaries, follower.proof.num_probes) == ([None], 1)
    follower.weights.close()


async def test_a_manifest_that_cannot_be_read_meanwhile_is_looked_at_again(
    follower: Follower,
) -> None:
    async with follower.following():
        version = follower.publish(canary=ASKED)
        follower.announcements.manifests[version.version] = b"damaged"
        await follower.serves(version)
        follower.answer(version)
        async with asyncio.timeout(10):
            await follower.weights.proved(version.version)
    assert follower.proof.canaries == [ANSWERED]
