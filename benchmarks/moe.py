"""One layer's low-batch MoE in CUDA graphs, at the widths of a rank, from the normed input to unfinalized rows.

`python -m benchmarks.moe` on one GPU writes benchmarks/results/moe_h200.json: the MoE kernels, and vLLM's router,
routed and shared experts on the same weights where vLLM can be imported, in turn in one run. Stock finalizes, on one
stream. Needs the checkout's tests beside it, whose layers it takes.
"""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.results import FOLDER, write_gpu_result
from benchmarks.stock_linear import StockLinear
from benchmarks.timing import replayed
from specialized_decode.moe.fused import FusedMoE
from tests.helpers.held_moe import HeldMoE, held_moe, inputs

HIDDEN, EXPERTS, TOPK, LIMIT, SCALING = 5120, 384, 6, 10.0, 1.5
WIDTHS, ROWS = (576, 288), (1, 2, 4, 8)
# Layers of a chain: at one row they read eight times 41 MB, more than the second-level cache six times over.
LAYERS = 8
CHAIN, REPLAYS = 40, 30
# Experts that a skewed routing prefers, and by how much.
POPULAR, PREFERENCE = 16, 1.0
TERABYTES = 4.41

Step = Callable[[int], object]


class Layers:
    """Layers of one width, and inputs of one row count."""

    def __init__(self, width: int, count: int) -> None:
        self.width = width
        self.layers = [held_moe(seed, EXPERTS, HIDDEN, width, "cuda", image=False) for seed in range(count)]
        self.fused = [FusedMoE(layer) for layer in self.layers]
        self.fused[0].warm_up()

    def route_by(self, skewed: bool) -> None:
        """Biases: small ones, or some experts preferred."""
        for seed, layer in enumerate(self.layers):
            generator = torch.Generator("cuda").manual_seed(seed)
            layer.bias.copy_(torch.randn(EXPERTS, generator=generator, device="cuda") * 0.05)
            if skewed:
                layer.bias[torch.randperm(EXPERTS, generator=generator, device="cuda")[:POPULAR]] += PREFERENCE

    def bytes(self, ids: list[Tensor]) -> float:
        """What one layer has to read once, in the mean: gate, chosen experts without their padding, shared one."""
        per_expert = 3 * self.width * HIDDEN * (0.5 + 1 / 32)
        distinct = statistics.mean(len(one.unique()) for one in ids)
        return 2 * EXPERTS * HIDDEN + distinct * per_expert + 3 * self.width * HIDDEN * (1 + 1 / 1024)


def chains(layers: Layers, rows: int, stock: "Stock | None") -> tuple[dict[str, Step], list[Tensor]]:
    """What is timed, by name, each given a number in its chain; the experts that the layers choose."""
    given = [inputs(seed, rows, HIDDEN, "cuda") for seed in range(LAYERS)]

    def pick(number: int) -> tuple[FusedMoE, Tensor, Tensor]:
        at = number % len(layers.fused)
        return layers.fused[at], *given[at]

    def whole(number: int) -> object:
        moe, x, ids = pick(number)
        routing = moe.route(x, ids)
        return moe.down(routing, moe.up(routing))

    routings = [moe.route(*given[at]) for at, moe in enumerate(layers.fused)]
    hiddens = [moe.up(routing) for moe, routing in zip(layers.fused, routings, strict=True)]
    count = len(layers.fused)
    found: dict[str, Step] = {
        "kernels": whole,
        "kernels: front and routing": lambda number: pick(number)[0].route(*pick(number)[1:]),
        "kernels: up": lambda number: pick(number)[0].up(routings[number % count]),
        "kernels: down": lambda number: pick(number)[0].down(routings[number % count], hiddens[number % count]),
    }
    if stock is not None:
        found["stock"] = lambda number: stock(layers.layers[number % count], given[number % count][0])
    return found, [routing.ids for routing in routings]


