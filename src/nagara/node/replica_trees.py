"""What lies below a replica's own layer: this machine's tree, or an image with its models.

It knows the differences between the two, so that the runtime need not. Belongs to the node's
loop; whatever waits for a disk or a daemon goes through a worker thread.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nagara.contract.node import NodeError
from nagara.contract.replica import FilesReport, ModelMount, ReplicaSpec
from nagara.image.host import HostImage
from nagara.image.mount_api import mount_overlay_on
from nagara.image.mounting import Gathering
from nagara.image.mounts import mount_overlay, object_behind
from nagara.node.owned_tasks import in_thread
from nagara.node.replica_folder import ReplicaFolder
from nagara.node.replica_images import (
    HOST,
    NodeImages,
    ReplicaImages,
)
from nagara.node.run_settings import SYSTEM_PATH, RunSettings, run_settings
from nagara.sandbox.bundle import Bind
from nagara.snapshot.resident import Part
from nagara.store.names import ObjectName


@dataclass(frozen=True, slots=True)
class Tree:
    """One replica's tree and how its command is run in it."""

    layers: tuple[Path, ...]  # read-only, topmost first
    data: tuple[Path, ...]  # they only give bytes to the files of images
    binds: tuple[Bind, ...]
    run: RunSettings
    images: ReplicaImages | None

    def mount(self, replica: ReplicaFolder, above: Sequence[Path] = ()) -> None:
        """Puts the tree below the replica's own layer at its root.

        Args:
            above: further read-only layers on top, such as a frozen one.
        """
        layers = (*above, *self.layers)
        if self.images is None:
            mount_overlay(layers, replica.upper, replica.work, replica.root)
        else:
            # All in one overlay: the checkpoint tool cannot save a file that is mapped from one
            # overlay inside another.
            mount_overlay_on(
                layers,
                replica.root,
                data=self.data,
                upper=replica.upper,
                work=replica.work,
            )


class ReplicaTrees:
    """The trees of one node's replicas.

    Args:
        models: folder of the machine's model folders.
        programs: folder of programs that replicas of the machine's own tree find first.
    """

    def __init__(
        self, host: HostImage, images: NodeImages, *, models: Path, programs: Path
    ) -> None:
        self.images = images
        self._host = host
        self._models = models
        self._path = f"{programs}:{SYSTEM_PATH}"
        self._needed = host.bound_folders()
        self._shown: dict[str, Tree] = {}

    async def prepare(
        self,
        replica: ReplicaFolder,
        spec: ReplicaSpec,
        *,
        is_restore: bool,
        gathering: Gathering | None = None,
    ) -> Tree:
        """The tree for a replica, which holds it until `release`; `gathering` brings its contents.

        Raises:
            NodeError: the image or a model is not there.
        """
        if spec.image == HOST:
            tree = self._host_tree(spec)
            if not is_restore:
                self._host.prepare_upper(replica.upper)
        else:
            mount = self.images.mount
            images = await in_thread(
                mount, replica.name, spec, is_restore=is_restore, gathering=gathering
            )
            run = run_settings(images.image)
            tree = Tree(images.layers, images.data_layers, (), run, images)
        self._shown[replica.name] = tree
        return tree

    def _host_tree(self, spec: ReplicaSpec) -> Tree:
        for model in spec.models:
            if not (self._models / model.name).is_dir():
                raise NodeError(
                    "there is no such model on this machine",
                    where=model.name,
                    hint="nagara models add",
                )
        needed = tuple(Bind(path, path) for path in self._needed)
        binds = needed + tuple(self._model_bind(model) for model in spec.models)
        return Tree(self._host.layers, (), binds, RunSettings({"PATH": self._path}), None)

    async def release(self, replica: ReplicaFolder) -> None:
        """Takes back what the replica holds. May be repeated; after its mounts are gone."""
        self._shown.pop(replica.name, None)
        await in_thread(self.images.release, replica.name)

    def report(
        self, replica: ReplicaFolder, spec: ReplicaSpec
    ) -> tuple[FilesReport, Callable[[], None] | None]:
        """How the files of a start became visible; and work left for afterwards. Blocking."""
        tree = self._shown[replica.name]
        if tree.images is None:
            return FilesReport(HOST, HOST), None
        return self.images.report(tree.images, spec.tenant)

    def fingerprint(self, spec: ReplicaSpec) -> list[Any]:
        """Equal for equal trees run in the same way; part of a snapshot's key."""
        if spec.image == HOST:
            return [self._host.fingerprint(), self._path, *map(str, self._needed)]
        return [spec.image_index, *run_settings(self.images.find(spec)).fingerprint()]

    def weights(self, spec: ReplicaSpec) -> list[Path]:
        """Files of the app's models that its start will read in full. Blocking."""
        if spec.image != HOST:
            return self.images.weights(spec)
        folders = (self._models / model.name for model in spec.models)
        return [path for folder in folders for path in folder.glob("*.safetensors")]

    def objects_of(
        self, replica: ReplicaFolder, parts: Iterable[Part]
    ) -> dict[ObjectName, set[int]]:
        """The objects behind parts of a replica's files, each with the numbers of its parts.
        Blocking.

        What lies in the replica's own layer, or comes from the machine's tree, has none.
        """
        tree = self._shown.get(replica.name)
        if tree is None or (images := tree.images) is None:
            return {}

        @cache
        def behind(path: str) -> ObjectName | None:
            own = replica.upper / path.lstrip("/")
            is_own = own.exists() or own.is_symlink()
            return None if is_own else object_behind(images.layers, path)

        found = defaultdict[ObjectName, set[int]](set)
        for path, number in parts:
            if (name := behind(path)) is not None:
                found[name].add(number)
        return found

    def machine_folders(self, spec: ReplicaSpec) -> Sequence[Path] | None:
        """Folders of the machine that a replica sees at the same paths; None: nothing of it."""
        return self._needed if spec.image == HOST else None

    def binds(self, spec: ReplicaSpec) -> dict[Path, Path]:
        """Folders shown to a replica: path inside → path on the machine."""
        if spec.image != HOST:
            return {}
        shown = {path: path for path in self._needed}
        models = (self._model_bind(model) for model in spec.models)
        return shown | {bind.target: bind.source for bind in models}

    def _model_bind(self, model: ModelMount) -> Bind:
        return Bind(self._models / model.name, Path("/models") / model.name)
