"""The vision script's prompts, by vLLM's own processor of images on a folder of ours."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from specialized_decode.backbone.config import IMAGE_TOKEN_ID
from specialized_decode.backbone.writer import tiny_plan, write_checkpoint
from specialized_decode.cli.main import main
from tests.gpu import vision_phases
from tests.gpu.vision_phases import ALL, REQUESTS, inputs, run_images
from tests.integration import vllm_model


def test_an_image_ends_the_first_prompt() -> None:
    first, second, none = (inputs(index, 1) for index in ALL)
    assert first["prompt_token_ids"][-1] == IMAGE_TOKEN_ID and len(first["prompt_token_ids"]) == 21
    assert second["prompt_token_ids"][1] == IMAGE_TOKEN_ID and len(second["prompt_token_ids"]) == 202
    assert IMAGE_TOKEN_ID not in none["prompt_token_ids"] and "multi_modal_data" not in none
    images = [inputs(0, seed)["multi_modal_data"]["image"] for seed in (1, 1, 2)]
    assert images[0].size == REQUESTS[0][2]
    assert images[0].tobytes() == images[1].tobytes() != images[2].tobytes()


def test_prompts_are_as_long_as_vllm_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def generate(prompts: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        return [SimpleNamespace(prompt_token_ids=[0] * (300 + i)) for i in range(len(prompts))]

    class Stepping:
        """Gives each request two tokens, one a step; it tells which requests were running when one came."""

        def __init__(self) -> None:
            self.running: dict[str, list[int]] = {}

        def add_request(self, name: str, given: Any, sampling: Any) -> None:
            asked.append((name, given, sampling, {one: len(tokens) for one, tokens in self.running.items()}))
            self.running[name] = []

        def has_unfinished_requests(self) -> bool:
            return bool(self.running)

        def step(self) -> list[Any]:
            outputs = []
            for name, tokens in list(self.running.items()):
                tokens.append(5 + len(tokens))
                outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=tokens)]))
                if len(tokens) == 2:
                    del self.running[name]
            return outputs

    monkeypatch.setattr(vision_phases, "parameters", lambda *args, **kwargs: args)
    engine: Any = SimpleNamespace(llm=SimpleNamespace(generate=generate, llm_engine=Stepping()), take=dict)
    found = run_images(engine, 1, [0, 2], {"0": [7], "2": [8]})
    assert found.tokens == {"0": [5, 6], "2": [5, 6]}
    assert [(one[0], one[2][1], one[2][3]) for one in asked] == [("0", 300, [7]), ("2", 301, [8])]
    assert "multi_modal_data" in asked[0][1] and "multi_modal_data" not in asked[1][1]
    # The second comes when the first has a token.
    assert [one[3] for one in asked] == [{}, {"0": 1}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "flash"
    command = ["make-checkpoint", str(path), "--preset", "flash", "--layers", "8", "--shard-tp", "4", "--no-weights"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    return path


def test_vllm_expands_the_image(folder: Path) -> None:
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    config = ModelConfig(model=str(folder), max_model_len=2048, limit_mm_per_prompt={"image": 1})
    assert config.is_multimodal_model
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    for index, (before, after, size) in enumerate(REQUESTS):
        if size is None:
            continue
        given = inputs(index, 1)
        items = processor.info.parse_mm_data(given["multi_modal_data"])
        found = processor.apply(ProcessorInputs(given["prompt_token_ids"], items), TimingContext(enabled=False))[
            "prompt_token_ids"
        ]
        ids = [one for one in given["prompt_token_ids"] if one != IMAGE_TOKEN_ID]
        assert [*found[:before], *found[len(found) - after :]] == ids
        assert 100 < len(found) - len(ids) < 1025
        assert set(found[before : len(found) - after]) == {IMAGE_TOKEN_ID}


def test_the_wrapper_loads_a_folder_without_a_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text model's weights come whole, the drafts' are left out, and the tower is left for the script to fill."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.models.deepseek_v41.nvidia.vl_model import DeepseekV41ForCausalLM

    folder = write_checkpoint(tiny_plan(drafts=3), tmp_path / "drafts")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    images: dict[str, Any] = {"limit_mm_per_prompt": {"image": 1}, "mm_encoder_attn_backend": "TORCH_SDPA"}
    sizes: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 2048}
    arguments = EngineArgs(model=str(folder), engram_config={"cpu_offload": False}, **sizes, **images)
    config = arguments.create_engine_config()
    with vllm_model.one_rank(config):
        text = vllm_model.build(config, monkeypatch)
        config.compilation_config.static_forward_context.clear()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = DeepseekV41ForCausalLM(vllm_config=config, prefix="")
        finally:
            torch.set_default_dtype(torch.float32)
        tower = [name for name, _ in model.named_parameters() if not name.startswith("language_model.")]
        for one in (model, text):
            for parameter in one.parameters():
                parameter.data.view(torch.uint8).fill_(0x5A)
            DefaultModelLoader(config.load_config).load_weights(one, config.model_config)
        inside = dict(model.language_model.named_parameters())
        for name, expected in text.named_parameters():
            assert torch.equal(inside[name].view(torch.uint8), expected.view(torch.uint8)), name
        # What no tensor of the folder has touched; a tower of two layers.
        untouched = {name for name, one in model.named_parameters() if bool((one.view(torch.uint8) == 0x5A).all())}
        assert untouched == set(tower) and len(tower) > 20
        assert vision_phases.fill_tower(model) == len(tower)
        assert all(one.isfinite().all() for name, one in model.named_parameters() if name in untouched)
