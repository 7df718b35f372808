"""VllmHost inside vLLM's real forward context: which captures of vLLM's Model Runner V2 the executor takes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specialized_decode.runtime import captures_pure_decode
from tests.integration import vllm_model

PREFIXES = ("model.layers.0.attn.swa_cache", "model.layers.1.attn.swa_cache")


@pytest.fixture(scope="module")
def config() -> Any:
    from vllm.config import VllmConfig

    return VllmConfig()


@pytest.fixture(scope="module")
def host(config: Any) -> Iterator[Any]:
    from specialized_decode.integration.host import VllmHost

    with vllm_model.one_rank(config):
        yield VllmHost(torch.device("cuda"))


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def window(decodes: int, prefills: int) -> Any:
    """vLLM's own metadata of a sliding-window cache."""
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata

    empty = torch.zeros(1, dtype=torch.int64)
    return DeepseekSparseSWAMetadata(empty, empty, 32, num_decodes=decodes, num_prefills=prefills)


def metadata(kind: str) -> Any:
    pure, mixed = window(4, 0), window(3, 1)
    return {
        "pure": {PREFIXES[0]: pure, PREFIXES[1]: pure, "other": mixed},
        "one mixed": {PREFIXES[0]: pure, PREFIXES[1]: mixed},
        "one missing": {PREFIXES[0]: pure},
        # While memory is profiled, and with micro-batches.
        "none": None,
        "list": [{PREFIXES[0]: pure, PREFIXES[1]: pure}],
    }[kind]


@pytest.mark.parametrize("kind", ["pure", "one mixed", "one missing", "none", "list"])
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_pure_decode(host: Any, config: Any, capturing: None, kind: str, mode: str) -> None:
    """vLLM captures FULL graphs with mode NONE, and replays them without a forward."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import set_forward_context

    with set_forward_context(metadata(kind), config, num_tokens=4, cudagraph_runtime_mode=CUDAGraphMode[mode]):
        assert host.forward_context_available()
        assert host.graph_mode() == mode
        assert captures_pure_decode(host, PREFIXES) == (mode == "NONE" and kind == "pure")
    assert not host.forward_context_available()


def test_an_eager_forward_is_no_capture(host: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.forward_context import set_forward_context

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with set_forward_context(metadata("pure"), config, num_tokens=4):
        assert not captures_pure_decode(host, PREFIXES)


def test_single_rank(host: Any) -> None:
    group = host.tp_group
    assert (group.rank, group.size, group.process_group) == (0, 1, None)
    assert group.min(3) == 3
    tensor = torch.arange(6.0).view(2, 3)
    assert torch.equal(group.all_gather(tensor), tensor.unsqueeze(0))


def test_threshold_is_vllms(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.multi_stream_threshold == 1024
    monkeypatch.setenv("VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD", "16")
    assert host.multi_stream_threshold == 16


def _agree(rank: int, size: int, file: str, results: Any) -> None:
    import torch.distributed as dist
    from vllm.distributed.parallel_state import GroupCoordinator

    import tests.integration.conftest  # noqa: F401  # a platform for this process too
    from specialized_decode.integration.host import VllmTpGroup

    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=size)
    # Without a device communicator, which needs GPUs: votes are taken on the host.
    group = VllmTpGroup(GroupCoordinator([[0, 1]], rank, "gloo", use_device_communicator=False, group_name="tp"))
    results[rank] = (group.rank, group.size, group.min(7 - rank), group.process_group is not None)


def test_ranks_agree(tmp_path: Any) -> None:
    """Two processes: each gets the smallest of both values."""
    import torch.multiprocessing as mp

    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_agree, (2, str(tmp_path / "store"), results), nprocs=2)
        assert dict(results) == {0: (0, 2, 6, True), 1: (1, 2, 6, True)}
