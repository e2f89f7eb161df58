"""Tiny random models made on the spot: real folders, real tokenizers, answers in milliseconds."""

import logging
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from engine_server import serving

from nagara.engine.engine import Engine
from nagara.engine.events import TokenEvent
from nagara.engine.request import FinishReason, SamplingParams
from nagara.engine.settings import EngineSettings

VOCAB = 400
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "while one step is computed the next one is prepared",
    "ながら means while doing, 同時に does too: žluťoučký kůň 🐎",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}

GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def family_config(family: str) -> transformers.PretrainedConfig:
    """The configuration of a tiny model of each supported family."""
    if family == "llama":
        return transformers.LlamaConfig(**COMMON, tie_word_embeddings=True)
    if family == "llama3-rope":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        return transformers.LlamaConfig(**COMMON, rope_parameters=rope, attention_bias=True)
    if family == "yarn-rope":
        rope = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
        return transformers.LlamaConfig(**COMMON, rope_parameters=rope)
    if family == "linear-rope":
        rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
        return transformers.LlamaConfig(**COMMON, rope_parameters=rope)
    if family == "qwen2-windows":
        windows = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
        return transformers.Qwen2Config(**COMMON, **windows)
    if family == "partial-rope":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        return transformers.StableLmConfig(**COMMON, rope_parameters=rope)
    if family == "mistral":
        return transformers.MistralConfig(**COMMON, sliding_window=24)
    if family == "qwen2":
        return transformers.Qwen2Config(**COMMON)
    if family == "qwen3":
        return transformers.Qwen3Config(**COMMON, head_dim=32)
    if family == "gemma":
        return transformers.GemmaConfig(**COMMON, head_dim=16)
    if family == "gpt2":
        return transformers.GPT2Config(**GPT2)
    if family == "gpt-neox":
        return transformers.GPTNeoXConfig(**{**COMMON, "num_key_value_heads": 4})
    if family == "gemma2":
        return transformers.Gemma2Config(
            **COMMON, head_dim=16, sliding_window=16, query_pre_attn_scalar=20
        )
    if family == "gemma3":
        return transformers.Gemma3TextConfig(**COMMON, head_dim=16, sliding_window=16)
    raise ValueError(family)


def write_tokenizer(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<unk>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}'
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder per family, made once."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            torch.manual_seed(7)
            config = family_config(family)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    # Wide weights make answers vary; random biases and norms show where one is lost
                    spread = 0.3 if weight.ndim > 1 or name.endswith("bias") else 0.2
                    offset = 0.0 if weight.ndim > 1 or name.endswith("bias") else 1.0
                    weight.copy_(torch.randn_like(weight) * spread + offset)
            model.save_pretrained(folder)
            write_tokenizer(folder)
            made[family] = folder
        return made[family]

    return make


@pytest.fixture(scope="session")
def tiny(make_model: Callable[[str], Path]) -> Path:
    return make_model("llama")


@pytest.fixture
async def served(tiny: Path) -> AsyncIterator[str]:
    """Where the engine's server with the tiny model answers."""
    async with serving(tiny) as (_, url):
        yield url


@pytest.fixture(scope="session")
def smollm2(state_dir: Path) -> Path:
    """The real model's folder. The engine's tests import nothing else of nagara."""
    folder = state_dir / "models/smollm2"
    if not folder.is_dir():
        pytest.skip("needs the model: nagara --state .state models add smollm2")
    return folder


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("nagara.engine").setLevel(logging.WARNING)


@dataclass
class Heard:
    """What one request's receiver was told."""

    key: int
    events: "queue.SimpleQueue[TokenEvent]"
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None

    def next(self) -> TokenEvent:
        event = self.events.get(timeout=170)  # compiling takes minutes on a busy machine
        if event.error is not None:
            raise event.error
        if event.token_id is not None:
            self.tokens.append(event.token_id)
        self.reason = event.finish_reason
        return event

    def all(self) -> list[int]:
        while self.reason is None:
            self.next()
        return self.tokens


def _ask(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Heard:
    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    return Heard(engine.submit(prompt, params, events.put), events)


def _reference(folder: Path, prompt: Sequence[int], new: int) -> list[int]:
    """What transformers generates greedily in float32, end tokens ignored."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([list(prompt)])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
    )
    return made[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def ask() -> Callable[..., Heard]:
    return _ask


@pytest.fixture(scope="session")
def reference() -> Callable[..., list[int]]:
    return _reference


DEPTHS = (0, 1)
_outcomes: dict[str, set[int]] = {}


@pytest.fixture(params=DEPTHS, ids=["depth0", "depth1"])
def depth(request: pytest.FixtureRequest) -> int:
    """Every behavioural test runs without and with a step in flight; depth 0 is the oracle."""
    name = request.node.nodeid.replace("depth1", "depth0")
    _outcomes.setdefault(name, set()).add(request.param)
    return request.param


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    both = sorted(name for name, ran in _outcomes.items() if len(ran) == len(DEPTHS))
    if _outcomes:
        terminalreporter.write_line(f"engine: {len(both)} cases ran at depth 0 and at depth 1")
    if config.getoption("depth_oracle"):
        for name in both:
            terminalreporter.write_line(f"  {name.replace('depth0', 'depth 0, 1')}")


@pytest.fixture
def kernel() -> str:
    """Overridden by tests that compare kernels."""
    return "auto"


@pytest.fixture
def start_engine(depth: int, kernel: str) -> Iterator[Callable[..., Engine]]:
    """Starts engines in float32 that check themselves, and ends them after the test."""
    started: list[Engine] = []

    def start(folder: Path, **settings: object) -> Engine:
        engine = Engine(
            folder,
            EngineSettings(
                **{
                    "dtype": "float32",
                    "is_checking": True,
                    "kernel": kernel,
                    "depth": depth,
                    **settings,
                }
            ),
        )
        engine.start()
        started.append(engine)
        return engine

    yield start
    for engine in started:
        assert engine.close(timeout_s=30)
