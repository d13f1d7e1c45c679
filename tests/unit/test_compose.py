"""docker/compose.yaml: the parts of k8s/overlays/cpu, by the same words, with the same health, limits and secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.compose_file import FILE, interpolated
from tests.manifest_world import ROOT, Container, render
from tests.unit.test_manifests_programs import command_of, num_bytes

# What a cluster needs and one machine does not: where pods meet, and a name that comes back with its pod.
ONLY_IN_A_CLUSTER = ("--nodes=", "--rendezvous=", "--worker-id=")
PARTS = ("users", "redis", "reward", "learner", "worker", "monitor", "dashboard")
GIVEN = {"PLACE": "/place"}


def services() -> Mapping[str, Mapping[str, Any]]:
    return dict(yaml.safe_load(interpolated(FILE.read_text(), GIVEN))["services"])


@pytest.fixture(params=PARTS)
def part(request: pytest.FixtureRequest) -> tuple[Mapping[str, Any], Container]:
    return services()[request.param], render("cpu").container(request.param)


def test_it_has_every_part_and_no_other() -> None:
    assert tuple(services()) == PARTS
    assert {one.spec["name"] for one in render("cpu").containers()} == set(PARTS)


def test_each_says_what_its_pod_says(part: tuple[Mapping[str, Any], Container]) -> None:
    service, container = part
    said = [*service.get("entrypoint", ()), *service["command"]]
    assert said == [word for word in container.words if not word.startswith(ONLY_IN_A_CLUSTER)]
    if said[0] == "streamrl":
        command_of(said)


def test_each_has_its_pods_image_rights_time_and_memory(part: tuple[Mapping[str, Any], Container]) -> None:
    service, container = part
    assert service["image"] == container.spec["image"]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["user"] == f"{container.template['spec']['securityContext']['runAsUser']}:10001"
    grace_s = container.template["spec"].get("terminationGracePeriodSeconds")
    if grace_s and service["image"] != "streamrl-monitor:0.1.0":
        assert service["stop_grace_period"] == f"{grace_s}s"
    if "mem_limit" in service:
        limit = container.spec["resources"]["limits"]["memory"]
        assert num_bytes(f"{service['mem_limit']}b") == num_bytes(limit)


def test_only_what_compiles_may_load_code_from_a_folder_in_memory() -> None:
    """Docker mounts these with noexec. An engine loads what torch and Triton compile from below HOME and /tmp."""
    every = services()
    assert {name: service["tmpfs"] for name, service in every.items()} == {
        name: ["/tmp:exec" if name == "worker" else "/tmp"] for name in PARTS
    }
    assert every["worker"]["environment"]["HOME"] == "/tmp"


def test_each_is_well_by_its_pods_probe(part: tuple[Mapping[str, Any], Container]) -> None:
    service, container = part
    probe = container.spec.get("livenessProbe", {}).get("httpGet")
    if probe:
        (port,) = [one["containerPort"] for one in container.spec["ports"] if one["name"] == probe["port"]]
        assert f"http://127.0.0.1:{port}{probe['path']}'" in service["healthcheck"]["test"][-1]
    elif container.pod == "redis" and "ports" in container.spec:
        asked = container.spec["readinessProbe"]["exec"]["command"][2]
        assert service["healthcheck"]["test"].split() == asked.split()
    else:
        assert "healthcheck" not in service


def test_each_gets_the_secrets_of_its_pod_and_no_other(part: tuple[Mapping[str, Any], Container]) -> None:
    service, container = part
    given = {secret["target"] for secret in service.get("secrets", ())}
    read = {str(value) for name, value in service.get("environment", {}).items() if name.endswith("_FILE")}
    read |= {found for word in service["command"] for found in re.findall(r"/run/secrets/\w+/\w+", word)}
    assert read <= given
    mounted = [mount["mountPath"] for mount in container.spec["volumeMounts"] if "secrets" in mount["mountPath"]]
    assert {path.rpartition("/")[0] for path in given} == set(mounted)


def test_whoever_depends_on_another_waits_until_it_is_well() -> None:
    every = services()
    for service in every.values():
        for name, how in service.get("depends_on", {}).items():
            is_checked = "healthcheck" in every[name]
            assert how["condition"] == ("service_healthy" if is_checked else "service_completed_successfully")


def test_what_docker_does_not_start_after_it_was_restarted_is_started_by_a_line_of_the_page() -> None:
    """At its end it tells all to end, and these two then end without an error."""
    policies = {name: service.get("restart") for name, service in services().items()}
    assert {name for name, policy in policies.items() if policy == "on-failure"} == {"learner", "worker"}
    page = " ".join((ROOT / "docs" / "plain-hosts.md").read_text().split())
    assert "After the machine or Docker was restarted, run the same `docker compose up` again" in page


def test_nothing_but_pages_for_people_is_reached_from_outside() -> None:
    """And that on this machine alone."""
    file = yaml.safe_load(interpolated(FILE.read_text(), GIVEN))
    assert file["networks"]["inside"] == {"internal": True}
    outside = {name for name, service in file["services"].items() if "outside" in service["networks"]}
    assert (
        outside
        == {name for name, service in file["services"].items() if service.get("ports")}
        == {"monitor", "dashboard"}
    )
    assert all(port.startswith("127.0.0.1:") for name in outside for port in file["services"][name]["ports"])


def test_every_image_of_ours_is_built_once_from_a_target_of_the_dockerfile() -> None:
    targets = set(re.findall(r"^FROM base AS (\S+)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE))
    built = {service["image"]: service["build"]["target"] for service in services().values() if "build" in service}
    assert built == {f"streamrl-{target}:0.1.0": target for target in targets - {"worker-gpu"}}
    assert {one["image"] for one in services().values()} - {"valkey/valkey:8.1.9"} == set(built)
