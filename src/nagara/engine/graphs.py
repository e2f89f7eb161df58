"""Captured graphs of whole steps: one launch instead of a thousand.

One graph for each shape and buffer set, because a graph has the addresses it was captured with.
Graphs are captured at the first step of their shape, after that step has run as usual, and share
one memory pool: they are replayed one after the other on one stream, and a graph's result is used
before the next one starts. Called on the compute stream only.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nagara.engine.graph_shapes import GraphShape

log = logging.getLogger("nagara.engine")

Work = Callable[[], torch.Tensor]


class Graph(Protocol):
    """Work that can be repeated on the same memory."""

    def replay(self) -> torch.Tensor:
        """Run it; the result lies in the same place each time."""


class GraphMaker(Protocol):
    """Captures work."""

    def capture(self, work: Work) -> Graph:
        """Record the work's operations without running them.

        Raises:
            RuntimeError: an operation cannot be captured.
        """


class StepGraphs:
    """The graphs captured so far. Where one cannot be captured, steps run as usual from then on."""

    def __init__(self, maker: GraphMaker) -> None:
        self._maker = maker
        self._graphs: dict[tuple[int, GraphShape], Graph] = {}
        self.is_usable = True
        self.replayed = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, buffers: int, shape: GraphShape, work: Work) -> torch.Tensor:
        """What `work` returns, by replaying it where it has been captured."""
        graph = self._graphs.get((buffers, shape))
        if graph is not None:
            self.replayed += 1
            return graph.replay()
        result = work()
        if self.is_usable:
            try:
                self._graphs[buffers, shape] = self._maker.capture(work)
            except RuntimeError as error:
                self.is_usable = False
                log.warning("steps are not captured as graphs: %s", error)
        return result

    def forget(self) -> None:
        """Drop all graphs: memory they refer to is about to go."""
        self._graphs.clear()


class CudaGraphs:
    """Graphs of the GPU, captured on the current stream (not the default one)."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Work) -> Graph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # Other threads may ask events for their state meanwhile: only this one is held to the rules
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
        return _CudaGraph(graph, result)


class _CudaGraph:
    def __init__(self, graph: Any, result: torch.Tensor) -> None:
        self._graph, self._result = graph, result

    def replay(self) -> torch.Tensor:
        self._graph.replay()
        return self._result


class RecordedGraphs:
    """Graphs on any device, by recording each operation: shows without a GPU what a replay does.

    As on the GPU nothing of the Python code runs again, and every operation reads and writes the
    memory it was recorded with. Slower than running the work as it is.
    """

    def capture(self, work: Work) -> Graph:
        recorder = _Recorder()
        with torch.inference_mode(), recorder:
            result = work()
        return _RecordedGraph(recorder.calls, result)


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class _RecordedGraph:
    def __init__(self, calls: list[Any], result: torch.Tensor) -> None:
        self._calls, self._result = calls, result

    def replay(self) -> torch.Tensor:
        with torch.inference_mode():
            for func, args, kwargs, out in self._calls:
                again = func(*args, **kwargs)
                for place, value in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    # A view shows the recorded memory already
                    if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                        place.copy_(value)
        return self._result
