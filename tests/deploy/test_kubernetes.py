"""The kustomize base and its example overlay, read as they lie; check_kustomize.py renders them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from kvroute.config import Config, load

K8S = Path(__file__).parents[2] / "deploy" / "k8s"
BASE = K8S / "base"
OVERLAY = K8S / "overlays" / "example"
UNITS = {"Mi": 2**20, "Gi": 2**30}

Object = dict[str, Any]


def read(path: Path) -> Object:
    value: Object = yaml.safe_load(path.read_text())
    return value


KUSTOMIZATION = read(BASE / "kustomization.yaml")
OBJECTS = {o["kind"]: o for o in (read(BASE / name) for name in KUSTOMIZATION["resources"])}
POD: Object = OBJECTS["Deployment"]["spec"]["template"]["spec"]
CONTAINER: Object = POD["containers"][0]
CONFIGS = {"base": BASE / "kvroute.yaml", "example": OVERLAY / "kvroute.yaml"}


def config(name: str) -> Config:
    return load(CONFIGS[name], {})


def byte_count(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def test_objects() -> None:
    assert set(OBJECTS) == {"Deployment", "Service", "ServiceAccount", "PodDisruptionBudget"}
    assert {p.name for p in BASE.glob("*.yaml")} == {
        *KUSTOMIZATION["resources"],
        "kustomization.yaml",
        "kvroute.yaml",
    }


def test_every_selector_finds_the_pods() -> None:
    labels = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = [
        OBJECTS["Deployment"]["spec"]["selector"]["matchLabels"],
        OBJECTS["Service"]["spec"]["selector"],
        OBJECTS["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        *(c["labelSelector"]["matchLabels"] for c in POD["topologySpreadConstraints"]),
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)


def test_pod_and_container_are_confined() -> None:
    assert POD["securityContext"]["runAsNonRoot"] is True
    assert POD["securityContext"]["runAsUser"] > 0
    assert POD["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_no_credential_of_the_cluster_is_mounted() -> None:
    assert POD["serviceAccountName"] == OBJECTS["ServiceAccount"]["metadata"]["name"]
    assert POD["automountServiceAccountToken"] is False
    assert OBJECTS["ServiceAccount"]["automountServiceAccountToken"] is False


def test_the_service_does_not_set_our_environment() -> None:
    """A Service called kvroute would give its pods KVROUTE_PORT=tcp://..., which is our own setting."""
    assert POD["enableServiceLinks"] is False


@pytest.mark.parametrize(
    ("probe", "path"),
    [("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")],
)
def test_probes(probe: str, path: str) -> None:
    """Only readiness depends on the workers, or a fleet that is down would restart every gateway."""
    assert CONTAINER[probe]["httpGet"] == {"path": path, "port": "http"}


def test_port_is_the_same_in_the_configuration_the_pod_and_the_service() -> None:
    (port,) = CONTAINER["ports"]
    (service_port,) = OBJECTS["Service"]["spec"]["ports"]
    annotations = OBJECTS["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert service_port["targetPort"] == port["name"]
    for name in CONFIGS:
        assert config(name).port == port["containerPort"] == int(annotations["prometheus.io/port"])
        assert config(name).host == "0.0.0.0"


def test_the_configuration_is_where_the_arguments_say() -> None:
    (generated,) = KUSTOMIZATION["configMapGenerator"]
    (volume,) = [v for v in POD["volumes"] if "configMap" in v]
    (mount,) = [m for m in CONTAINER["volumeMounts"] if m["name"] == volume["name"]]
    assert volume["configMap"]["name"] == generated["name"]
    assert CONTAINER["args"] == ["serve", "--config", f"{mount['mountPath']}/{generated['files'][0]}"]


@pytest.mark.parametrize("name", CONFIGS)
def test_pods_are_given_time_to_drain(name: str) -> None:
    shutdown = config(name).shutdown
    assert POD["terminationGracePeriodSeconds"] >= shutdown.keep_serving_s + shutdown.drain_s + 5
    assert "lifecycle" not in CONTAINER


@pytest.mark.parametrize("name", CONFIGS)
def test_memory_holds_what_the_configuration_allows(name: str) -> None:
    bounded = config(name).limits.buffered_bytes + config(name).prefix_index.max_bytes
    assert byte_count(CONTAINER["resources"]["limits"]["memory"]) >= bounded + 512 * 2**20
    assert "cpu" not in CONTAINER["resources"]["limits"]
    assert CONTAINER["resources"]["requests"].keys() == {"cpu", "memory"}


def test_a_rollout_or_a_drained_node_leaves_a_gateway() -> None:
    spec = OBJECTS["Deployment"]["spec"]
    assert spec["replicas"] > OBJECTS["PodDisruptionBudget"]["spec"]["maxUnavailable"]
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_the_overlay_names_workers_one_by_one() -> None:
    assert config("base").workers == ()
    workers = config("example").workers
    assert len(workers) > 1
    assert len({urlsplit(w.url).netloc for w in workers}) == len(workers)
