"""Loading the model, and what a forward returns besides hidden states."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specialized_decode.backbone.engine import LocalEngine
from specialized_decode.backbone.errors import CheckpointError, ConfigError, InputError, PromptError
from specialized_decode.backbone.linear import project
from specialized_decode.backbone.model import DeepseekV41, load_model
from tests.helpers.small_plan import compressed_vocab_size

SHARD = "model-00001-of-00001.safetensors"
CPU = torch.device("cpu")
LAYERS, HIDDEN, STREAMS = 10, 128, 4
TOKENS = [7, 8, 9, 10, 11, 300, 301]


@pytest.fixture(scope="module")
def loaded(small_folder: Path) -> DeepseekV41:
    return load_model(small_folder, CPU, 64, 64)


@pytest.fixture
def model(loaded: DeepseekV41) -> DeepseekV41:
    """The model as loaded."""
    loaded.model.set_aux_layers(())
    loaded.model.mtp_hidden_buffer = None
    return loaded


def _forward(model: DeepseekV41, use_engram: bool = True) -> Any:
    engine = LocalEngine(model, 1, 64, 64)
    return engine.forward(engine.caches.batch([engine.caches.open(TOKENS)], [len(TOKENS)]), use_engram)


def _edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_loading_reports_every_layer(small_folder: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    model = load_model(small_folder, CPU, 8, 4096, lambda *call: calls.append(call))  # the longest context
    assert calls == [(layer, LAYERS, f"layer {layer}") for layer in range(LAYERS)] + [(LAYERS, LAYERS, "loaded")]
    assert model.device == CPU
    assert len(model.model.layers) == LAYERS


def test_weights_are_those_of_the_folder(model: DeepseekV41, small_folder: Path) -> None:
    stored = load_file(small_folder / SHARD)
    assert torch.equal(model.model.embedding, stored["embed.weight"])
    assert torch.equal(model.lm_head, stored["head.weight"].float())
    assert torch.equal(model.model.norm, stored["norm.weight"])
    for index, layer in enumerate(model.model.layers):
        assert torch.equal(layer.attn_norm, stored[f"layers.{index}.attn_norm.weight"])
        assert torch.equal(layer.ffn_norm, stored[f"layers.{index}.ffn_norm.weight"])
        assert (layer.engram is not None) == (index in (1, 5))


def test_context_past_the_position_embeddings(small_folder: Path) -> None:
    with pytest.raises(PromptError) as caught:
        load_model(small_folder, CPU, 8, 4097)
    config = small_folder / "config.json"
    assert str(caught.value) == (
        f"context: found 4097 tokens, expected at most max_position_embeddings, 4096 ({config})"
    )


def test_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read \(No such file or directory\)"):
        load_model(tmp_path / "absent", CPU, 8, 64)


def test_tensor_that_does_not_fit(folder_copy: Path) -> None:
    tensors = load_file(folder_copy / SHARD)
    tensors["layers.9.ffn.gate.bias"] = torch.zeros(3)
    save_file(tensors, folder_copy / SHARD)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder_copy, CPU, 8, 64)
    assert str(caught.value).splitlines() == [
        f"{folder_copy}: the checkpoint does not fit its config.json",
        "1 misshapen:",
        f"  {SHARD}: layers.9.ffn.gate.bias: found F32 [3], expected F32 [2]",
    ]


def test_nothing_is_read_before_every_tensor_is_known_to_be_there(
    folder_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of hundreds of gigabytes is refused at once."""
    monkeypatch.setattr("specialized_decode.backbone.folder.safe_open", None)
    _edit_config(folder_copy, lambda config: config["text_config"].update(num_attention_heads=8))
    with pytest.raises(CheckpointError, match=r"layers\.0\.attn\.attn_sink: found F32 \[4\], expected F32 \[8\]"):
        load_model(folder_copy, CPU, 8, 64)


def test_tokenizer_that_the_hashes_were_not_made_for(folder_copy: Path) -> None:
    right = compressed_vocab_size()
    _edit_config(folder_copy, lambda config: config["text_config"].update(engram_compressed_vocab_size=right + 1))
    with pytest.raises(CheckpointError) as caught:
        load_model(folder_copy, CPU, 8, 64)
    assert str(caught.value) == (
        f"{folder_copy / 'config.json'}: text_config.engram_compressed_vocab_size: "
        f"found {right + 1}, expected {right}, what the folder's tokenizer yields"
    )


@pytest.mark.parametrize("damage", ["absent", "broken"])
def test_tokenizer_is_needed_for_the_hashes(folder_copy: Path, damage: str) -> None:
    path = folder_copy / "tokenizer.json"
    path.unlink()
    if damage == "broken":
        path.write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json: not (found|a tokenizer \(.+\)); expected the release's"):
        load_model(folder_copy, CPU, 8, 64)


@pytest.mark.parametrize("bad", [0, -1, LAYERS + 1])
def test_aux_layers_out_of_range(model: DeepseekV41, bad: int) -> None:
    model.model.set_aux_layers((1, 2))
    with pytest.raises(ValueError, match=rf"^aux layers: found {bad}, expected 1 to {LAYERS}$"):
        model.model.set_aux_layers((3, bad))
    assert model.model.aux_layers == (1, 2)


def test_aux_hidden_states_are_the_means_of_streams(model: DeepseekV41) -> None:
    """In the order asked for; that of the last layer's end is the mean of what the MTP buffer holds."""
    hidden = _forward(model)
    assert isinstance(hidden, Tensor)
    model.model.keep_mtp_hidden(len(TOKENS) + 2)
    buffer = model.model.mtp_hidden_buffer
    assert buffer is not None
    buffer.fill_(-5)
    model.model.set_aux_layers((LAYERS, 1))
    again, aux = _forward(model)
    assert torch.equal(again, hidden)
    assert [(a.shape, a.dtype) for a in aux] == [((len(TOKENS), HIDDEN), torch.bfloat16)] * 2
    streams = buffer[: len(TOKENS)].view(len(TOKENS), STREAMS, HIDDEN)
    assert torch.equal(aux[0], streams.float().mean(1).bfloat16())
    assert (buffer[len(TOKENS) :] == -5).all()
    assert not torch.equal(aux[0], aux[1])
    model.model.set_aux_layers(tuple(range(1, LAYERS + 1)))
    every = _forward(model)[1]
    assert len(every) == LAYERS
    assert torch.equal(every[0], aux[1])
    assert torch.equal(every[-1], aux[0])
    assert not torch.equal(every[0], every[1])


def test_engram_takes_part_where_it_is_used(model: DeepseekV41) -> None:
    """Layer 1 injects first: the streams entering it are the same without Engram, those entering layer 2 are not."""
    model.model.set_aux_layers((1, 2))
    entering = [_forward(model, use_engram)[1] for use_engram in (True, False)]
    assert torch.equal(entering[0][0], entering[1][0])
    assert not torch.equal(entering[0][1], entering[1][1])


def test_logits_are_the_heads_products(model: DeepseekV41) -> None:
    hidden = _forward(model)
    logits = model.logits(hidden)
    assert (logits.dtype, logits.shape) == (torch.float32, (len(TOKENS), 600))
    assert torch.equal(logits, project(hidden, model.lm_head, torch.float32))
    wide = hidden.double() @ model.lm_head.double().T
    # Sums of 128 products of size 3: float32 keeps them to some 1e-6 each.
    torch.testing.assert_close(logits.double(), wide, rtol=0, atol=1e-4)
