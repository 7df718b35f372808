"""`config.json` of a DeepSeek-V4.1 model folder, checked and typed.

The release nests the text model under `text_config`; quantization and special token ids stay at the top level.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from specialized_decode.backbone.errors import ConfigError

# Image tokens carry five consecutive ids from here on; fixed by the release's tokenizer and by its serving code.
IMAGE_TOKEN_ID = 129264
IMAGE_TOKEN_SPAN = 5
# The release writes dense weights as FP8 e4m3 with one UE8M0 scale per 32x32 block.
WEIGHT_BLOCK = 32
_QUANTIZATION = {"quant_method": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4"}


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters (Peng et al., 2023, arXiv:2309.00071); they apply to layers with a compressed cache."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelConfig:
    """The text model's hyper-parameters under the release's own names."""

    source: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_vocab_size: int
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    has_image_bias: bool
    image_token_id: int
    bos_token_id: int
    eos_token_id: int
    num_nextn_predict_layers: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    dspark_markov_rank: int

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Reads `folder`/config.json. Raises ConfigError, naming file, key, found and expected."""
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read ({error.strerror}); expected a DeepSeek-V4.1 model folder"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not valid JSON ({error}); expected the release's config.json") from None
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, raw: Any, source: str) -> "ModelConfig":
        """Builds the configuration from `config.json`'s content; `source` names it in errors."""
        return _Reader(raw, source).config()

    @property
    def nope_dim(self) -> int:
        """Dimensions of a head that carry no position: `head_dim - qk_rope_head_dim`."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def engram_columns(self) -> int:
        """Hash columns of an Engram layer: n-gram sizes 2..max times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressor and compressed cache `layer` reads; None for a window-only layer."""
        return _latest(self.kv_source_layer_ids, layer) if self.compress_ratios[layer] else None

    def index_source(self, layer: int) -> int | None:
        """The layer whose indexer selects `layer`'s compressed positions; None for a window-only layer."""
        return _latest(self.index_source_layer_ids, layer) if self.compress_ratios[layer] else None

    def consumes_candidates(self, layer: int) -> bool:
        """Whether `layer`'s indexer restricts itself to the candidate source's blocks."""
        return layer in self.index_source_layer_ids and 0 <= self.candidate_source_layer_id < layer


def _latest(sources: tuple[int, ...], layer: int) -> int:
    return max(source for source in sources if source <= layer)


