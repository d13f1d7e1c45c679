"""The manifests of k8s/ as `kubectl kustomize` renders them, with queries on them."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
K8S = ROOT / "k8s"
OVERLAYS = tuple(sorted(path.name for path in (K8S / "overlays").iterdir()))
COMPONENT = "app.kubernetes.io/component"

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    pod: str  # the component
    spec: Object
    template: Object
    variables: Mapping[str, str]  # its environment; values known only to the cluster are made up

    @property
    def words(self) -> list[str]:
        """The command after the image's entry point."""
        told = [*self.spec.get("command", ()), *self.spec.get("args", ())]
        return [re.sub(r"\$\(([A-Z_]+)\)", lambda found: self.variables[found[1]], word) for word in told]

    def mount_of(self, path: str) -> str | None:
        """Return the volume that contains a path."""
        mounts = {mount["mountPath"]: mount["name"] for mount in self.spec.get("volumeMounts", ())}
        inside = [where for where in mounts if path == where or path.startswith(f"{where}/")]
        return mounts[max(inside, key=len)] if inside else None


class Rendered:
    def __init__(self, objects: list[Object]) -> None:
        self.objects = objects

    def of_kind(self, *kinds: str) -> list[Object]:
        return [one for one in self.objects if one["kind"] in kinds]

    def named(self, kind: str, name: str) -> Object:
        """Find an object by its name, without the content digest that kustomize appends."""
        found = [one for one in self.of_kind(kind) if re.sub(r"-[a-z0-9]{10}$", "", one["metadata"]["name"]) == name]
        assert len(found) == 1, f"{len(found)} objects {kind} {name}"
        return found[0]

    @property
    def workloads(self) -> list[Object]:
        return self.of_kind("Deployment", "StatefulSet", "Job")

    @property
    def place(self) -> Mapping[str, str]:
        return dict(self.named("ConfigMap", "place")["data"])

    def names_of_pods(self) -> Iterator[str]:
        """Yield the names of pods of StatefulSets, which are stable."""
        for one in self.of_kind("StatefulSet"):
            yield from (f"{one['metadata']['name']}-{number}" for number in range(one["spec"]["replicas"]))

    def containers(self) -> Iterator[Container]:
        for workload in self.workloads:
            template = workload["spec"]["template"]
            for spec in [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]:
                yield Container(
                    pod=template["metadata"]["labels"][COMPONENT],
                    spec=spec,
                    template=template,
                    variables={variable["name"]: self._value(variable) for variable in spec.get("env", ())},
                )

    def container(self, name: str) -> Container:
        return next(one for one in self.containers() if one.spec["name"] == name)

    def _value(self, variable: Object) -> str:
        source = variable.get("valueFrom", {})
        if "configMapKeyRef" in source:
            ref = source["configMapKeyRef"]
            maps = {one["metadata"]["name"]: one["data"] for one in self.of_kind("ConfigMap")}
            return str(maps[ref["name"]][ref["key"]])
        return str(variable.get("value", "made-up"))


@functools.cache
def render(overlay: str, *components: str) -> Rendered:
    """Render an overlay; `components` are added as in an overlay of one's own."""
    if not components:
        return _rendered(K8S / "overlays" / overlay)
    told = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "namespace": "streamrl"}
    laid = {"resources": [f"../{overlay}"], "components": [f"../../components/{name}" for name in components]}
    return render_own({**told, **laid})


def render_own(told: Object) -> Rendered:
    """Render an overlay of one's own, with paths as from a folder beside the shipped ones."""
    with tempfile.TemporaryDirectory() as made:
        folder, beside = Path(made).resolve(), K8S / "overlays" / "own"
        named = {key: told.get(key, ()) for key in ("resources", "components")}
        paths = {key: [os.path.relpath(beside / path, folder) for path in found] for key, found in named.items()}
        (folder / "kustomization.yaml").write_text(yaml.safe_dump({**told, **paths}))
        return _rendered(folder)


def _rendered(folder: Path) -> Rendered:
    """Without kubectl the test is skipped, except in CI."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        assert not os.environ.get("CI"), "install kubectl: the manifests are rendered by `kubectl kustomize`"
        pytest.skip("kubectl is not installed; it renders the manifests")
    words = [kubectl, "kustomize", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    objects = [one for one in yaml.safe_load_all(done.stdout) if one]
    return Rendered([*objects, *_made_by_trainer(objects)])


def _made_by_trainer(objects: list[Object]) -> Iterator[Object]:
    """Yield the Job that Kubeflow's Trainer makes from a TrainJob and its runtime, named like the TrainJob."""
    runtimes = {one["metadata"]["name"]: one for one in objects if one["kind"] == "TrainingRuntime"}
    for one in objects:
        if one["kind"] == "TrainJob":
            (made,) = runtimes[one["spec"]["runtimeRef"]["name"]]["spec"]["template"]["spec"]["replicatedJobs"]
            pods = one["spec"]["trainer"]["numNodes"]
            spec = {**made["template"]["spec"], "parallelism": pods, "completions": pods}
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": one["metadata"], "spec": spec}
