"""What `kubectl kustomize` makes of the manifests. Needs kubectl 1.21 or later: `make test-deploy`.

The rendered objects are those of the files, apart from names, so test_kubernetes.py holds for them too.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from .test_kubernetes import BASE, CONFIGS, KUSTOMIZATION, OBJECTS, OVERLAY, read

Object = dict[str, Any]


def render(directory: Path) -> dict[str, Object]:
    assert shutil.which("kubectl"), "kubectl is not installed"
    done = subprocess.run(
        ["kubectl", "kustomize", str(directory)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "kustomize warns: " + done.stderr
    objects = list(yaml.safe_load_all(done.stdout))
    by_kind = {o["kind"]: o for o in objects}
    assert len(by_kind) == len(objects)
    return by_kind


@pytest.fixture(scope="module")
def base() -> dict[str, Object]:
    return render(BASE)


@pytest.fixture(scope="module")
def overlay() -> dict[str, Object]:
    return render(OVERLAY)


def config_volume(deployment: Object) -> Object:
    volume: Object = deployment["spec"]["template"]["spec"]["volumes"][0]["configMap"]
    return volume


def test_base_is_the_files_and_the_generated_config(base: dict[str, Object]) -> None:
    expected = copy.deepcopy(OBJECTS)
    config_volume(expected["Deployment"])["name"] = base["ConfigMap"]["metadata"]["name"]
    assert {kind: o for kind, o in base.items() if kind != "ConfigMap"} == expected


def test_overlay_changes_the_namespace_the_config_and_the_image(overlay: dict[str, Object]) -> None:
    kustomization = read(OVERLAY / "kustomization.yaml")
    assert overlay.keys() == {*OBJECTS, "ConfigMap"}
    assert {o["metadata"]["namespace"] for o in overlay.values()} == {kustomization["namespace"]}
    (container,) = overlay["Deployment"]["spec"]["template"]["spec"]["containers"]
    (image,) = kustomization["images"]
    assert container["image"] == f"{image['name']}:{image['newTag']}"


@pytest.mark.parametrize("name", CONFIGS)
def test_the_mounted_config_is_the_file_and_rolls_the_pods(name: str, request: pytest.FixtureRequest) -> None:
    objects: dict[str, Object] = request.getfixturevalue("base" if name == "base" else "overlay")
    assert objects["ConfigMap"]["data"] == {"kvroute.yaml": CONFIGS[name].read_text()}
    (generator,) = KUSTOMIZATION["configMapGenerator"]
    generated = objects["ConfigMap"]["metadata"]["name"]
    assert generated.startswith(f"{generator['name']}-")
    assert config_volume(objects["Deployment"])["name"] == generated


def test_a_changed_config_has_another_name(base: dict[str, Object], overlay: dict[str, Object]) -> None:
    assert base["ConfigMap"]["metadata"]["name"] != overlay["ConfigMap"]["metadata"]["name"]
