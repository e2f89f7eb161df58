"""Ray's own autoscaler, and a cloud for it whose machines are nodes of Ray on this host.

The cloud is Ray's own too, the one of its tests; here each machine has a state folder of its own.
Ray's processes import this module.
"""

import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)
from ray_cluster import RayCluster

IDLE_S = 10.0
CORES = 2  # of a machine that is added
DEVICES: dict[str, dict[str, int]] = {"small": {}, "gpu": {"GPU": 2, "accelerator_type:H100": 1}}


class Cloud(FakeMultiNodeProvider):  # type: ignore[misc]
    """Called from the autoscaler's process, one machine after the other."""

    def _create_node_with_resources_and_labels(self, *order: Any) -> None:
        number = self._next_node_id + 1
        os.environ["NAGARA_STATE"] = f"{self.provider_config['folder']}/added-{number}"
        super()._create_node_with_resources_and_labels(*order)


def scaled_cluster(folder: Path, most: int, *, is_v2: bool) -> RayCluster:
    """A head alone, whose autoscaler adds up to `most` machines."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    # Not in the range of Ray's workers, which it would refuse.
    port = port if port > 20000 else port + 20000
    file = Path(tempfile.mkdtemp(dir=folder)) / "autoscaler.yaml"
    file.write_text(json.dumps(_settings(folder, port, most)))
    return RayCluster(
        folder,
        (f"--autoscaling-config={file}", f"--port={port}"),
        {
            "PYTHONPATH": str(Path(__file__).parent),
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": str(int(is_v2)),
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        },
    )


def _settings(folder: Path, port: int, most: int) -> dict[str, Any]:
    lists = [
        "initialization_commands", "setup_commands", "head_setup_commands",
        "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands",
        "cluster_synced_files", "rsync_exclude", "rsync_filter",
    ]  # fmt: skip
    return {
        "cluster_name": "nagara",
        "max_workers": most,
        "idle_timeout_minutes": IDLE_S / 60,
        "upscaling_speed": 1.0,
        "provider": {
            "type": "external",
            "module": f"{Path(__file__).stem}.{Cloud.__name__}",
            "folder": str(folder),
            "gcs_address": f"127.0.0.1:{port}",
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {},
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "available_node_types": {
            FAKE_HEAD_NODE_TYPE: {
                "resources": {"CPU": 1}, "node_config": {}, "max_workers": 0,
            },
            **{
                name: {
                    "resources": {"CPU": CORES, "object_store_memory": 80_000_000, **devices},
                    "node_config": {}, "min_workers": 0, "max_workers": most,
                }
                for name, devices in DEVICES.items()
            },
        },
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in lists},
    }  # fmt: skip