class Stock:
    """vLLM's router, routed experts, as its Humming backend's indexed experts call them, and shared expert."""

    def __init__(self, width: int) -> None:
        import pytest
        from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, MoEActivation
        from vllm.model_executor.layers.quantization.utils.humming.activation import get_humming_activation
        from vllm.utils.humming import GemmType, create_humming_locks, get_heuristics_config

        from tests.helpers.stock_experts import as_loaded, convert, random_experts

        # One layer for its configuration; its weights are dropped.
        with pytest.MonkeyPatch.context() as patch:
            layer = convert(as_loaded(random_experts(0, EXPERTS, HIDDEN, width, "one", "cuda")), patch)
        self.configs = layer.humming_configs
        gemm = GemmType.INDEXED
        self.tuning = {
            name: get_heuristics_config(layer_config=config, gemm_type=gemm) for name, config in self.configs.items()
        }
        self.compute = json.dumps({"gemm_type": gemm.value})
        self.locks = create_humming_locks(torch.device("cuda"))
        self.activation = get_humming_activation(MoEActivation.SILU, ApplyMoEActivationConfig(clamp_limit=LIMIT))
        self.shared_layers: dict[int, tuple[StockLinear, StockLinear]] = {}

    def __call__(self, layer: HeldMoE, x: Tensor) -> Tensor:
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
        from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum
        from vllm.model_executor.layers.fused_moe.router.dsv4_topk import dsv4_topk

        logits = torch.mm(x, layer.gate.weight.T, out_dtype=torch.float32)
        weights, ids = dsv4_topk(logits, layer.bias, torch.int32, SCALING)
        pairs = ids.numel()
        aligned = {
            block: moe_align_block_size(ids, block, EXPERTS, ignore_invalid_experts=True)
            for block in {self._block(name, pairs) for name in ("w13", "w2")}
        }
        up = self._project("w13", layer.held.w13, x, aligned, pairs, TOPK, {})
        down = self._project("w2", layer.held.w2, up, aligned, pairs, 1, self.activation)
        out: Tensor = moe_fused_mul_sum(down.view(*ids.shape, HIDDEN), weights, topk_ids=ids)
        return out.add_(self._shared(layer, x))

    def _shared(self, layer: HeldMoE, x: Tensor) -> Tensor:
        """A layer's first call, outside of captures, repacks its weights."""
        if id(layer) not in self.shared_layers:
            up, down = layer.shared_up, layer.shared_down
            assert up.scale is not None and down.scale is not None
            self.shared_layers[id(layer)] = StockLinear(up.weight, up.scale), StockLinear(down.weight, down.scale)
        first, second = self.shared_layers[id(layer)]
        gate_up = first(x)
        hidden = gate_up.new_empty(x.shape[0], gate_up.shape[1] // 2)
        torch.ops._C.silu_and_mul_with_clamp(hidden, gate_up, LIMIT, 1.0, 0.0)
        return second(hidden)

    def _block(self, name: str, pairs: int) -> int:
        return next(
            (int(config["block_shape"][0]) for low, high, config in self.tuning[name] if low < pairs <= high), 64
        )

    def _project(
        self,
        name: str,
        weight: Any,
        x: Tensor,
        aligned: dict[int, Any],
        pairs: int,
        topk: int,
        activation: dict[str, str],
    ) -> Tensor:
        from vllm.utils.humming import humming_forward, may_process_input

        config = self.configs[name]
        columns = config.shape_k - config.pad_shape_k
        quantized = torch.empty(x.shape[0], columns, dtype=torch.float8_e4m3fn, device="cuda")
        x, group_scales, _ = may_process_input(
            config, inputs=x, outputs=quantized, token_scales=None, hadamard_block_size=None, layout="normal",
            expert_tokens=None, scatter_idx=None, num_valid_tokens=None, **activation,
        )  # fmt: skip
        outputs = torch.empty(pairs, config.shape_n - config.pad_shape_n, dtype=torch.bfloat16, device="cuda")
        sorted_ids, expert_ids, padded = aligned[self._block(name, pairs)][:3]
        humming_forward(
            config, inputs=x, weight=weight.weight, weight_scale=weight.weight_scale,
            weight_scale_2=weight.weight_scale_2, input_scale=group_scales, outputs=outputs, locks=self.locks,
            sorted_ids=sorted_ids, expert_ids=expert_ids, num_tokens_padded=padded, compute_config=self.compute,
            valid_shape_m=pairs, top_k=topk, tuning_config=json.dumps(self.tuning[name]),
        )  # fmt: skip
        return outputs


def stock_of(layers: Layers) -> Stock | None:
    """Stock's part, or None, with the reason said, where it cannot run here."""
    try:
        stock = Stock(layers.width)
        stock(layers.layers[0], inputs(0, 1, HIDDEN, "cuda")[0])
        return stock
    except Exception as error:
        click.echo(f"no stock layer: {type(error).__name__}: {error}", err=True)
        return None


def interleaved(steps: dict[str, Step], replays: int) -> dict[str, list[float]]:
    """All graphs of CHAIN layers replay in turn; microseconds a layer, of each replay."""
    graphs = {}
    for name, step in steps.items():
        for number in range(LAYERS):
            step(number)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], capture_error_mode="thread_local"):
            kept = [step(number) for number in range(CHAIN)]
        del kept
    return replayed({name: (graph, CHAIN) for name, graph in graphs.items()}, replays)


