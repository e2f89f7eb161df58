"""From logits to tokens and log probabilities, for all samples of a step at once.

A draw depends on (seed, position) alone: the host makes one uniform number of the two, and the
token is where it falls in the row's cumulative distribution. So the same request gets the same
tokens whatever else runs beside it. `Sampler` runs on the device's compute stream.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nagara.engine.errors import RequestError
from nagara.engine.request import LogitsProcessor, SamplingParams

_MASK = (1 << 64) - 1
FILTER_WIDTH = 1024  # candidates looked at first; a row that needs more is sorted whole


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position): the SplitMix64 finaliser over their mixture."""
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1342543DE82EF95) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = ((z ^ (z >> shift)) * factor) & _MASK
    z ^= z >> 31
    return (z >> 11) / (1 << 53)


Faults = dict[int, RequestError]  # sample → why the code that came with its request failed


@dataclass(frozen=True, slots=True)
class History:
    """The known tokens of a sequence that has just taken a slot, for its penalties."""

    slot: int
    prompt: tuple[int, ...]
    output: tuple[int, ...]


class Sample(NamedTuple):
    """What one sample of a step wants beyond the numbers in the buffers."""

    params: SamplingParams
    slot: int
    banned: tuple[int, ...] = ()  # end tokens before the least length is reached
    allowed: torch.Tensor | None = None  # bool [vocab]: what a grammar lets through
    seen: tuple[int, ...] = ()  # prompt and output, for the request's own processors

    @property
    def processors(self) -> tuple[LogitsProcessor, ...]:
        return self.params.logits_processors

    @property
    def is_plain(self) -> bool:
        """Whether the logits are used as they come."""
        params = self.params
        return params.is_simple or not (
            params.has_penalty
            or params.logit_bias
            or self.banned
            or self.allowed is not None
            or self.processors
        )


