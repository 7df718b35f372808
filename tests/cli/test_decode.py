"""`decode`: what it prints, and what it says of prompts, flags and folders that do not fit."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specialized_decode.backbone.engine import LocalEngine
from specialized_decode.backbone.folder import INDEX_FILE
from specialized_decode.backbone.model import DeepseekV41, Model, load_model
from specialized_decode.backbone.tokenizer import load_tokenizer
from specialized_decode.cli import decode as module
from specialized_decode.runtime import KERNELS, DecodeConfig, SpecializedDecode
from tests.cli.conftest import STEP_TIME, Invoke, Run, line, refused, texts
from tests.helpers.small_plan import compressed_vocab_size

SHARD = "model-00001-of-00001.safetensors"
UNICODE = ("日本語のテキスト", "naïve café 😀🎉", "\u202eright to left\ttab")


def test_texts_are_what_the_model_generates(invoke: Invoke, small_folder: Path) -> None:
    """Of every prompt, in the order given, whatever its script."""
    arguments = [argument for prompt in UNICODE for argument in ("--prompt", prompt)]
    result = invoke("decode", small_folder, *arguments, "--tokens", 3)
    assert result.exit_code == 0
    tokenizer = load_tokenizer(small_folder)
    prompts = [tokenizer.encode(prompt).ids for prompt in UNICODE]
    engine = LocalEngine(load_model(small_folder, torch.device("cpu"), 512, 128), 3, 128, 512)
    expected = engine.generate(prompts, 3).tokens
    for (length, end, plain, executor), ids, tokens in zip(texts(result.stdout), prompts, expected, strict=True):
        assert length == len(ids)
        assert end == repr(" ".join(tokenizer.decode(ids[-12:]).split()))
        assert plain == executor == repr(" ".join(tokenizer.decode(tokens).split()))
    assert line(result.stdout, "identical tokens") == "9 of 9"


def test_rows_repeat_the_prompts_in_turn(invoke: Invoke, small_folder: Path) -> None:
    result = invoke("decode", small_folder, "--prompt", "a", "--prompt", "bread and", "--rows", 5, "--tokens", 2)
    rows = texts(result.stdout)
    assert len(rows) == 5
    assert rows[0][:2] != rows[1][:2]
    assert rows[0] == rows[2] == rows[4]
    assert rows[1] == rows[3]
    assert line(result.stdout, "rows") == "5, prompts of " + ", ".join(str(row[0]) for row in rows) + " tokens"
    assert line(result.stdout, "identical tokens") == "10 of 10"


def test_many_rows_are_summed_up(invoke: Invoke, small_folder: Path) -> None:
    result = invoke("decode", small_folder, "--prompt", "a", "--rows", 9, "--tokens", 1)
    assert line(result.stdout, "rows") == "9, prompts of " + "1, " * 8 + "... tokens"


def test_one_token_needs_no_decode_step(invoke: Invoke, small_folder: Path) -> None:
    result = invoke("decode", small_folder, "--prompt", "bread", "--tokens", 1)
    assert result.exit_code == 0
    assert line(result.stdout, "identical tokens") == "1 of 1"
    for label in ("plain layers", "executor"):
        account = "1 steps, 0 by the executor, 1 on the plain layers: prefill; no decode step"
        assert line(result.stdout, label) == account


def test_texts_that_differ_are_counted(invoke: Invoke, small_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the executor's head negated, only the tokens of the prefills agree."""
    head = SpecializedDecode.compute_logits
    monkeypatch.setattr(SpecializedDecode, "compute_logits", lambda executor, hidden: -head(executor, hidden))
    result = invoke("decode", small_folder, "--prompt", "a", "--prompt", "bread", "--tokens", 2)
    assert line(result.stdout, "identical tokens") == "2 of 4"
    assert all(plain != executor for _, _, plain, executor in texts(result.stdout))


