"""What tests/gpu/repeatable.py changes in vLLM and Humming is there, and is called as it expects."""

import os
import subprocess
import sys
import textwrap

# Each changes classes for good, so each has a process.
SELECTION = """
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.layers import indexer_topk
    from tests.gpu.repeatable import make_selection_repeatable

    scores = torch.tensor([[0.5, 3.0, 1.0, 2.0], [4.0, 1.0, 0.0, 0.0]])
    unordered = torch.tensor([[3, 1], [0, -1]], dtype=torch.int32)
    _custom_ops.top_k_per_row_prefill.__globals__["torch"] = type("T", (), {"ops": type("O", (), {"_C": type("C", (), {
        "top_k_per_row_prefill": staticmethod(lambda *args: args[3].copy_(unordered))})})})
    make_selection_repeatable()
    made = indexer_topk.SparseIndexerTopk("torch")
    found = torch.zeros(2, 2, dtype=torch.int32)
    made(scores, torch.tensor([[4], [1]], dtype=torch.int32), 1, found, 2, 4)
    assert found.tolist() == [[1, 3], [0, -1]], found
    found.zero_()
    _custom_ops.top_k_per_row_prefill(scores, None, None, found, 2, 4, 1, 2)
    assert found.tolist() == [[1, 3], [0, -1]], found
"""

GEMMS = """
    from unittest import mock
    from humming.kernel.humming import HummingKernel
    from tests.gpu.repeatable import make_gemms_repeatable

    stream_k = {"block_shape": (8, 128, 64), "use_stream_k": True}
    answers = [
        ({"shape_n": 1280}, {}, dict(stream_k)),
        ({"shape_n": 1280}, {}, [(0, 8, dict(stream_k)), (8, 16, {**stream_k, "use_stream_k": False})]),
    ]
    HummingKernel._resolve_configs = lambda *args: answers.pop(0)
    HummingKernel.__new__ = lambda cls, **config: mock.Mock(kernel_id=7)
    HummingKernel.compile_many = lambda specs, device: [mock.Mock(kernel_id=8 + i) for i in range(len(specs))]
    properties = mock.Mock(multi_processor_count=132)
    # Before the process has chosen its GPU: nothing of CUDA may be asked.
    make_gemms_repeatable()
    with (
        mock.patch("torch.cuda.current_device", return_value=1),
        mock.patch("torch.cuda.get_device_properties", return_value=properties) as asked,
        mock.patch("torch.cuda.device"),
        mock.patch("humming.kernel.humming.get_device_index", return_value=0),
    ):
        assert HummingKernel.prepare_kernels({"a": 1}).tolist() == [0, 1 << 30, 7, 10]
        assert HummingKernel.prepare_kernels({"a": 2}).tolist() == [0, 8, 8, 10, 8, 16, 9, 0]
        assert {call.args for call in asked.call_args_list} == {(1,)}
"""


def run(program: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_selection() -> None:
    run(SELECTION)


def test_gemms() -> None:
    run(GEMMS)
