"""`config.json`: what is read from it, and every refusal."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from specialized_decode.backbone.config import ModelConfig, RopeScaling
from specialized_decode.backbone.errors import ConfigError
from specialized_decode.backbone.writer import flash_plan, tiny_plan

ABSENT = object()


def _edited(edits: dict[str, Any]) -> Any:
    """The tiny configuration with values replaced by dotted key; ABSENT removes a key."""
    config = copy.deepcopy(tiny_plan().config)
    for key, value in edits.items():
        *path, last = key.split(".")
        place = config
        for step in path:
            place = place[step]
        if value is ABSENT:
            del place[last]
        else:
            place[last] = value
    return config


def _refusal(config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(config, "model/config.json")
    return str(caught.value)


def _text(**edits: Any) -> dict[str, Any]:
    return {f"text_config.{key}": value for key, value in edits.items()}


# edits of a good configuration, the key that the message names, what it found, what it expected
REFUSALS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"model_type": "llama"}, "model_type", '"llama"', '"deepseek_v41"'),
    ({"model_type": ABSENT}, "model_type", "nothing", '"deepseek_v41"'),
    ({"text_config": ABSENT}, "text_config", "nothing", "an object"),
    ({"text_config": [1]}, "text_config", "[1]", "an object"),
    (
        {"quantization_config": ABSENT},
        "quantization_config",
        "nothing",
        'an object with {"quant_method": "fp8"',
    ),
    ({"quantization_config.quant_method": "awq"}, "quantization_config.quant_method", '"awq"', '"fp8"'),
    ({"quantization_config.scale_fmt": ABSENT}, "quantization_config.scale_fmt", "nothing", '"ue8m0"'),
    ({"quantization_config.expert_dtype": "fp8"}, "quantization_config.expert_dtype", '"fp8"', '"fp4"'),
    (
        {"quantization_config.weight_block_size": [128, 128]},
        "quantization_config.weight_block_size",
        "[128, 128]",
        "[32, 32]",
    ),
    (_text(scoring_func="sigmoid"), "text_config.scoring_func", '"sigmoid"', '"sqrtsoftplus"'),
    (_text(topk_method="greedy"), "text_config.topk_method", '"greedy"', '"noaux_tc"'),
    (_text(hidden_act="gelu"), "text_config.hidden_act", '"gelu"', '"silu"'),
    (_text(norm_topk_prob=False), "text_config.norm_topk_prob", "false", "true"),
    (_text(hidden_size=ABSENT), "text_config.hidden_size", "nothing", "an integer of at least 1"),
    (_text(hidden_size=0), "text_config.hidden_size", "0", "an integer of at least 1"),
    (_text(hidden_size="256"), "text_config.hidden_size", '"256"', "an integer of at least 1"),
    (_text(hidden_size=256.0), "text_config.hidden_size", "256.0", "an integer of at least 1"),
    (_text(num_hidden_layers=True), "text_config.num_hidden_layers", "true", "an integer of at least 1"),
    (
        _text(candidate_source_layer_id=-2),
        "text_config.candidate_source_layer_id",
        "-2",
        "an integer of at least -1",
    ),
    (
        _text(num_nextn_predict_layers=-1),
        "text_config.num_nextn_predict_layers",
        "-1",
        "an integer of at least 0",
    ),
    ({"eos_token_id": [1]}, "eos_token_id", "[1]", "an integer of at least 0"),
    (_text(swiglu_limit=ABSENT), "text_config.swiglu_limit", "nothing", "a number of at least 0"),
    (_text(rms_norm_eps="1e-6"), "text_config.rms_norm_eps", '"1e-6"', "a number of at least 0"),
    (_text(hc_eps=-1e-6), "text_config.hc_eps", "-1e-06", "a number of at least 0"),
    (_text(rope_theta=math.nan), "text_config.rope_theta", "NaN", "a number of at least 0"),
    (_text(compress_ratios=ABSENT), "text_config.compress_ratios", "nothing", "a list of integers"),
    (_text(kv_source_layer_ids="2"), "text_config.kv_source_layer_ids", '"2"', "a list of integers"),
    (_text(engram_layer_ids=[1, 5.0]), "text_config.engram_layer_ids", "[1, 5.0]", "a list of integers"),
    (
        _text(rope_scaling=[4]),
        "text_config.rope_scaling",
        "[4]",
        'null or an object with "rope_type": "yarn"',
    ),
    (
        {"text_config.rope_scaling.rope_type": "linear"},
        "text_config.rope_scaling",
        '{"rope_type": "linear"',
        'null or an object with "rope_type": "yarn"',
    ),
    ({"text_config.rope_scaling.factor": 0}, "text_config.rope_scaling.factor", "0", "a positive number"),
    (
        {"text_config.rope_scaling.original_max_position_embeddings": ABSENT},
        "text_config.rope_scaling.original_max_position_embeddings",
        "nothing",
        "a positive number",
    ),
    (_text(head_dim=128), "text_config.head_dim", "128", "512"),
    (_text(qk_rope_head_dim=32), "text_config.qk_rope_head_dim", "32", "64"),
    (_text(index_head_dim=64), "text_config.index_head_dim", "64", "128"),
    (_text(hidden_size=250), "text_config.hidden_size", "250", "a multiple of the weight block, 32"),
    (_text(q_lora_rank=100), "text_config.q_lora_rank", "100", "a multiple of the weight block, 32"),
    (_text(o_lora_rank=65), "text_config.o_lora_rank", "65", "a multiple of the weight block, 32"),
    (
        _text(moe_intermediate_size=90),
        "text_config.moe_intermediate_size",
        "90",
        "a multiple of the weight block, 32",
    ),
    (_text(o_groups=3), "text_config.o_groups", "3", "a divisor of num_attention_heads, 4"),
    (_text(num_experts_per_tok=17), "text_config.num_experts_per_tok", "17", "at most n_routed_experts, 16"),
    (_text(n_shared_experts=2), "text_config.n_shared_experts", "2", "1"),
    (_text(vocab_size=129268), "text_config.vocab_size", "129268", "at least 129269, past the image tokens"),
    ({"image_token_id": 5}, "image_token_id", "5", "129264, which the release fixes"),
    (_text(compress_ratios=[0, 0, 2]), "text_config.compress_ratios", "3 entries", "10, one a layer"),
    (
        _text(compress_ratios=[0, 4] + [2] * 8),
        "text_config.compress_ratios[1]",
        "4",
        "0 (window only), 1 or 2",
    ),
    (
        _text(kv_source_layer_ids=[4, 2]),
        "text_config.kv_source_layer_ids",
        "[4, 2]",
        "increasing layer numbers below 10",
    ),
    (
        _text(engram_layer_ids=[1, 1]),
        "text_config.engram_layer_ids",
        "[1, 1]",
        "increasing layer numbers below 10",
    ),
    (
        _text(index_source_layer_ids=[2, 10]),
        "text_config.index_source_layer_ids",
        "[2, 10]",
        "increasing layer numbers below 10",
    ),
    (
        _text(kv_source_layer_ids=[1, 2]),
        "text_config.kv_source_layer_ids",
        "1",
        "layers whose compress_ratios entry is",
    ),
    (_text(kv_source_layer_ids=[]), "text_config.kv_source_layer_ids", "[]", "a source at or below layer 2"),
    (
        _text(index_source_layer_ids=[4, 6]),
        "text_config.index_source_layer_ids",
        "[4, 6]",
        "a source at or below layer 2, which reads one (compress ratio 2)",
    ),
    (
        _text(kv_source_layer_ids=[2, 4]),
        "text_config.compress_ratios[6]",
        "1",
        "2, the ratio of its source, layer 4 in kv_source_layer_ids",
    ),
    (
        _text(index_source_layer_ids=[2, 6, 8]),
        "text_config.index_source_layer_ids",
        "[2, 6, 8]",
        "every KV source among them, layer 4 too",
    ),
    (
        _text(candidate_source_layer_id=7),
        "text_config.candidate_source_layer_id",
        "7",
        "-1 or one of index_source_layer_ids, [2, 4, 6, 8]",
    ),
    (
        _text(candidate_topk_blocks=0),
        "text_config.candidate_topk_blocks",
        "0",
        "at least 1 where a candidate source",
    ),
    (
        _text(candidate_block_size=ABSENT),
        "text_config.candidate_block_size",
        "0",
        "at least 1 where a candidate source",
    ),
    (
        _text(candidate_source_layer_id=4),
        "text_config.compress_ratios[6]",
        "1",
        "the candidate source's, 2: they share positions",
    ),
    (
        _text(dspark_target_layer_ids=[8, 11]),
        "text_config.dspark_target_layer_ids",
        "11",
        "layer numbers up to 10",
    ),
    (
        _text(engram_num_embeddings=[3198]),
        "text_config.engram_num_embeddings",
        "1 entries",
        "2, one an Engram layer",
    ),
    (
        _text(engram_max_ngram_size=1),
        "text_config.engram_max_ngram_size",
        "1",
        "at least 2 where engram_layer_ids",
    ),
    (_text(engram_n_heads=0), "text_config.engram_n_heads", "0", "at least 1 where engram_layer_ids"),
    (_text(engram_vocab_size=1), "text_config.engram_vocab_size", "1", "at least 2 where engram_layer_ids"),
    (_text(engram_head_dim=0), "text_config.engram_head_dim", "0", "at least 1 where engram_layer_ids"),
    (
        _text(engram_compressed_vocab_size=ABSENT),
        "text_config.engram_compressed_vocab_size",
        "0",
        "at least 1 where engram_layer_ids",
    ),
    (_text(engram_head_dim=48), "text_config.engram_head_dim", "48", "a multiple of 32"),
]


@pytest.mark.parametrize(
    ("edits", "key", "found", "expected"),
    REFUSALS,
    ids=[f"{row[1]}={next(iter(row[0].values())) if row[0] else ''}"[:60] for row in REFUSALS],
)
def test_refusal_names_file_key_found_and_expected(edits: dict[str, Any], key: str, found: str, expected: str) -> None:
    message = _refusal(_edited(edits))
    assert message.startswith(f"model/config.json: {key}: found {found}")
    assert f", expected {expected}" in message


@pytest.mark.parametrize("value", [None, [], 3, "text"])
def test_top_level_must_be_an_object(value: Any) -> None:
    assert _refusal(value).startswith("model/config.json: (top level): found ")


WRONG = [None, True, -1, 0, 2**70, 1.5, math.nan, math.inf, "x", [], [None], [[1]], {}, {"a": 1}]


@pytest.mark.parametrize("wrong", WRONG, ids=[repr(value) for value in WRONG])
def test_no_value_anywhere_is_worse_than_a_refusal(wrong: Any) -> None:
    """Each key in turn holds `wrong`: the result is a configuration or a ConfigError, never another error."""
    good = tiny_plan().config
    keys = list(good)
    for section in ("text_config", "quantization_config", "vision_config", "text_config.rope_scaling"):
        place = good
        for step in section.split("."):
            place = place[step]
        keys += [f"{section}.{key}" for key in place]
    unexpected = []
    for key in keys:
        try:
            ModelConfig.from_dict(_edited({key: wrong}), "model/config.json")
        except ConfigError as error:
            assert str(error).startswith("model/config.json: ")
        except Exception as error:
            unexpected.append(f"{key}: {type(error).__name__}: {error}")
    assert unexpected == []


def test_file_problems_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read \(No such file or directory\); expected"):
        ModelConfig.from_folder(tmp_path)
    for content in (b"{", b"\xff\xfe{}"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"config\.json: not valid JSON .*; expected the release's config\.json"):
            ModelConfig.from_folder(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read \(Is a directory\)"):
        ModelConfig.from_folder(tmp_path)


def test_values_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(flash_plan(drafts=3).config))
    c = ModelConfig.from_folder(tmp_path)
    assert c.source == str(tmp_path / "config.json")
    assert (c.hidden_size, c.q_lora_rank, c.o_lora_rank, c.index_n_heads) == (5120, 1280, 1024, 32)
    assert (c.rms_norm_eps, c.hc_eps, c.routed_scaling_factor, c.swiglu_limit) == (1e-20, 1e-6, 1.5, 10.0)
    assert c.rope_scaling == RopeScaling(16.0, 32.0, 1.0, 65536)
    assert (c.rope_theta, c.compress_rope_theta, c.max_position_embeddings) == (10000.0, 160000.0, 1 << 20)
    assert len(c.compress_ratios) == 40  # the draft layers' entries are dropped
    assert (c.nope_dim, c.engram_columns, c.has_image_bias) == (448, 24, True)


def test_absent_parts_have_their_defaults() -> None:
    removed = {
        "vision_config": ABSENT,
        "image_token_id": ABSENT,
        "bos_token_id": ABSENT,
        "eos_token_id": ABSENT,
    }
    removed |= _text(rope_scaling=ABSENT, candidate_source_layer_id=ABSENT, engram_layer_ids=ABSENT)
    removed |= _text(dspark_target_layer_ids=ABSENT, vocab_size=600)
    c = ModelConfig.from_dict(_edited(removed), "c")
    assert (c.has_image_bias, c.image_token_id, c.bos_token_id, c.eos_token_id) == (False, 129264, 0, 1)
    assert (c.rope_scaling, c.candidate_source_layer_id, c.engram_layer_ids) == (None, -1, ())
    assert c.dspark_target_layer_ids == ()
    assert not any(c.consumes_candidates(layer) for layer in range(10))


def test_layers_read_the_latest_source_below_them() -> None:
    c = ModelConfig.from_dict(tiny_plan().config, "c")
    assert [c.kv_source(layer) for layer in range(10)] == [None, None, 2, 2, 4, 4, 6, 6, 6, 6]
    assert [c.index_source(layer) for layer in range(10)] == [None, None, 2, 2, 4, 4, 6, 6, 8, 8]
    assert [layer for layer in range(10) if c.consumes_candidates(layer)] == [8]