@pytest.mark.parametrize("flags", [(), ("--kernels",), ("--no-kernels",)])
def test_reference_ops_on_request(
    invoke: Invoke, small_folder: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    build, configs = SpecializedDecode.for_target, []

    def recorded(backbone: Any, config: DecodeConfig, lm_head: torch.Tensor) -> SpecializedDecode:
        configs.append(config)
        return build(backbone, config, lm_head)

    monkeypatch.setattr(SpecializedDecode, "for_target", recorded)
    result = invoke("decode", small_folder, "--prompt", "a", "--tokens", 2, *flags)
    assert line(result.stdout, "identical tokens") == "2 of 2"
    assert configs == [DecodeConfig(kernels=frozenset() if "--no-kernels" in flags else KERNELS)]


@pytest.mark.parametrize(("flags", "families"), [((), KERNELS), (("--no-kernels",), frozenset())])
def test_experts_are_held_before_anything_is_computed(
    invoke: Invoke,
    small_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    families: frozenset[str],
) -> None:
    """So that both sides compute from the same weights, and no executor or graph reads those that were loaded."""
    seen: list[object] = []
    forward, build = DeepseekV41.forward, SpecializedDecode.for_target

    def computed(model: DeepseekV41, *rest: Any) -> Any:
        seen.append("forward")
        return forward(model, *rest)

    def built(target: Any, config: DecodeConfig, head: Any) -> SpecializedDecode:
        seen.append("build")
        return build(target, config, head)

    monkeypatch.setattr(module, "hold_experts", lambda target, config: seen.append((type(target), config.kernels)))
    monkeypatch.setattr(DeepseekV41, "forward", computed)
    monkeypatch.setattr(SpecializedDecode, "for_target", built)
    assert invoke("decode", small_folder, "--prompt", "a", "--tokens", 2, *flags).exit_code == 0
    assert seen[0] == (Model, families)
    assert seen.count(seen[0]) == 1 and set(seen[1:]) == {"forward", "build"}


def test_rows_past_the_executors_most_say_why(
    invoke: Invoke, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specialized_decode.runtime.executor.FUSED_MHC_MAX_ROWS", 1)
    result = invoke("decode", small_folder, "--prompt", "a", "--rows", 2, "--tokens", 2)
    account = (
        r"2 steps, 0 by the executor, 1 on the plain layers: prefill, 1 on the plain layers: 2 rows are not 1 to 1; "
    )
    assert re.fullmatch(account + STEP_TIME.format(1), line(result.stdout, "executor"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\n lines\t and  blanks ", "'two lines and blanks'"),
        ("it's", '"it\'s"'),
        ("a" * 160, "'" + "a" * 160 + "'"),
        ("a" * 161, "'" + "a" * 157 + "...'"),
    ],
)
def test_texts_take_oneline(text: str, shown: str) -> None:
    assert module._shown(text) == shown


# Flags and prompts.


def test_fewer_rows_than_prompts(invoke: Invoke, small_folder: Path) -> None:
    result = invoke("decode", small_folder, "--prompt", "a", "--prompt", "b", "--rows", 1)
    assert refused(result) == "--rows: found 1, expected at least 2, one for each prompt"


@pytest.mark.parametrize(
    "arguments", [("--rows", 0), ("--rows", 385), ("--tokens", 0), ("--context", 1), ("--device", "tpu")]
)
def test_flags_out_of_range(invoke: Invoke, small_folder: Path, arguments: tuple[str, object]) -> None:
    message = refused(invoke("decode", small_folder, *arguments), code=2)
    assert message.startswith(f"Invalid value for '{arguments[0]}': ")
    assert str(arguments[1]) in message


def test_empty_prompt(invoke: Invoke, small_folder: Path) -> None:
    result = invoke("decode", small_folder, "--prompt", "a", "--prompt", "")
    assert refused(result) == "prompt 1: found '', which is no tokens, expected at least one"


def test_context_of_just_what_is_needed(invoke: Invoke, small_folder: Path) -> None:
    length = len(load_tokenizer(small_folder).encode("bread and butter").ids)
    assert length > 3
    arguments = ("decode", small_folder, "--prompt", "a", "--prompt", "bread and butter", "--tokens", 2, "--context")
    assert invoke(*arguments, length + 2).exit_code == 0
    assert refused(invoke(*arguments, length + 1)) == (
        f"--context: found {length + 1}, expected at least {length + 2}: the longest prompt and --tokens"
    )


@pytest.mark.parametrize("arguments", [("--context", 4097), ("--tokens", 4096)])
def test_context_past_the_model(invoke: Invoke, small_folder: Path, arguments: tuple[str, int]) -> None:
    assert refused(invoke("decode", small_folder, "--prompt", "a", *arguments)) == (
        f"context: found 4097 tokens, expected at most max_position_embeddings, 4096 ({small_folder / 'config.json'})"
    )


def test_no_cuda_device(invoke: Invoke, small_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused(invoke("decode", small_folder, "--device", "cuda")) == (
        "--device cuda: found no CUDA device, expected one; `specialized-decode doctor` says more"
    )


def test_no_cuda_device_in_a_process_of_its_own(run: Run) -> None:
    done = run("decode", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "Error: --device cuda: found no CUDA device, expected one; `specialized-decode doctor` says more\n"
    )


def test_device_that_the_executor_cannot_run_on(
    invoke: Invoke, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specialized_decode.runtime.executor._refusals", lambda backbone, config: ["no such GPU", "and more"]
    )
    result = invoke("decode", small_folder, "--prompt", "a", "--tokens", 1)
    assert result.exit_code == 1
    assert result.stderr == "Error: decode_backend=latency_specialized cannot run here: no such GPU; and more\n"


def test_interrupted(invoke: Invoke, small_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalEngine, "decode", interrupt)
    result = invoke("decode", small_folder, "--prompt", "a")
    assert result.exit_code == 1
    assert result.stderr.split() == ["Aborted!"]


# Folders.

Damage = Callable[[Path], object]


def _config(**changes: Any) -> Damage:
    """Changes keys of config.json; `a__b` is b inside a."""

    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for key, value in changes.items():
            *parents, last = key.split("__")
            place = config
            for parent in parents:
                place = place[parent]
            place[last] = value
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def _tensor(name: str, value: torch.Tensor | None) -> Damage:
    """Puts `value` in a tensor's place, or takes the tensor out."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / SHARD)
        del tensors[name]
        save_file(tensors | ({} if value is None else {name: value}), folder / SHARD)

    return damage


def _unlisted(name: str) -> Damage:
    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX_FILE).read_text())
        del index["weight_map"][name]
        (folder / INDEX_FILE).write_text(json.dumps(index))

    return damage


def _truncated(folder: Path) -> None:
    with (folder / SHARD).open("rb+") as file:
        file.truncate(5000)


def _without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


NOT_FITTING = "{folder}: the checkpoint does not fit its config.json\n"
SINK = "layers.2.attn.attn_sink"
CASES: dict[str, tuple[Damage, str]] = {
    "no config": (
        _without("config.json"),
        "{folder}/config.json: cannot be read (No such file or directory); expected a DeepSeek-V4.1 model folder",
    ),
    "another model": (
        _config(model_type="llama"),
        '{folder}/config.json: model_type: found "llama", expected "deepseek_v41"',
    ),
    "unknown quantization": (
        _config(quantization_config__quant_method="awq"),
        '{folder}/config.json: quantization_config.quant_method: found "awq", expected "fp8"',
    ),
    "other expert weights": (
        _config(quantization_config__expert_dtype="int4"),
        '{folder}/config.json: quantization_config.expert_dtype: found "int4", expected "fp4"',
    ),
    "other blocks": (
        _config(quantization_config__weight_block_size=[128, 128]),
        "{folder}/config.json: quantization_config.weight_block_size: found [128, 128], expected [32, 32]",
    ),
    "truncated shard": (
        _truncated,
        NOT_FITTING + "{folder}/" + SHARD + ": found 5000 bytes, expected a safetensors header (truncated shard?)",
    ),
    "absent shard": (
        _without(SHARD),
        NOT_FITTING + "{folder}/" + SHARD + ": not found, expected because the index lists it",
    ),
    "missing tensor": (
        _tensor(SINK, None),
        NOT_FITTING + f"1 missing:\n  {SHARD}: {SINK}: listed in the index but absent, expected F32 [4]",
    ),
    "unlisted tensor": (_unlisted(SINK), NOT_FITTING + f"1 missing:\n  {SINK}: in no shard, expected F32 [4]"),
    "misshapen tensor": (
        _tensor(SINK, torch.zeros(8)),
        NOT_FITTING + f"1 misshapen:\n  {SHARD}: {SINK}: found F32 [8], expected F32 [4]",
    ),
    "wrong dtype": (
        _tensor(SINK, torch.zeros(4, dtype=torch.bfloat16)),
        NOT_FITTING + f"1 wrong dtype:\n  {SHARD}: {SINK}: found BF16 [4], expected F32 [4]",
    ),
    "no index": (
        _without(INDEX_FILE),
        "{folder}: found neither " + INDEX_FILE + " nor model.safetensors, expected a model folder",
    ),
    "no tokenizer": (
        _without("tokenizer.json"),
        "{folder}/tokenizer.json: not found; expected the release's tokenizer.json beside config.json",
    ),
    "another tokenizer's hashes": (
        _config(text_config__engram_compressed_vocab_size=9),
        "{folder}/config.json: text_config.engram_compressed_vocab_size: found 9, expected {size}, "
        "what the folder's tokenizer yields",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_damaged_folder(invoke: Invoke, folder_copy: Path, case: str) -> None:
    damage, message = CASES[case]
    damage(folder_copy)
    expected = message.replace("{folder}", str(folder_copy)).replace("{size}", str(compressed_vocab_size()))
    assert refused(invoke("decode", folder_copy, "--prompt", "a")) == expected


def test_broken_tokenizer(invoke: Invoke, folder_copy: Path) -> None:
    (folder_copy / "tokenizer.json").write_text("{}")
    message = refused(invoke("decode", folder_copy))
    assert message.startswith(f"{folder_copy / 'tokenizer.json'}: not a tokenizer (")
    assert message.endswith("); expected the release's tokenizer.json")
    assert "\n" not in message


def test_broken_config(invoke: Invoke, folder_copy: Path) -> None:
    (folder_copy / "config.json").write_text("{")
    message = refused(invoke("decode", folder_copy))
    assert message.startswith(f"{folder_copy / 'config.json'}: not valid JSON (")
    assert message.endswith("; expected the release's config.json")


@pytest.mark.parametrize("absent", ["nowhere", "file/below"])
def test_absent_folder(invoke: Invoke, tmp_path: Path, absent: str) -> None:
    (tmp_path / "file").write_text("")
    message = refused(invoke("decode", tmp_path / absent))
    assert message.startswith(f"{tmp_path / absent}/")
    assert "expected" in message
    assert "\n" not in message


def test_damaged_folder_in_a_process_of_its_own(run: Run, folder_copy: Path) -> None:
    _truncated(folder_copy)
    done = run("decode", folder_copy, "--prompt", "a")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: " + CASES["truncated shard"][1].replace("{folder}", str(folder_copy)) + "\n"
