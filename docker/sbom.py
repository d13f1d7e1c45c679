"""What is installed beside this interpreter, as a CycloneDX document: `python sbom.py FILE`.

The images hold theirs in /opt/streamrl/sbom.cdx.json. Python packages alone; those of the system stand in the base
image's own. Needs nothing but the standard library, and the same packages give the same document.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_MOST_LICENSE_CHARS = 100  # a longer one is the text itself


def document() -> dict[str, Any]:
    found = {_name(one): one for one in distributions()}
    components = [_component(name, one) for name, one in sorted(found.items())]
    refs = {component["name"]: component["bom-ref"] for component in components}
    depends = [
        {"ref": refs[name], "dependsOn": sorted({refs[other] for other in _needed(one) if other in refs})}
        for name, one in sorted(found.items())
    ]
    python = {"type": "platform", "name": "python", "version": sys.version.split()[0]}
    content = {"metadata": {"component": python}, "components": components, "dependencies": depends}
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": "1.5", "serialNumber": f"urn:uuid:{serial}", "version": 1}
    return {**head, **content}


def _component(name: str, one: Distribution) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{one.version}"
    told: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": one.version, "purl": purl}
    metadata = one.metadata
    if expression := metadata.get("License-Expression"):
        told["licenses"] = [{"expression": expression}]
    elif 0 < len(license := metadata.get("License") or "") <= _MOST_LICENSE_CHARS:
        told["licenses"] = [{"license": {"name": license}}]
    return told


def _needed(one: Distribution) -> Iterator[str]:
    """Without those of extras, which nobody may have asked for."""
    for line in one.requires or ():
        if "extra ==" not in line and (found := _NAME.match(line)):
            yield _normal(found[0])


def _name(one: Distribution) -> str:
    return _normal(one.metadata["Name"])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(document(), indent=1) + "\n")
