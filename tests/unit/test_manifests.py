"""k8s/: every overlay renders, fits the schemas, and keeps to the rules by which it may be run."""

from __future__ import annotations

import json
import re

import jsonschema
import kubernetes_validate
import pytest
import yaml

from streamrl.ops.monitor.alerts import alert_rules
from streamrl.protocol.transport.acl import ROLES, SERVERS
from tests.manifest_world import COMPONENT, K8S, OVERLAYS, ROOT, Container, Rendered, render, render_own
from tests.pages import blocks

KUBERNETES = "1.33"
NO_RIGHTS = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "tests" / "schemas").glob("*.json")}


@pytest.fixture(params=OVERLAYS)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render(request.param)


def test_every_object_fits_its_schema(rendered: Rendered) -> None:
    for one in rendered.objects:
        if one["kind"] in SCHEMAS:
            jsonschema.validate(one, SCHEMAS[one["kind"]])
        else:
            kubernetes_validate.validate(dict(one), KUBERNETES, strict=True)


def test_every_component_is_part_of_an_overlay_and_so_held_to_all_of_this() -> None:
    files = (K8S / "overlays").glob("*/kustomization.yaml")
    used = {
        name.rpartition("/")[2] for file in files for name in yaml.safe_load(file.read_text()).get("components", ())
    }
    assert used == {path.name for path in (K8S / "components").iterdir()}


@pytest.mark.parametrize("component", ["peers", "prometheus", "redis-sentinel", "redis-tls", "shared-weights"])
def test_a_component_may_be_laid_over_an_overlay_that_lacks_it(component: str) -> None:
    bare, laid = render("cpu"), render("cpu", component)
    assert laid.objects != bare.objects
    test_every_object_fits_its_schema(laid)
    test_everything_that_is_named_is_there(laid)


def test_an_object_that_does_not_fit_is_found() -> None:
    scaler = next(one for one in render("cpu").objects if one["kind"] == "ScaledObject")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**scaler, "spec": {**scaler["spec"], "minReplicas": 1}}, SCHEMAS["ScaledObject"])