def measure(layers: Layers, rows: int, skewed: bool, stock: Stock | None, replays: int) -> dict[str, Any]:
    """One row count and routing."""
    layers.route_by(skewed)
    steps, ids = chains(layers, rows, stock)
    times = interleaved(steps, replays)
    quartiles = {name: statistics.quantiles(values, n=4, method="inclusive") for name, values in times.items()}
    size = layers.bytes(ids)
    return {
        "width": layers.width,
        "rows": rows,
        "routing": "skewed" if skewed else "random",
        "distinct_experts": round(statistics.mean(len(one.unique()) for one in ids), 1),
        "mb": round(size / 1e6, 1),
        "of_bandwidth": round(size / (quartiles["kernels"][1] * 1e-6) / (TERABYTES * 1e12), 3),
        "us": {
            name: {"median": round(median, 2), "q1": round(q1, 2), "q3": round(q3, 2)}
            for name, (q1, median, q3) in quartiles.items()
        },
    }


@click.command()
@click.option("--name", default="moe_h200", show_default=True, help="Name of the result.")
@click.option("--commit", "given", help="The commit, where the checkout is a copy without its history.")
@click.option("--out", type=click.Path(path_type=Path), default=FOLDER, help="Folder that the result is written to.")
@click.option("--no-stock", is_flag=True, help="Leave vLLM's kernels out.")
@click.option("--replays", type=click.IntRange(min=2), default=REPLAYS, show_default=True)
@click.option("--rows", "only_rows", type=click.IntRange(1, 8), multiple=True, help="Row counts; 1, 2, 4, 8.")
@click.option("--width", "only_widths", type=int, multiple=True, help="Widths of a rank; 576 and 288.")
def main(
    name: str,
    given: str | None,
    out: Path,
    no_stock: bool,
    replays: int,
    only_rows: tuple[int, ...],
    only_widths: tuple[int, ...],
) -> None:
    """Times one layer's MoE on the current GPU."""
    runs = []
    for width in only_widths or WIDTHS:
        layers = Layers(width, LAYERS)
        stock = None if no_stock else stock_of(layers)
        for skewed in (False, True):
            for rows in only_rows or ROWS:
                run = measure(layers, rows, skewed, stock, replays)
                runs.append(run)
                click.echo(json.dumps(run))
                # Anew after each: a time limit then loses no run.
                fields = {"hidden_size": HIDDEN, "experts": EXPERTS, "layers": LAYERS, "runs": runs}
                write_gpu_result(out / f"{name}.json", "moe", given, fields)
        del layers, stock
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(prog_name="moe")