def send(values: Sequence[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of the host as a tensor of the device.

    On CUDA from pinned memory: a copy from other memory makes the host wait for all that runs.
    """
    is_cuda = device.type == "cuda"
    held = torch.tensor(values, dtype=dtype, pin_memory=is_cuda)
    return held.to(device, non_blocking=True) if is_cuda else held


class Sampler:
    """Draws tokens; remembers per slot what penalties need, on the device, as tokens are drawn."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self._slots, self._vocab, self._device = slots, vocab, device
        self._counts: torch.Tensor | None = None  # int32 [slots, vocab]: outputs so far
        self._in_prompt: torch.Tensor | None = None  # bool [slots, vocab]

    def begin(self, history: History) -> None:
        """Set up a slot whose sequence has penalties."""
        if self._counts is None or self._in_prompt is None:
            shape = (self._slots, self._vocab)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        counts, in_prompt = self._counts[history.slot], self._in_prompt[history.slot]
        counts.zero_()
        in_prompt.zero_()
        # index_fill_ and not an assignment, whose value would come from the host
        in_prompt.index_fill_(0, send(history.prompt, self._device, torch.int64), True)
        if history.output:
            times = Counter(history.output)
            ids = send(list(times), self._device, torch.int64)
            counts[ids] = send(list(times.values()), self._device, torch.int32)

    def draw(
        self,
        logits: torch.Tensor,
        samples: Sequence[Sample],
        numbers: torch.Tensor,
        faults: Faults,
    ) -> torch.Tensor:
        """Tokens `[samples]` from `logits [samples, vocab]`, which are changed in place.

        `numbers [4, samples]`: temperature, top_p, min_p and the uniform number. A sample whose
        own processor fails is noted in `faults` and drawn without it.
        """
        if all(sample.params.is_simple and sample.params.is_greedy for sample in samples):
            return best_of(logits)
        for row, sample in enumerate(samples):
            if not sample.is_plain:
                try:
                    self._adjust(logits[row], sample)
                except RequestError as error:
                    faults[row] = error
        random = [i for i, sample in enumerate(samples) if not sample.params.is_greedy]
        if not random:
            tokens = best_of(logits)
        elif len(random) == len(samples):
            tokens = draw_rows(logits, samples, numbers)
        else:
            tokens = best_of(logits)
            index = send(random, logits.device, torch.int64)
            some = draw_rows(logits[index], [samples[i] for i in random], numbers[:, index])
            tokens[index] = some
        self._remember(samples, tokens)
        return tokens

    def _remember(self, samples: Sequence[Sample], tokens: torch.Tensor) -> None:
        rows = [i for i, sample in enumerate(samples) if sample.params.has_penalty]
        if rows:
            assert self._counts is not None
            slots = send([samples[i].slot for i in rows], tokens.device, torch.int64)
            drawn = tokens[send(rows, tokens.device, torch.int64)]
            self._counts[slots, drawn] += 1

    def _adjust(self, row: torch.Tensor, sample: Sample) -> None:
        params = sample.params
        if params.has_penalty:
            assert self._counts is not None
            assert self._in_prompt is not None
            counts = self._counts[sample.slot]
            penalise(row, counts, self._in_prompt[sample.slot], params)
        for token, bias in params.logit_bias:
            row[token] += bias
        if sample.banned:
            row.index_fill_(0, send(sample.banned, row.device, torch.int64), float("-inf"))
        for processor in sample.processors:
            try:
                row.copy_(processor(sample.seen, row.clone()))
            except Exception as error:  # foreign code: the batch goes on without this request
                raise RequestError(
                    f"a logits processor failed: {error!r}", where="logits_processors"
                ) from error
        if sample.allowed is not None:
            forbidden = ~sample.allowed
            if row.is_cuda:
                forbidden = forbidden.pin_memory().to(row.device, non_blocking=True)
            row.masked_fill_(forbidden, float("-inf"))


def penalise(
    row: torch.Tensor, counts: torch.Tensor, in_prompt: torch.Tensor, params: SamplingParams
) -> None:
    """Apply the three penalties to `row [vocab]` in place."""
    if params.repetition_penalty != 1:
        factor = params.repetition_penalty
        moved = torch.where(row > 0, row / factor, row * factor)
        row.copy_(torch.where(in_prompt | (counts > 0), moved, row))
    row -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts


def best_of(logits: torch.Tensor) -> torch.Tensor:
    return logits.max(-1).indices


def draw_rows(
    logits: torch.Tensor, samples: Sequence[Sample], numbers: torch.Tensor
) -> torch.Tensor:
    """Draw one token a row; rows without filters need no sorting."""
    temperature, top_p, min_p, draws = numbers
    scaled = logits.double() / temperature[:, None]
    total = torch.logsumexp(scaled, -1, keepdim=True)
    filtered = [
        i
        for i, s in enumerate(samples)
        if s.params.top_k or s.params.top_p < 1 or s.params.min_p > 0
    ]
    if not filtered:
        return _invert((scaled - total).exp().cumsum(-1), draws)
    tokens = torch.empty(len(samples), dtype=torch.int64, device=logits.device)
    free = [i for i in range(len(samples)) if i not in set(filtered)]
    if free:
        index = send(free, logits.device, torch.int64)
        mass = (scaled[index] - total[index]).exp().cumsum(-1)
        tokens[index] = _invert(mass, draws[index])
    index = send(filtered, logits.device, torch.int64)
    top_k = send([samples[i].params.top_k for i in filtered], logits.device, torch.int64)
    tokens[index] = _draw_filtered(
        scaled[index], total[index], top_k, top_p[index], min_p[index], draws[index]
    )
    return tokens


def _draw_filtered(
    scaled: torch.Tensor,
    total: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    draws: torch.Tensor,
) -> torch.Tensor:
    """Look at the likeliest candidates; where a filter reaches beyond them, at all."""
    vocab = scaled.shape[-1]
    # On a GPU sorting all is cheaper than asking whether that is needed
    width = vocab if scaled.is_cuda else min(FILTER_WIDTH, vocab)
    values, ids = scaled.topk(width, -1)
    kept, probabilities = _keep(values, total, top_k, top_p, min_p)
    if width < vocab and bool(kept[:, -1].any()):
        values, ids = scaled.sort(dim=-1, descending=True, stable=True)
        kept, probabilities = _keep(values, total, top_k, top_p, min_p)
    mass = (probabilities * kept).cumsum(-1)
    places = torch.minimum(_invert(mass, draws * mass[:, -1]), kept.sum(-1) - 1)
    return ids.gather(-1, places[:, None])[:, 0]


def _keep(
    values: torch.Tensor,
    total: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the candidates, likeliest first, the filters keep; and their probabilities."""
    probabilities = (values - total).exp()
    before = probabilities.cumsum(-1) - probabilities
    rank = torch.arange(values.shape[-1], device=values.device)
    kept = (before < top_p[:, None]) & (probabilities >= min_p[:, None] * probabilities[:, :1])
    kept &= (rank < top_k[:, None]) | (top_k[:, None] == 0)
    return kept, probabilities


def _invert(mass: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Where `targets [rows]` fall in the growing `mass [rows, n]`."""
    places = torch.searchsorted(mass, targets[:, None].contiguous(), right=True)[:, 0]
    return places.clamp_(max=mass.shape[-1] - 1)


def logprobs_of(
    logits: torch.Tensor, tokens: torch.Tensor, alternatives: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities `[rows, 1 + alternatives]` and ids of the drawn token and the likeliest."""
    values = torch.log_softmax(logits, -1)
    chosen = values.gather(-1, tokens[:, None])
    best = values.topk(alternatives, -1)
    return torch.cat([chosen, best.values], -1), torch.cat([tokens[:, None], best.indices], -1)