def test_images_are_pinned_and_ours_are_targets_of_the_dockerfile(rendered: Rendered) -> None:
    targets = set(re.findall(r"^FROM base AS (\S+)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE))
    for container in rendered.containers():
        name, _, tag = container.spec["image"].partition(":")
        assert re.fullmatch(r"\d+\.\d+\.\d+", tag), container.spec["image"]
        assert name == "valkey/valkey" or name.removeprefix("streamrl-") in targets, name
    assert len({one.spec["image"] for one in rendered.containers() if "valkey" in one.spec["image"]}) == 1


def test_no_pod_is_root_or_has_rights(rendered: Rendered) -> None:
    for container in rendered.containers():
        pod = container.template["spec"]
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] == context["fsGroup"] == 10001
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert container.spec["securityContext"] == NO_RIGHTS, container.spec["name"]
        assert not any(pod.get(word) for word in ("hostNetwork", "hostPID", "hostIPC"))


def test_every_container_and_every_volume_in_memory_has_limits(rendered: Rendered) -> None:
    for container in rendered.containers():
        resources = container.spec["resources"]
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= set(resources[kind]), container.spec["name"]
        gpu = "nvidia.com/gpu"
        assert resources["requests"].get(gpu) == resources["limits"].get(gpu)
        for volume in container.template["spec"]["volumes"]:
            if "emptyDir" in volume:
                assert volume["emptyDir"].get("sizeLimit"), volume


def test_no_secret_is_in_the_manifests_and_each_is_named_in_the_readme(rendered: Rendered) -> None:
    assert rendered.of_kind("Secret") == []
    readme = (ROOT / "k8s" / "README.md").read_text()
    for container in rendered.containers():
        for variable in container.spec.get("env", ()):
            assert not re.search(r"(PASSWORD|TOKEN|SECRET)$", variable["name"]), variable
        for volume in container.template["spec"]["volumes"]:
            if "secret" in volume:
                assert f"secret generic {volume['secret']['secretName']}" in readme, volume
        assert not any(re.search(r"//[^/@\s]*:[^/@\s]+@", word) for word in container.words), container.words
    for one in rendered.of_kind("ConfigMap"):
        for file, text in one["data"].items():
            lines = [line.partition("#")[0] for line in text.splitlines()]
            held = [
                line
                for line in lines
                if re.search(r"(password|secret|(?<!per_)token|(?<!no)pass|auth)\s*[:= ]\s*\S", line, re.I)
                and not re.match(r" *printf '[^']* %s[^']*' ", line)  # which fills it in where it runs
            ]
            assert held == [], file


def test_each_part_gets_the_password_of_its_own_role_only(rendered: Rendered) -> None:
    by_sentinel = any(one.pod == "sentinel" for one in rendered.containers())
    every = {*ROLES, *(SERVERS if by_sentinel else ())}
    for container in rendered.containers():
        held = {
            item["key"]
            for volume in container.template["spec"]["volumes"]
            if volume.get("secret", {}).get("secretName") == "redis-passwords"
            for item in volume["secret"].get("items", [{"key": role} for role in every])
        }
        users = {found[1] for word in container.words if (found := re.search(r"//(\w+)@", word))}
        expected = {"redis": every, "sentinel": {"sentinel"}}.get(container.pod, users)
        assert held == expected, container.pod


def listening(container: Container, rendered: Rendered) -> set[int]:
    """Ports that its program is told to listen on."""
    told = " ".join(container.words)
    found = [r"--port[= ](\d+)", r"--http=[\d.]+:(\d+)", r"--rendezvous=\S+:(\d+)", r"--tls-port (\d+)"]
    ports = {int(port) for pattern in found for port in re.findall(pattern, told)}
    if container.spec["name"] == "redis" and not ports:
        ports = set(
            map(int, re.findall(r"^port (\d+)$", rendered.named("ConfigMap", "redis")["data"]["redis.conf"], re.M))
        )
    return ports - {0}


def test_every_port_of_a_service_is_one_that_the_program_listens_on(rendered: Rendered) -> None:
    for service in rendered.of_kind("Service"):
        component = service["spec"]["selector"][COMPONENT]
        behind = [one for one in rendered.containers() if one.pod == component and one.spec.get("ports")]
        assert behind, f"no pod is behind {service['metadata']['name']}"
        for port in service["spec"]["ports"]:
            named = {p["containerPort"] for one in behind for p in one.spec["ports"] if p["name"] == port["targetPort"]}
            assert named == {port["port"]}, service["metadata"]["name"]
            assert all(named <= listening(one, rendered) for one in behind), service["metadata"]["name"]


def test_every_probe_and_scrape_asks_a_port_that_is_there(rendered: Rendered) -> None:
    for container in rendered.containers():
        ports = {port["name"] for port in container.spec.get("ports", ())}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container.spec.get(probe, {})
            asked = asked.get("httpGet") or asked.get("tcpSocket")
            assert asked is None or asked["port"] in ports, (container.spec["name"], probe)
    for monitor in rendered.of_kind("PodMonitor", "ServiceMonitor"):
        component = monitor["spec"]["selector"]["matchLabels"][COMPONENT]
        (asked,) = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
        behind = [one for one in rendered.containers() if one.pod == component]
        assert all(asked["port"] in {port["name"] for port in one.spec["ports"]} for one in behind)


def test_everything_that_is_named_is_there(rendered: Rendered) -> None:
    names = {(one["kind"], one["metadata"]["name"]) for one in rendered.objects}
    for workload in rendered.workloads:
        pod = workload["spec"]["template"]["spec"]
        own = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
        volumes = {volume["name"] for volume in pod["volumes"]} | own
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names
        if "priorityClassName" in pod:
            assert ("PriorityClass", pod["priorityClassName"]) in names
    for scaler in rendered.of_kind("ScaledObject", "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in names


# What follows the run


def test_the_run_is_over_when_the_pod_where_all_meet_has_ended_with_it(rendered: Rendered) -> None:
    """Another one that is missing then would be made again and again, and find nobody to meet."""
    job = rendered.named("Job", "learner")["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert re.search(r"--rendezvous=\S+-0\.learner:", " ".join(rendered.container("learner").words))


def test_a_learner_is_deleted_until_its_pods_have_ended() -> None:
    """A new one would have their names, and take the run while they save."""
    readme = (K8S / "README.md").read_text()
    assert readme.count("delete job learner") == readme.count("delete job learner --cascade=foreground") > 0


def test_applying_the_manifests_again_leaves_the_number_of_pods_to_their_scaler(rendered: Rendered) -> None:
    scalers = rendered.of_kind("ScaledObject", "HorizontalPodAutoscaler")
    scaled = [one["spec"]["scaleTargetRef"] for one in scalers]
    assert {one["name"] for one in scaled} == {"worker", "reward"}
    assert not any("replicas" in rendered.named(one["kind"], one["name"])["spec"] for one in scaled)


def test_the_scaler_asks_the_monitor_where_it_listens(rendered: Rendered) -> None:
    """What it makes of the answers: `tests/redis/test_autoscaling.py`."""
    (service,) = [one for one in rendered.of_kind("Service") if one["metadata"]["name"] == "monitor"]
    where = f"http://monitor.{service['metadata']['namespace']}.svc.cluster.local:{service['spec']['ports'][0]['port']}"
    for scaler in rendered.of_kind("ScaledObject"):
        assert {trigger["metadata"]["url"] for trigger in scaler["spec"]["triggers"]} == {f"{where}/metrics"}
        (policy,) = [one for one in rendered.of_kind("NetworkPolicy") if one["metadata"]["name"] == "keda-to-monitor"]
        assert policy["spec"]["podSelector"]["matchLabels"] == service["spec"]["selector"]


def test_the_scaler_of_a_run_in_a_namespace_of_its_own_asks_that_runs_monitor() -> None:
    [page] = blocks(K8S / "README.md", "yaml")
    second = render_own(yaml.safe_load(page.text))
    assert {one["metadata"].get("namespace", "run-b") for one in second.objects} == {"run-b"}
    test_the_scaler_asks_the_monitor_where_it_listens(second)


def test_workers_of_a_run_that_has_ended_and_are_not_scaled_by_keda_end_by_a_line_of_the_page() -> None:
    told = (ROOT / "k8s" / "README.md").read_text()
    assert "scale deployment worker --replicas=0" in told
    assert "`--replicas=1` before the next run" in told


def test_the_rules_of_prometheus_are_those_that_streamrl_prints() -> None:
    assert render("gpu-small").named("PrometheusRule", "streamrl")["spec"] == alert_rules()


def test_the_other_scaler_follows_a_metric_that_is_exported() -> None:
    metric = render("gpu-large").named("HorizontalPodAutoscaler", "worker")["spec"]["metrics"][0]["external"]["metric"]
    assert f'"{metric["name"]}' in (ROOT / "streamrl" / "ops" / "monitor" / "exporter.py").read_text()


def test_workers_that_fetch_from_each_other_tell_the_address_of_their_pod_and_the_port_is_theirs_alone() -> None:
    rendered = render("gpu-small")
    [worker] = [one for one in rendered.containers() if one.spec["name"] == "worker"]
    assert "--peers=$(POD_IP):9500" in worker.spec["args"]
    assert {"name": "peers", "containerPort": 9500}.items() <= worker.spec["ports"][-1].items()
    [ip] = [one for one in worker.spec["env"] if one["name"] == "POD_IP"]
    assert ip["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    only = [{"podSelector": {"matchLabels": {COMPONENT: "worker"}}}]
    for name, way, side in (("peers", "ingress", "from"), ("to-peers", "egress", "to")):
        [rule] = rendered.named("NetworkPolicy", name)["spec"][way]
        assert rule == {side: only, "ports": [{"protocol": "TCP", "port": "peers"}]}


def test_no_probe_puts_a_password_into_a_variable_or_a_word(rendered: Rendered) -> None:
    """Both are seen by whoever may look at a process; a pipe is not."""
    for container in rendered.containers():
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            said = " ".join(container.spec.get(kind, {}).get("exec", {}).get("command", ()))
            for found in re.finditer(r"\$\([^)]*/run/secrets[^)]*\)", said):
                begins = said.rfind("printf ", 0, found.start())
                assert begins >= 0, said
                assert "|" not in said[begins : found.start()], "printf is of the shell, and starts nothing"


def test_the_trainers_form_of_the_learner_is_the_job_but_for_where_its_pods_meet() -> None:
    was, made = (json.dumps(render(overlay).named("Job", "learner")["spec"]) for overlay in ("gpu-small", "trainjob"))
    meet, meet_there = "--rendezvous=learner-0.learner:29400", "--rendezvous=learner-node-0-0.learner:29400"
    assert json.loads(made) == json.loads(was.replace(meet, meet_there))
    assert was.count(meet) == 1


def test_the_trainer_finds_no_job_and_no_service_of_the_name_under_which_it_makes_them() -> None:
    objects = render("trainjob").objects
    assert [one["kind"] for one in objects if one["metadata"]["name"] == "learner"].count("Job") == 1, "the Trainer's"
    assert not any(one["kind"] == "Service" and one["metadata"]["name"] == "learner" for one in objects)
