"""Torn down before a snapshot, built anew after it: what connects an app's processes.

Collective communication (NCCL on GPUs, gloo on CPUs) does not survive being saved: its
connections, and what it has registered with devices, are not there any more. An app of several
processes calls `rebuilt` once in each of them instead of making its process group itself:

    from nagara.snapshot import listen
    from nagara.snapshot.communicators import rebuilt

    rebuilt(lambda: torch.distributed.init_process_group("nccl", rank=rank, world_size=2))
    listen()

and says so in its app file: `snapshot.communicators = "rebuilt"`. Building is collective: the
node calls the hooks of all processes at once, and waits for all of them. The app has to be quiet
at that time: no request is under way, and no collective call is pending. What holds on to an old
group (`DistributedDataParallel`, captured graphs with collectives in them) has to be made anew
by the app's own `after_restore` function, registered after `rebuilt`.
"""

from collections.abc import Callable

from nagara.snapshot.hooks import after_restore, before_snapshot


def rebuilt(build: Callable[[], object], tear_down: Callable[[], object] | None = None) -> None:
    """Builds now, and has it torn down before a snapshot and built again after it.

    Args:
        build: makes the process group; the same in every process but for the rank.
        tear_down: None destroys torch's process groups.
    """
    build()
    before_snapshot(tear_down or _destroy)
    after_restore(build)


def _destroy() -> None:
    import torch.distributed

    torch.distributed.destroy_process_group()
