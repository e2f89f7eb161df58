"""Has the images of apps brought to the machine that will run them, before they are deployed.

Belongs to the control process's loop.
"""

from collections.abc import Sequence
from dataclasses import replace

from nagara.contract.node import Node
from nagara.contract.replica import ImageOrder, ModelMount
from nagara.control.app import App


async def with_images(
    node: Node, apps: Sequence[tuple[App, tuple[ModelMount, ...]]]
) -> tuple[App, ...]:
    """The apps, each naming the very tree that its image is now.

    Args:
        apps: each with its models as the machine has them.

    Raises:
        BadImageError: naming the image that cannot be had.
    """
    brought = []
    for app, models in apps:
        if app.image == "host":
            brought.append(app)
            continue
        report = await node.bring_image(ImageOrder(app.tenant, app.name, app.image, models))
        brought.append(replace(app, image_index=report.index))
    return tuple(brought)
