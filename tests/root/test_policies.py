"""The network policies of an overlay as rules of the kernel: what must go through does, and nothing else.

Each pod is a host with the rules that its policies say (nftables), and so is somebody in each namespace beside. Every
host listens on every port that any pod has, and calls every other: what is let through is answered, all else is refused
by the rules, so nothing here waits for silence.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers import wait_until
from tests.manifest_world import render
from tests.network_world import Direction, Opening, Peer, Policies
from tests.root.hosts import Hosts, hosts, why_not

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
OVERLAY = "gpu-small"  # with KEDA and Prometheus
NAMES = 53
NOBODYS = 9999

# What says no: the other side of a refused call, which no policy keeps back.
REFUSALS = ("tcp flags & rst == rst accept", "icmp type destination-unreachable accept")

Call = tuple[str, str, int]  # protocol, address, port

LISTEN = """
import json, selectors, socket, sys
ready = selectors.DefaultSelector()
for port in json.loads(sys.argv[1]):
    heard = socket.create_server(("", port), backlog=64)
    ready.register(heard, selectors.EVENT_READ, lambda it: it.accept()[0].sendall(b"TCP"))
    heard = socket.socket(type=socket.SOCK_DGRAM)
    heard.bind(("", port))
    ready.register(heard, selectors.EVENT_READ, lambda it: it.sendto(b"UDP", it.recvfrom(16)[1]))
while True:
    for key, _ in ready.select():
        key.data(key.fileobj)
"""
# Which calls were answered; one that is neither answered nor refused ends the test.
CALL = """
import json, socket, sys
def is_answered(protocol, address, port):
    kind, timeout_s, times = (socket.SOCK_STREAM, 30, 1) if protocol == "TCP" else (socket.SOCK_DGRAM, 1, 30)
    with socket.socket(type=kind) as caller:
        caller.settimeout(timeout_s)
        try:
            caller.connect((address, port))
            for _ in range(times):
                try:
                    if protocol == "UDP":
                        caller.send(b"?")
                    return caller.recv(16) == protocol.encode()
                except TimeoutError:
                    pass  # a datagram may be lost
        except (ConnectionError, PermissionError):
            return False
    raise TimeoutError(f"{protocol} {address}:{port} is neither answered nor refused")
json.dump([is_answered(*call) for call in json.loads(sys.argv[1])], sys.stdout)
"""


def peers() -> dict[str, Peer]:
    """By the host that stands for each; of workers and learners there are two."""
    pods = Policies(render(OVERLAY)).pods
    found = {f"{pod.component}-0": pod for pod in pods}
    found |= {f"{pod.component}-1": pod for pod in pods if pod.component in ("worker", "learner")}
    return found | {name: Peer(namespace=name) for name in ("keda", "monitoring", "kube-system", "elsewhere")}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(f"hosts are network namespaces: {reason}")
    if shutil.which("nft") is None:
        pytest.skip("nft is not installed: apt-get install --no-install-recommends nftables")
    with hosts(list(peers()), tmp_path / "logs", services={}) as made:
        yield made


def rules(world: Hosts, policies: Policies, host: str) -> str:
    """A host's policies in the words of nft."""
    lines = []
    ways: tuple[tuple[Direction, str, str], ...] = (("ingress", "input", "saddr"), ("egress", "output", "daddr"))
    for direction, hook, address in ways:
        openings = {name: policies.openings(direction, peers()[host], peer) for name, peer in peers().items()}
        if None in openings.values():
            continue  # nothing limits it
        accepted = [
            f"ip {address} {world.address(name)} {words(one)} accept"
            for name, found in openings.items()
            for one in found or ()
        ]
        known = ["ct state established,related accept", f"{'oif' if hook == 'output' else 'iif'} lo accept", *REFUSALS]
        refused = ["meta l4proto tcp reject with tcp reset", "reject"]
        lines.append(f"chain {hook} {{ type filter hook {hook} priority 0;")
        lines += [*known, *accepted, *refused, "}"]
    return "table inet policies {\n" + "\n".join(lines) + "\n}\n"


def words(opening: Opening) -> str:
    protocol = opening.protocol.lower()
    return f"meta l4proto {protocol}" if opening.port is None else f"{protocol} dport {opening.port}"


def enforce(world: Hosts, policies: Policies, folder: Path) -> None:
    for host in peers():
        file = folder / f"{host}.nft"
        file.write_text(rules(world, policies, host))
        # Refusals of datagrams are sent one a second; here as many as there are.
        words = ["sh", "-c", 'nft -f "$0" && echo 0 > /proc/sys/net/ipv4/icmp_ratelimit', str(file)]
        done = world.ask(host, words, dict(os.environ))
        assert done.returncode == 0, done.stderr


def listen(world: Hosts, ports: list[int]) -> None:
    for host in peers():
        world.start(host, [sys.executable, "-I", "-S", "-c", LISTEN, json.dumps(ports)], {})
    for host in peers():
        own = [("TCP", "127.0.0.1", ports[-1])]
        wait_until(lambda host=host, own=own: answered(world, host, own) == own, description=f"{host} listens")


def answered(world: Hosts, host: str, calls: list[Call]) -> list[Call]:
    done = world.ask(host, [sys.executable, "-I", "-S", "-c", CALL, json.dumps(calls)], {})
    assert done.returncode == 0, done.stderr
    return [call for call, is_answered in zip(calls, json.loads(done.stdout), strict=True) if is_answered]


def all_answered(world: Hosts, ways: list[tuple[str, int]]) -> set[tuple[str, str, str, int]]:
    names = {world.address(host): host for host in peers()}

    def from_one(host: str) -> list[tuple[str, str, str, int]]:
        calls = [(how, to, port) for to, name in names.items() if name != host for how, port in ways]
        return [(host, names[to], how, port) for how, to, port in answered(world, host, calls)]

    with ThreadPoolExecutor() as pool:
        return {flow for flows in pool.map(from_one, peers()) for flow in flows}


def test_each_flow_that_is_allowed_works_and_each_other_fails(
    world: Hosts, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    policies = Policies(render(OVERLAY))
    ports = sorted(policies.ports | {NAMES, NOBODYS})
    ways = [*(("TCP", port) for port in ports), ("UDP", NAMES)]
    listen(world, ports)
    everything = {(one, other, *way) for one in peers() for other in peers() for way in ways if one != other}
    assert all_answered(world, ways) == everything, "without policies everybody speaks to everybody"

    enforce(world, policies, tmp_path)
    may = {flow for flow in everything if policies.may(peers()[flow[0]], peers()[flow[1]], flow[2], flow[3])}
    assert ("worker-0", "redis-0", "TCP", 6379) in may
    assert ("worker-0", "worker-1", "TCP", 9400) not in may
    assert all_answered(world, ways) == may
    record_property("figure", f"{len(may)} flows work, {len(everything - may)} are refused")
