"""The manifests of `examples/kubernetes`.

Pods and all that is Kubernetes' own are checked against its schema. KubeRay's RayCluster is checked
against what its reference documents of the fields that are used here, written down by hand: no
package ships the schema of its CRD. A field that is not known is a fault.
"""

# ruff: noqa: N815 - names are Kubernetes'

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import click
import jsonschema
import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nagara.cli.up import up
from nagara.pool.poolfile import read_pool_file

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples/kubernetes"
SCHEMA = json.loads((Path(__file__).parent / "vendor/kubernetes-daemonset.json").read_text())
POD = "io.k8s.api.core.v1.PodTemplateSpec"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: str = Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=50)
    labels: dict[str, str] = {}


class HeadGroup(Strict):
    """ray.io/v1 HeadGroupSpec."""

    serviceType: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    rayStartParams: dict[str, str]  # values are texts, numbers too
    template: dict[str, Any]


class WorkerGroup(Strict):
    """ray.io/v1 WorkerGroupSpec."""

    groupName: str
    replicas: int = Field(ge=0)
    minReplicas: int = Field(ge=0)
    maxReplicas: int = Field(ge=0)
    rayStartParams: dict[str, str]
    template: dict[str, Any]


class ClusterSpec(Strict):
    """ray.io/v1 RayClusterSpec."""

    rayVersion: str = Field(pattern=r"^\d+\.\d+\.\d+$")
    enableInTreeAutoscaling: bool = False
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


class RayCluster(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: ClusterSpec


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def pod_faults(template: object) -> list[str]:
    schema = {**SCHEMA, "$ref": f"#/$defs/{POD}"}
    for key in ("type", "properties", "required", "additionalProperties"):
        schema.pop(key, None)
    faults = jsonschema.Draft202012Validator(schema).iter_errors(template)
    return [f"{fault.json_path}: {fault.message}" for fault in faults]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    spec = documents("raycluster.yaml")[0]["spec"]
    yield "head", spec["headGroupSpec"]["template"]
    for group in spec["workerGroupSpecs"]:
        yield group["groupName"], group["template"]
    yield "control", by_kind("Deployment")["spec"]["template"]


def by_kind(kind: str) -> dict[str, Any]:
    (found,) = (one for one in documents("control.yaml") if one["kind"] == kind)
    return found


def container(template: dict[str, Any]) -> dict[str, Any]:
    (found,) = template["spec"]["containers"]
    return found


def test_the_ray_cluster_has_only_fields_that_kuberay_documents() -> None:
    (document,) = documents("raycluster.yaml")
    RayCluster.model_validate(document)
    document["spec"]["workerGroupSpecs"][0]["minReplica"] = 1
    document["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    with pytest.raises(ValidationError) as found:
        RayCluster.model_validate(document)
    assert found.value.error_count() == 2


def test_every_pod_is_one_for_kubernetes() -> None:
    for name, template in pods():
        assert pod_faults(template) == [], name
        del container(template)["image"]
        container(template)["arguments"] = []
        assert pod_faults(template) != [], "the schema refuses nothing"


def test_machines_have_the_rights_and_places_of_the_daemon_set() -> None:
    machine = container(dict(pods())["machines"])
    text = (ROOT / "packaging/kubernetes/agent.yaml").read_text()
    agent = container(yaml.safe_load(text)["spec"]["template"])
    assert machine["securityContext"] == agent["securityContext"]
    places = {one["mountPath"] for one in machine["volumeMounts"]}
    assert {"/var/lib/nagara", "/sys/fs/cgroup", "/dev/fuse"} <= places


def test_names_that_manifests_share_are_the_same() -> None:
    (ray,) = documents("raycluster.yaml")
    arguments = container(dict(pods())["control"])["args"]
    assert f"ray://{ray['metadata']['name']}-head-svc:10001" in arguments, "KubeRay calls it so"
    template = by_kind("Deployment")["spec"]["template"]
    assert by_kind("Service")["spec"]["selector"] == template["metadata"]["labels"]
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in template["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    assert claims == [by_kind("PersistentVolumeClaim")["metadata"]["name"]]
    for _, pod in pods():
        known = {volume["name"] for volume in pod["spec"].get("volumes", ())}
        assert {one["name"] for one in container(pod).get("volumeMounts", ())} <= known
    images = {container(pod)["image"] for _, pod in pods()}
    assert len(images) == 1, "Ray wants the same Python everywhere"


def test_control_is_started_with_options_that_there_are() -> None:
    arguments = container(dict(pods())["control"])["args"]
    after = arguments[arguments.index("up") + 1 :]
    with click.Context(up) as context:
        up.make_parser(context).parse_args(list(after))


def test_the_pool_file_is_one_for_the_machines_there_are(tmp_path: Path) -> None:
    text = by_kind("ConfigMap")["data"]["pool.toml"]
    (tmp_path / "pool.toml").write_text(text)
    read_pool_file(tmp_path / "pool.toml")
    pool = tomllib.loads(text)
    (provider,) = pool["provider"].values()
    (group,) = documents("raycluster.yaml")[0]["spec"]["workerGroupSpecs"]
    (added,) = provider["adds"]
    wanted = container(group["template"])["resources"]["requests"]
    assert (str(added["cpu"]), f"{added['memory_gib']}Gi") == (wanted["cpu"], wanted["memory"])
    assert added["most"] == group["maxReplicas"]
    assert provider["kind"] == "ray"
    assert re.fullmatch(r"/\S+", provider["state"])