class _Reader:
    """Reads and checks one config.json; every failure names file, key, found and expected."""

    def __init__(self, raw: Any, source: str) -> None:
        self.source = source
        if not isinstance(raw, dict):
            self.fail("(top level)", type(raw).__name__, "an object")
        self.raw: dict[str, Any] = raw
        text = raw.get("text_config")
        if not isinstance(text, dict):
            self.fail("text_config", _shown(text), "an object holding the text model's hyper-parameters")
        self.text: dict[str, Any] = text

    def fail(self, key: str, found: Any, expected: str) -> NoReturn:
        raise ConfigError(f"{self.source}: {key}: found {found}, expected {expected}")

    def integer(self, key: str, minimum: int = 1, default: int | None = None, where: str = "text_config") -> int:
        value = (self.text if where == "text_config" else self.raw).get(key, default)
        name = f"{where}.{key}" if where else key
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.fail(name, _shown(value), f"an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None, minimum: float = 0.0) -> float:
        value = self.text.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not minimum <= value < math.inf:
            self.fail(f"text_config.{key}", _shown(value), f"a number of at least {minimum:g}")
        return float(value)

    def integers(self, key: str, default: list[int] | None = None) -> tuple[int, ...]:
        value = self.text.get(key, default)
        if not isinstance(value, list) or any(not isinstance(v, int) or isinstance(v, bool) for v in value):
            self.fail(f"text_config.{key}", _shown(value), "a list of integers")
        return tuple(value)

    def config(self) -> ModelConfig:
        self.check_kind()
        fields: dict[str, Any] = {"source": self.source, "rope_scaling": self.rope_scaling()}
        fields["has_image_bias"] = self.has_vision()
        fields["image_token_id"] = self.integer("image_token_id", 0, IMAGE_TOKEN_ID, where="")
        fields["bos_token_id"] = self.integer("bos_token_id", 0, 0, where="")
        fields["eos_token_id"] = self.integer("eos_token_id", 0, 1, where="")
        optional = {
            "candidate_source_layer_id": -1,
            "candidate_topk_blocks": 0,
            "candidate_block_size": 0,
            "num_nextn_predict_layers": 0,
            "dspark_n_routed_experts": 0,
            "dspark_num_experts_per_tok": 0,
            "dspark_markov_rank": 0,
            "engram_vocab_size": 0,
            "engram_max_ngram_size": 0,
            "engram_n_heads": 0,
            "engram_head_dim": 0,
            "engram_compressed_vocab_size": 0,
            "engram_pad_token_id": 0,
        }
        lists = ("engram_layer_ids", "engram_num_embeddings", "kv_source_layer_ids", "index_source_layer_ids")
        for field in dataclasses.fields(ModelConfig):
            name = field.name
            if name in fields:
                continue
            if name in optional:
                fields[name] = self.integer(name, min(0, optional[name]), optional[name])
            elif name in lists or name == "dspark_target_layer_ids":
                fields[name] = self.integers(name, [])
            elif name == "compress_ratios":
                fields[name] = self.integers(name)
            elif field.type is float:
                fields[name] = self.number(name)
            else:
                fields[name] = self.integer(name)
        config = ModelConfig(**fields)
        self.check_widths(config)
        config = self.check_plan(config)
        self.check_engram(config)
        return config

    def has_vision(self) -> bool:
        """Whether the release has a vision tower, and with it a routing bias for image tokens."""
        vision = self.raw.get("vision_config")
        if vision is None:
            return False
        layers = vision.get("num_hidden_layers", 0) if isinstance(vision, dict) else None
        if not isinstance(layers, int) or isinstance(layers, bool) or layers < 0:
            self.fail("vision_config.num_hidden_layers", _shown(layers), "a whole number in an object")
        return layers > 0

    def check_kind(self) -> None:
        if self.raw.get("model_type") != "deepseek_v41":
            self.fail("model_type", _shown(self.raw.get("model_type")), '"deepseek_v41"')
        quantization = self.raw.get("quantization_config")
        if not isinstance(quantization, dict):
            self.fail("quantization_config", _shown(quantization), f"an object with {json.dumps(_QUANTIZATION)}")
        for key, expected in _QUANTIZATION.items():
            if quantization.get(key) != expected:
                self.fail(f"quantization_config.{key}", _shown(quantization.get(key)), json.dumps(expected))
        block = quantization.get("weight_block_size")
        if block != [WEIGHT_BLOCK, WEIGHT_BLOCK]:
            self.fail("quantization_config.weight_block_size", _shown(block), f"[{WEIGHT_BLOCK}, {WEIGHT_BLOCK}]")
        fixed = {
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "hidden_act": "silu",
            "norm_topk_prob": True,
        }
        for key, only in fixed.items():
            found = self.text.get(key, only)
            if found != only:
                self.fail(f"text_config.{key}", _shown(found), json.dumps(only))

    def rope_scaling(self) -> RopeScaling | None:
        value = self.text.get("rope_scaling")
        if value is None:
            return None
        if not isinstance(value, dict) or value.get("rope_type", value.get("type")) != "yarn":
            self.fail("text_config.rope_scaling", _shown(value), 'null or an object with "rope_type": "yarn"')
        numbers: list[float] = []
        for key, default in (
            ("factor", None),
            ("beta_fast", 32),
            ("beta_slow", 1),
            ("original_max_position_embeddings", None),
        ):
            number = value.get(key, default)
            if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 < number < math.inf:
                self.fail(f"text_config.rope_scaling.{key}", _shown(number), "a positive number")
            numbers.append(number)
        return RopeScaling(float(numbers[0]), float(numbers[1]), float(numbers[2]), int(numbers[3]))

    def check_widths(self, c: ModelConfig) -> None:
        # The cache records fix these three (512-wide latent, 64 of it rotated; 128-wide index keys).
        for key, found, expected in (
            ("head_dim", c.head_dim, 512),
            ("qk_rope_head_dim", c.qk_rope_head_dim, 64),
            ("index_head_dim", c.index_head_dim, 128),
        ):
            if found != expected:
                self.fail(f"text_config.{key}", found, f"{expected}, which the cache records are laid out for")
        for key in ("hidden_size", "q_lora_rank", "o_lora_rank", "moe_intermediate_size"):
            if getattr(c, key) % WEIGHT_BLOCK:
                self.fail(f"text_config.{key}", getattr(c, key), f"a multiple of the weight block, {WEIGHT_BLOCK}")
        if c.num_attention_heads % c.o_groups:
            self.fail("text_config.o_groups", c.o_groups, f"a divisor of num_attention_heads, {c.num_attention_heads}")
        if c.num_experts_per_tok > c.n_routed_experts:
            self.fail(
                "text_config.num_experts_per_tok",
                c.num_experts_per_tok,
                f"at most n_routed_experts, {c.n_routed_experts}",
            )
        if c.n_shared_experts != 1:
            self.fail("text_config.n_shared_experts", c.n_shared_experts, "1")
        if c.vocab_size < c.image_token_id + IMAGE_TOKEN_SPAN and c.has_image_bias:
            self.fail(
                "text_config.vocab_size",
                c.vocab_size,
                f"at least {c.image_token_id + IMAGE_TOKEN_SPAN}, past the image tokens",
            )
        if c.image_token_id != IMAGE_TOKEN_ID:
            self.fail("image_token_id", c.image_token_id, f"{IMAGE_TOKEN_ID}, which the release fixes")

    def check_plan(self, c: ModelConfig) -> ModelConfig:
        layers = c.num_hidden_layers
        total = layers + c.num_nextn_predict_layers
        if len(c.compress_ratios) not in (layers, total):
            self.fail(
                "text_config.compress_ratios",
                f"{len(c.compress_ratios)} entries",
                f"{layers}, one a layer (or {total} with the draft layers)",
            )
        for layer, ratio in enumerate(c.compress_ratios):
            if ratio not in (0, 1, 2):
                self.fail(f"text_config.compress_ratios[{layer}]", ratio, "0 (window only), 1 or 2")
        for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            ids = getattr(c, key)
            if list(ids) != sorted(set(ids)) or any(not 0 <= i < layers for i in ids):
                self.fail(f"text_config.{key}", list(ids), f"increasing layer numbers below {layers}")
        for key in ("kv_source_layer_ids", "index_source_layer_ids"):
            for source in getattr(c, key):
                if not c.compress_ratios[source]:
                    self.fail(f"text_config.{key}", source, "layers whose compress_ratios entry is 1 or 2")
        for layer in range(layers):
            self.check_sources(c, layer)
        candidate = c.candidate_source_layer_id
        if candidate >= 0:
            if candidate not in c.index_source_layer_ids:
                self.fail(
                    "text_config.candidate_source_layer_id",
                    candidate,
                    f"-1 or one of index_source_layer_ids, {list(c.index_source_layer_ids)}",
                )
            for key in ("candidate_topk_blocks", "candidate_block_size"):
                if getattr(c, key) < 1:
                    self.fail(f"text_config.{key}", getattr(c, key), "at least 1 where a candidate source is given")
            for layer in c.index_source_layer_ids:
                if layer > candidate and c.compress_ratios[layer] != c.compress_ratios[candidate]:
                    self.fail(
                        f"text_config.compress_ratios[{layer}]",
                        c.compress_ratios[layer],
                        f"the candidate source's, {c.compress_ratios[candidate]}: they share positions",
                    )
        bad = [i for i in c.dspark_target_layer_ids if not 0 <= i <= layers]
        if bad:
            self.fail("text_config.dspark_target_layer_ids", bad[0], f"layer numbers up to {layers}")
        return dataclasses.replace(c, compress_ratios=c.compress_ratios[:layers])

    def check_sources(self, c: ModelConfig, layer: int) -> None:
        """A compressed layer reads the latest sources at or below it, of its own ratio."""
        ratio = c.compress_ratios[layer]
        if not ratio:
            return
        for key in ("kv_source_layer_ids", "index_source_layer_ids"):
            below = [source for source in getattr(c, key) if source <= layer]
            if not below:
                self.fail(
                    f"text_config.{key}",
                    list(getattr(c, key)),
                    f"a source at or below layer {layer}, which reads one (compress ratio {ratio})",
                )
            if c.compress_ratios[below[-1]] != ratio:
                self.fail(
                    f"text_config.compress_ratios[{layer}]",
                    ratio,
                    f"{c.compress_ratios[below[-1]]}, the ratio of its source, layer {below[-1]} in {key}",
                )
        if layer in c.kv_source_layer_ids and layer not in c.index_source_layer_ids:
            self.fail(
                "text_config.index_source_layer_ids",
                list(c.index_source_layer_ids),
                f"every KV source among them, layer {layer} too: its indexer writes the index keys",
            )

    def check_engram(self, c: ModelConfig) -> None:
        if not c.engram_layer_ids:
            return
        if len(c.engram_num_embeddings) != len(c.engram_layer_ids):
            self.fail(
                "text_config.engram_num_embeddings",
                f"{len(c.engram_num_embeddings)} entries",
                f"{len(c.engram_layer_ids)}, one an Engram layer",
            )
        for key, minimum in (
            ("engram_max_ngram_size", 2),
            ("engram_n_heads", 1),
            ("engram_vocab_size", 2),
            ("engram_head_dim", 1),
            ("engram_compressed_vocab_size", 1),
        ):
            if getattr(c, key) < minimum:
                self.fail(
                    f"text_config.{key}", getattr(c, key), f"at least {minimum} where engram_layer_ids is not empty"
                )
        if c.engram_pad_token_id >= c.vocab_size:
            self.fail("text_config.engram_pad_token_id", c.engram_pad_token_id, f"a token id below {c.vocab_size}")
        if c.engram_head_dim % WEIGHT_BLOCK:
            self.fail("text_config.engram_head_dim", c.engram_head_dim, f"a multiple of {WEIGHT_BLOCK}, one scale each")


def _shown(value: Any) -> str:
    """`value` as JSON, cut short, for an error message."""
    if value is None:
        return "nothing"
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
