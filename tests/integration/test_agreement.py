"""All ranks build the executor, or all raise what any of them lacks: over vLLM's own TP group."""

import json
import re
import socket
from pathlib import Path

import pytest
import torch.multiprocessing as mp

from specialized_decode.integration import config as check

ROWS = ("first", "second", "third")
# By case: the rows that fail, by rank.
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "nowhere": ((), ()),
    "on one rank": ((), ("second",)),
    "on both": (("first", "second"), ("second",)),
}


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _rank(rank: int, port: int, folder: str) -> None:
    """One rank: writes what it raises in each case."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    said = {}
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(2, backend="gloo")
        for case, broken in CASES.items():
            rows = [check.Row(name, name not in broken[rank], f"{name}{rank}", "better", "mend it") for name in ROWS]
            try:
                check.refuse(check.agree(rows, check._tp_minimum))
                said[case] = ""
            except check.UnsupportedDeployment as error:
                said[case] = str(error)
    Path(folder, f"{rank}.json").write_text(json.dumps(said))


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank raised, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(_rank, (_port(), str(folder)), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_raises_what_is_missing_on_any(said: list[dict[str, str]], case: str, rank: int) -> None:
    broken = CASES[case]
    row = re.compile(r"^  (\w+): found (.+?); expected better\. To satisfy: mend it\.$", re.MULTILINE)
    found = dict(row.findall(said[rank][case]))
    anywhere = {name for names in broken for name in names}
    assert found == {
        name: f"{name}{rank}" + ("" if name in broken[rank] else " here, less on another rank") for name in anywhere
    }
    assert bool(said[rank][case]) == bool(anywhere)
