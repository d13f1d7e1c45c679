"""A pod's volumes, laid as kubelet lays them: owners, modes, secrets, and memory of a limited size.

claim       a folder of the test's, the group's when it may be written
emptyDir    a folder of the pod's own, 2777; with `medium: Memory` a tmpfs of its `sizeLimit`
secret      files of root's for the pod's group, by `defaultMode`; in pods that run they follow what is changed
configMap   files of root's, 0644
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.protocol.transport.acl import SERVERS
from tests.faults.judged.tls import make_certificate
from tests.images.engine import Engine
from tests.images.judged import ACL
from tests.manifest_world import Object, Rendered

# What k8s/README.md has people put into their secrets.
_KEYS: Mapping[str, Sequence[str]] = {
    "redis-passwords": ("worker", "learner", "monitor", "operator"),
    "reward-token": ("token",),
    "dashboard-token": ("token",),
}
_TLS = "redis-tls"
_SENTINEL = "sentinel"  # the workload; servers that follow one another have passwords, too
_PUBLIC = ("tls.crt", "ca.crt")
_LEAST_CHARS = 30  # of a line that says something: the last of a key may be short
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mounted:
    """A secret's files in a pod."""

    name: str
    keys: Sequence[str]
    place: Path
    group: int
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Volumes:
    """Of all pods of a namespace: what several share, and what each has alone."""

    engine: Engine
    rendered: Rendered
    folder: Path
    changes: str  # settings over those of the overlay's run.yaml
    values: dict[tuple[str, str], str] = field(default_factory=dict)  # of secrets, as they are now
    told: set[str] = field(default_factory=set)  # lines of all that there ever were
    _mounted: list[_Mounted] = field(default_factory=list)

    def claim(self, name: str) -> Path:
        return self.folder / "claims" / name

    def secret(self, name: str, key: str) -> str:
        return self.values[name, key]

    def fill_secrets(self) -> None:
        self.change({(name, key): secrets.token_hex(32) for name, keys in _KEYS.items() for key in keys})
        if any(one["metadata"]["name"] == _SENTINEL for one in self.rendered.workloads):
            self.change({("redis-passwords", name): secrets.token_hex(32) for name in SERVERS})
        if any(_TLS in json.dumps(one) for one in self.rendered.workloads):
            self.change(self.certificate())

    def certificate(self) -> dict[tuple[str, str], str]:
        """Another one of Redis, which is its own authority."""
        folder = self.folder / f"certificate-{secrets.token_hex(2)}"
        folder.mkdir()
        certificate, key = (path.read_text() for path in make_certificate(folder, of="DNS:redis"))
        return {(_TLS, "tls.crt"): certificate, (_TLS, "tls.key"): key, (_TLS, "ca.crt"): certificate}

    def change(self, values: Mapping[tuple[str, str], str]) -> None:
        """Secrets, and as kubelet does some time later, the files of those that have them."""
        self.values.update(values)
        hidden = [value for (_, key), value in values.items() if key not in _PUBLIC]
        lines = {line for value in hidden for line in value.splitlines()}
        self.told.update(line for line in lines if len(line) >= _LEAST_CHARS and not line.startswith("-----"))
        for one in self._mounted:
            self._write_secret(one)

    def lay(self, spec: Object, pod: str, claims: Sequence[Object] = ()) -> dict[str, Path]:
        """Of a pod's spec, by their names; `claims`: the templates of a StatefulSet."""
        group = int(spec["securityContext"]["fsGroup"])
        laid = {}
        for one in claims:
            laid[one["metadata"]["name"]] = self._claim(f"{one['metadata']['name']}-{pod}", group, read_only=False)
        for volume in spec["volumes"]:
            laid[volume["name"]] = self._volume(volume, self.folder / "pods" / pod / volume["name"], group)
        return laid

    def let_in_judge(self, laid: Mapping[str, Path]) -> None:
        """Among the users of Redis, in the pod that has made them: a tmpfs, which podman's mounts alone show."""
        if users := laid.get("acl"):
            self.engine.inside("sh", "-ec", 'echo "$0" >> "$1"', ACL, str(users / "users.acl"))

    def overfull(self, spec: Object, laid: Mapping[str, Path], pod: str) -> list[str]:
        """The emptyDirs on disk beyond their limit, for which kubelet evicts a pod; in memory the kernel refuses."""
        limits = {one["name"]: one["emptyDir"] for one in spec["volumes"] if "emptyDir" in one}
        held = {
            name: (_num_bytes_in(laid[name]), num_bytes(told["sizeLimit"]))
            for name, told in limits.items()
            if told.get("medium") != "Memory"
        }
        return [f"{pod}: {name} holds {has:,} bytes of {most:,}" for name, (has, most) in held.items() if has > most]

    def _volume(self, volume: Object, place: Path, group: int) -> Path:
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]
            return self._claim(str(claim["claimName"]), group, read_only=bool(claim.get("readOnly")))
        place.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume:
            self._empty(volume["emptyDir"], place, group)
        elif "secret" in volume:
            name = str(volume["secret"]["secretName"])
            keys = [item["key"] for item in volume["secret"].get("items", ())]
            keys = keys or [key for secret, key in self.values if secret == name]
            mode = int(volume["secret"]["defaultMode"])
            self._mounted.append(_Mounted(name=name, keys=keys, place=place, group=group, mode=mode))
            self._write_secret(self._mounted[-1])
        else:
            _write(self._config_map(str(volume["configMap"]["name"])), place, group, 0o644)
        return place

    def _write_secret(self, one: _Mounted) -> None:
        _write({key: self.secret(one.name, key) for key in one.keys}, one.place, one.group, one.mode)

    def _claim(self, name: str, group: int, *, read_only: bool) -> Path:
        """`fsGroupChangePolicy: OnRootMismatch`: what lies in it is left as it is when its root is right."""
        place = self.claim(name)
        place.mkdir(parents=True, exist_ok=True)
        if not read_only and place.stat().st_gid != group:
            os.chown(place, -1, group)
            place.chmod(0o2775)
        return place

    def _empty(self, told: Object, place: Path, group: int) -> None:
        if told.get("medium") == "Memory":
            options = f"size={num_bytes(told['sizeLimit'])},mode=2777,gid={group}"
            self.engine.inside("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place))
        else:
            os.chown(place, -1, group)
            place.chmod(0o2777)

    def _config_map(self, name: str) -> dict[str, str]:
        files = next(dict(one["data"]) for one in self.rendered.of_kind("ConfigMap") if one["metadata"]["name"] == name)
        if "run.yaml" in files:
            files |= {"overlay.yaml": files["run.yaml"], "run.yaml": f"extends: overlay.yaml\n{self.changes}"}
        return files


def num_bytes(quantity: str) -> int:
    """`2Gi`, as Kubernetes writes it."""
    found = re.fullmatch(r"(\d+)(\w*)", quantity)
    assert found, quantity
    return int(found[1]) * (_UNITS[found[2]] if found[2] else 1)


def _num_bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # passes over what has just been removed
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


def num_cores(quantity: str) -> float:
    """`100m` or `2`."""
    return int(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def _write(files: Mapping[str, str], place: Path, group: int, mode: int) -> None:
    """Each at once: who reads it meanwhile has the old or the new one."""
    for name, text in files.items():
        path = place / f".{name}"
        path.write_text(text)
        path.chmod(mode)
        os.chown(path, 0, group)
        path.rename(place / name)
