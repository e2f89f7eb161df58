"""The flat forward pass of the Llama family on the CPU as one call of a C kernel.

The whole step, from embedding to logits, is one call that releases the GIL, so the threads that
plan and serve run beside it. Weights are read where the file is mapped. Every row is computed the
same way whatever its batch mates, chunk borders and thread count are.
Called on the compute stream only.
"""

import ctypes
from ctypes import Structure, c_float, c_int64, c_void_p

import torch

from nagara.engine.config import ModelConfig
from nagara.engine.errors import UnsupportedError
from nagara.engine.flat_weights import FlatWeights, Layer, Projection
from nagara.engine.inputs import StepInputs
from nagara.engine.kernels.build import load_kernel
from nagara.engine.rope import rope_frequencies
from nagara.engine.zeroed import lazy_zeros

BLOCK_SIZE = 16  # the kernel's own


class _Linear(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class _Layer(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("q", _Linear),
        ("k", _Linear),
        ("v", _Linear),
        ("o", _Linear),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("gate", _Linear),
        ("up", _Linear),
        ("down", _Linear),
    )


class _Shape(Structure):
    _fields_ = (
        *(
            (name, c_int64)
            for name in (
                "layers",
                "hidden",
                "heads",
                "kv_heads",
                "dim",
                "inner",
                "vocab",
                "window",
                "is_gelu",
                "cache_layer",
            )
        ),
        *((name, c_float) for name in ("eps", "norm_offset", "embed_scale", "angle_scale")),
    )


class _Step(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("rows", "samples", "table_width", "threads", "context")),
        *(
            (name, c_void_p)
            for name in (
                "ids",
                "positions",
                "row_run",
                "sample_rows",
                "table",
                "frequencies",
                "logits",
                "x",
                "qkv",
                "angles",
                "scores",
                "input",
                "inner",
                "keys",
                "values",
            )
        ),
    )


def why_not(config: ModelConfig, block_size: int) -> str | None:
    """What keeps the kernel from computing this shape; None if nothing does."""
    sizes = (config.hidden, config.intermediate, config.heads * config.head_dim)
    if any(size % 32 for size in sizes):
        return "a product's inner size is no multiple of 32"
    if config.head_dim % 16:
        return "the head's size is no multiple of 16"
    if config.heads % config.kv_heads:
        return "query heads do not divide evenly among the kv heads"
    if block_size != BLOCK_SIZE:
        return f"the block size is not {BLOCK_SIZE}"
    return None


class CFlatModel:
    """A decoder of the Llama family in C.

    Raises:
        UnsupportedError: the shape does not fit the kernel, or no compiler is there.
    """

    kernel = "c"
    is_graphable = False
    is_batch_invariant = True

    def __init__(
        self, config: ModelConfig, weights: FlatWeights, dtype: torch.dtype, block_size: int
    ) -> None:
        reason = why_not(config, block_size)
        if reason is not None:
            raise UnsupportedError(f"the C kernel does not fit: {reason}", where="kernel")
        self.config = config
        self._dtype = dtype
        self._library = load_kernel(is_bfloat16=dtype is torch.bfloat16)
        self._library.flat_step.restype = None
        self._weights = weights  # keeps the memory that the pointers below point to
        self._layers = (_Layer * config.layers)(*(_layer(layer) for layer in weights.layers))
        self._frequencies = rope_frequencies(config.rope, config.head_dim).contiguous()
        self._scratch: dict[str, torch.Tensor] = {}
        self.drop_cache()

    def make_cache(self, blocks: int, block_size: int) -> None:
        c = self.config
        if block_size != BLOCK_SIZE:
            raise UnsupportedError(f"the block size must be {BLOCK_SIZE}", where="block_size")
        shape = (c.layers, blocks, c.kv_heads, c.head_dim * BLOCK_SIZE)
        self._keys = lazy_zeros(shape, self._dtype, torch.device("cpu"))
        self._values = lazy_zeros(shape, self._dtype, torch.device("cpu"))
        self._shape = _Shape(
            layers=c.layers,
            hidden=c.hidden,
            heads=c.heads,
            kv_heads=c.kv_heads,
            dim=c.head_dim,
            inner=c.intermediate,
            vocab=c.vocab,
            window=c.sliding_window or 0,
            is_gelu=c.activation == "gelu_tanh",
            cache_layer=blocks * c.kv_heads * c.head_dim * BLOCK_SIZE,
            eps=c.norm_eps,
            norm_offset=c.norm_offset,
            angle_scale=c.rope.angle_scale,
            embed_scale=torch.tensor(c.embed_scale, dtype=self._dtype).item(),
        )

    def drop_cache(self) -> None:
        self._keys = self._values = torch.empty(0)
        self._scratch.clear()

    def clear_cache(self) -> None:
        self._keys.zero_()
        self._values.zero_()

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        c, w = self.config, self._weights
        rows, samples = len(inputs.ids), len(inputs.sample_rows)
        threads = torch.get_num_threads()
        context = inputs.table.shape[1] * BLOCK_SIZE
        widest = max(c.hidden, c.heads * c.head_dim)
        table = inputs.table.contiguous()
        logits = self._room("logits", (samples, c.vocab), torch.float32)
        step = _Step(
            rows=rows,
            samples=samples,
            table_width=table.shape[1],
            threads=threads,
            context=context,
            ids=inputs.ids.data_ptr(),
            positions=inputs.positions.data_ptr(),
            row_run=inputs.row_run.data_ptr(),
            sample_rows=inputs.sample_rows.data_ptr(),
            table=table.data_ptr(),
            frequencies=self._frequencies.data_ptr(),
            logits=logits.data_ptr(),
            keys=self._keys.data_ptr(),
            values=self._values.data_ptr(),
            **{
                name: self._room(name, shape, dtype).data_ptr()
                for name, shape, dtype in (
                    ("x", (rows, c.hidden), torch.float32),
                    ("qkv", (rows, (c.heads + 2 * c.kv_heads) * c.head_dim), torch.float32),
                    ("angles", (rows, c.head_dim), torch.float32),
                    ("scores", (threads, 4 * context), torch.float32),
                    ("input", (max(rows, samples), widest), self._dtype),
                    ("inner", (rows, c.intermediate), self._dtype),
                )
            },
        )
        self._library.flat_step(
            ctypes.byref(self._shape),
            self._layers,
            c_void_p(w.embedding.data_ptr()),
            c_void_p(w.norm.data_ptr()),
            c_void_p(w.head.data_ptr()),
            ctypes.byref(step),
        )
        return logits

    def _room(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Scratch memory of at least that shape, kept from step to step."""
        needed = shape[0] * shape[1]
        found = self._scratch.get(name)
        if found is None or found.numel() < needed:
            found = self._scratch[name] = torch.empty(needed, dtype=dtype)
        return found[:needed].view(shape)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _linear(projection: Projection) -> _Linear:
    return _Linear(_pointer(projection.weight), _pointer(projection.bias))


def _layer(layer: Layer) -> _Layer:
    return _Layer(
        input_norm=_pointer(layer.input_norm),
        q=_linear(layer.q),
        k=_linear(layer.k),
        v=_linear(layer.v),
        o=_linear(layer.o),
        q_norm=_pointer(layer.q_norm),
        k_norm=_pointer(layer.k_norm),
        mlp_norm=_pointer(layer.mlp_norm),
        gate=_linear(layer.gate),
        up=_linear(layer.up),
        down=_linear(layer.down),
    )
