"""What the DSpark script reaches into, in vLLM's own classes."""

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from tests.gpu.drafts import RATES, set_rates


def test_the_speculators_arguments() -> None:
    names = list(inspect.signature(DSparkSpeculator.propose).parameters)
    assert names[:8] == [
        "self",
        "input_batch",
        "attn_metadata",
        "slot_mappings",
        "last_hidden_states",
        "aux_hidden_states",
        "num_sampled",
        "num_rejected",
    ]
    assert "dummy_run" in names
    used = {"req_ids", "num_tokens", "positions", "input_ids", "query_start_loc_np", "is_prefilling_np"}
    assert used <= set(InputBatch.__dataclass_fields__)


def test_rates_of_a_sampler() -> None:
    config: Any = SimpleNamespace(
        num_speculative_tokens=5,
        enable_adaptive_verification=False,
        rejection_sample_method="synthetic",
        fly_entropy_threshold=0.3,
        fly_entropy_top_k=3,
        synthetic_acceptance_rates=list(RATES["mixed"] or ()),
    )
    sampler = RejectionSampler(SimpleNamespace(), config, torch.device("cpu"))
    built = sampler.synthetic_conditional_rates
    assert built is not None
    for name, rates in [*RATES.items(), *RATES.items()]:
        set_rates(sampler, rates)
        found = sampler.synthetic_conditional_rates
        if name == "real":
            assert found is None
        elif name == "mixed":
            assert found is not None and torch.equal(found, built)
        else:
            assert found is not None and found.tolist() == [float(name == "all")] * 5
