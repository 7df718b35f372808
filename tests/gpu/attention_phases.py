"""What one layer's attention takes in a decode step, vLLM's and the executor's, in one engine on the same weights.

A layer's attention has a time only between the boundaries around it. So the same step is captured several times, each
time with the attention of one more kind of layers left out, in an order in which nobody reads what a layer that is left
out would have made: the graphs differ by that kind's attention. All graphs are replayed in turn over one batch.

Left out is the call that a layer's neighbours see: vLLM's module returns a tensor of zeros [T, hidden], and so does the
executor's step, whose boundary takes it as it takes the attention's. Neither launches anything. Three more things would
tell the graphs apart, and are held alike. Every row goes to the same experts, whatever attention gives. vLLM's mHC
works in line with attention, while the executor's coefficients run beside it and would come to light where it is
missing: the side `executor` is without them, `executor's step` with them, as steps run. And a boundary right behind a
boundary does not read its streams early.
"""

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.gpu.engine import Engine, Steps, parameters
from tests.gpu.report import Report
from tests.gpu.scenarios import prompt

# In the order in which they are left out: reads what another layer selected; selects among candidates; compresses and
# selects; reads its window alone. The last makes the window's table, which counts as its own.
KINDS = ("reader", "consumer", "source", "window")
VLLM, EXECUTOR, STEP = SIDES = ("vLLM", "executor", "executor's step")
ROWS = (1, 8, 16)
SHAPES = tuple(itertools.product(ROWS, (300, 8192)))
ROUNDS = 100
# A bias that no score reaches.
CHOSEN = 1000.0
# Between the engine's graph of a step and the same step captured again.
MOST_APART = 0.05
# Of a graph is left without any attention, by far, at least.
LEAST_REST = 0.1

# Graphs by rows.
Graphs = dict[int, Any]
Spread = dict[str, float]


def kind_of(attn: Any) -> str:
    """The kind of a layer, by its attention: vLLM's module, or the executor's view of it."""
    if not attn.compress_ratio:
        return "window"
    if attn.indexer is None:
        return "reader"
    return "consumer" if attn.compressor is None else "source"


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An object with an attribute of its own in the place of its, or its class's."""
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


class FixedMixes:
    """Coefficients that nothing works out: even ones, which keep the streams' size."""

    def __init__(self, max_rows: int, streams: int, device: torch.device) -> None:
        even = 1 / streams
        self._pre = torch.full((max_rows, streams), even, dtype=torch.float32, device=device)
        self._post, self._comb = self._pre.clone(), self._pre.unsqueeze(2).repeat(1, 1, streams)

    def first(self, x: Tensor, residual: Tensor, mixer: Any, finish_on: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """As boundary.coefficients.Coefficients.first."""
        return self(residual, mixer)

    def __call__(self, residual: Tensor, mixer: Any, finish_on: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """As Coefficients'."""
        rows = residual.shape[0]
        return self._pre[:rows], self._post[:rows], self._comb[:rows]


@dataclass(frozen=True)
class Constants:
    """What graphs read in the place of what was left out of them; to be kept as long as they are."""

    attention: Tensor
    mixes: FixedMixes

    @classmethod
    def of(cls, executor: Any, max_rows: int) -> "Constants":
        config, device = executor.target.config, executor.device
        zeros = torch.zeros(max_rows, config.hidden_size, dtype=torch.bfloat16, device=device)
        return cls(zeros, FixedMixes(max_rows, config.hc_mult, device))


class LeftOut:
    """Attention of some layers, by number, left out of a model's and an executor's forwards while it is entered.

    calls: those left out inside captures.
    """

    def __init__(self, model: Any, executor: Any, layers: Sequence[int], zeros: Tensor) -> None:
        """model: a DeepseekV41LLMForCausalLM; executor: its SpecializedDecode; zeros: [rows, hidden], the output."""
        self.model, self.executor, self.layers, self.zeros = model.model, executor, layers, zeros
        self.calls, self._skipped, self._stack = 0, False, ExitStack()

    def __enter__(self) -> "LeftOut":
        plans = {plan.layer_id: plan for plan in self.executor.layers}
        for number in self.layers:
            self._stack.enter_context(replaced(self.model.layers[number].attn, "forward", self._forward))
            self._stack.enter_context(replaced(plans[number].attention, "run", self._run))
        full = self.executor.all_reduce.full

        def after_any(*args: Any, settled: bool = False, **kwargs: Any) -> Any:
            """A boundary; streams that the launch right ahead wrote are not settled yet."""
            skipped, self._skipped = self._skipped, False
            return full(*args, settled=settled and not skipped, **kwargs)

        self._stack.enter_context(replaced(self.executor.all_reduce, "full", after_any))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _forward(self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None) -> Tensor:
        """In the place of vLLM's layer."""
        return self._nothing(positions)

    def _run(self, x: Tensor, quant: Any, positions: Tensor, step: Any) -> Tensor:
        """In the place of the executor's."""
        self._skipped = True
        return self._nothing(positions)

    def _nothing(self, positions: Tensor) -> Tensor:
        self.calls += torch.cuda.is_current_stream_capturing()
        return self.zeros[: positions.shape[0]]


@contextmanager
def on_side(executor: Any, side: str, mixes: FixedMixes) -> Iterator[None]:
    """A capture's forward on vLLM's layers, on the executor's without coefficients, or as the executor runs it."""
    with ExitStack() as stack:
        if side == VLLM:
            stack.enter_context(replaced(executor, "plan", lambda positions, intermediate_tensors: None))
        elif side == EXECUTOR:
            plan = executor.plan

            def inline(positions: Tensor, intermediate_tensors: Any) -> Any:
                step = plan(positions, intermediate_tensors)
                return step if step is None else step._replace(side_stream=False)

            stack.enter_context(replaced(executor, "plan", inline))
            stack.enter_context(replaced(executor.boundaries, "coefficients", mixes))
        yield


@contextmanager
def fixed_routing(layers: Sequence[Any]) -> Iterator[None]:
    """vLLM's decoder layers with every row routed to the same experts, other ones in each layer; the executor's kernels
    read the same biases."""
    kept: list[tuple[Tensor, Tensor]] = []
    with torch.inference_mode():
        for number, layer in enumerate(layers):
            gate, topk = layer.ffn.gate, layer.ffn.n_activated_experts
            for bias in (gate.e_score_correction_bias, getattr(gate, "bias_vl", None)):
                if bias is not None:
                    kept.append((bias, bias.clone()))
                    chosen = (number * topk + torch.arange(topk, device=bias.device)) % bias.shape[0]
                    bias.zero_()
                    bias[chosen] = CHOSEN
    try:
        yield
    finally:
        with torch.inference_mode():
            for bias, before in kept:
                bias.copy_(before)


def capture(runner: Any) -> Graphs:
    """Captures vLLM's graphs once more, beside those that it has, over the same inputs and caches."""
    from vllm.config import set_current_vllm_config

    manager = runner.cudagraph_manager
    own = dict(manager.graphs)
    manager.graphs.clear()
    try:
        with set_current_vllm_config(runner.vllm_config):
            # The workspaces, which all graphs share, stay as they are.
            runner.capture_model(profile_only=True)
        return {desc.num_tokens: graph for desc, graph in manager.graphs.items()}
    finally:
        manager.graphs.clear()
        manager.graphs.update(own)


def layers_by_kind(model: Any) -> dict[str, list[int]]:
    """Numbers of the decoder layers of each kind, in the order in which kinds are left out; those there are."""
    numbers: dict[str, list[int]] = {kind: [] for kind in KINDS}
    backbone = model.model
    for number in range(backbone.start_layer, backbone.end_layer):
        numbers[kind_of(backbone.layers[number].attn)].append(number)
    return {kind: found for kind, found in numbers.items() if found}


def capture_side(runner: Any, side: str, captured: Counter[int], constants: Constants) -> list[Graphs]:
    """One side's graphs: whole, then with one kind more left out each. captured: the executor's captures by rows.

    Raises RuntimeError where another side was captured, or not all of a kind was left out.
    """
    model, executor = runner.get_model(), runner.model_state.executor
    kinds = layers_by_kind(model)
    found: list[Graphs] = []
    out: list[int] = []
    for kind in ("nothing", *kinds):
        out += kinds.get(kind, [])
        before = captured.copy()
        with on_side(executor, side, constants.mixes), LeftOut(model, executor, out, constants.attention) as left:
            found.append(capture(runner))
        by_executor = captured - before
        expected = Counter[int]() if side == VLLM else Counter(ROWS)
        if sorted(found[-1]) != sorted(ROWS) or by_executor != expected or left.calls != len(ROWS) * len(out):
            raise RuntimeError(
                f"{side} without {kind}: found graphs of {sorted(found[-1])} rows, the executor's {dict(by_executor)}, "
                f"{left.calls} calls left out; expected {sorted(ROWS)}, {dict(expected)}, {len(ROWS) * len(out)}"
            )
    return found


def warm_boundary(executor: Any, constants: Constants) -> None:
    """Compiles and loads the boundary that reads no streams early, which no step of the executor's has."""
    layer = executor.layers[0].layer
    for rows in ROWS:
        x = constants.attention[:rows]
        streams = x.unsqueeze(1).repeat(1, executor.target.config.hc_mult, 1)
        pre, post, comb = constants.mixes(streams, None)
        executor.all_reduce.full(x, streams, post, comb, pre, layer.ffn_norm, layer.eps, False, settled=False)
    executor.all_reduce.reset()


def check_kernels(executor: Any) -> list[str]:
    """What of the executor does not run on its own kernels here."""
    named = {"attention": [type(plan.attention).__name__ for plan in executor.layers]}
    named["boundaries"] = [type(executor.boundaries).__name__]
    expected = {"attention": "AttentionStep", "boundaries": "Boundaries"}
    return [
        f"{what}: found {', '.join(sorted(set(names)))}, expected {expected[what]}"
        for what, names in named.items()
        if set(names) != {expected[what]}
    ]


@contextmanager
def decoding(engine: Engine, steps: Steps, rows: int, context: int) -> Iterator[None]:
    """`rows` requests past a prompt of `context` tokens; their last step was a replay of their graph, whose inputs are
    still there. steps: as tests.gpu.engine.watch_steps counts them."""
    llm_engine, names = engine.llm.llm_engine, [f"attention-{row}" for row in range(rows)]
    for row, name in enumerate(names):
        sampling = parameters("", context, 64 + rows * context // 1000, None, record=False)
        llm_engine.add_request(name, {"prompt_token_ids": prompt(context, 700 + row)}, sampling)
    before = steps.replays[rows]
    try:
        while steps.replays[rows] < before + 8 and llm_engine.has_unfinished_requests():
            llm_engine.step()
        torch.cuda.synchronize()
        lengths = engine.runner.input_buffers.seq_lens[:rows].tolist()
        if steps.replays[rows] < before + 8 or not all(context < length <= context + 200 for length in lengths):
            replays = steps.replays[rows] - before
            raise RuntimeError(f"{rows} rows: found contexts {lengths} after {replays} replays, expected {context}")
        yield
    finally:
        llm_engine.abort_request(names)
        while llm_engine.has_unfinished_requests():
            llm_engine.step()


def replay_times(graphs: Sequence[Any], rounds: int) -> list[list[float]]:
    """Microseconds of `rounds` replays of each graph, on the GPU's clock; the graphs take turns."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds * len(graphs) + 1)]
    with torch.inference_mode():
        for graph in graphs:
            graph.replay()
        events[0].record()
        for number, event in enumerate(events[1:]):
            graphs[number % len(graphs)].replay()
            event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]
    return [times[first :: len(graphs)] for first in range(len(graphs))]


def layer_times(times: Sequence[Sequence[float]], kinds: Mapping[str, int]) -> dict[str, list[float]]:
    """Microseconds a layer in each round. times: of the whole graph, then with one kind more left out each; kinds: how
    many layers there are of each."""
    return {
        kind: [(more - less) / count for more, less in zip(whole, without, strict=True)]
        for (kind, count), (whole, without) in zip(kinds.items(), itertools.pairwise(times), strict=True)
    }


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles."""
    q1, median, q3 = (round(value, 3) for value in statistics.quantiles(values, n=4, method="inclusive"))
    return {"median": median, "q1": q1, "q3": q3}


def side_record(times: Sequence[Sequence[float]], kinds: Mapping[str, int]) -> dict[str, Any]:
    """One side's numbers: us a layer by kind, us of the whole graph, and of what is left without attention."""
    layers = {kind: spread(values) for kind, values in layer_times(times, kinds).items()}
    return {"layer_us": layers, "graph_us": spread(times[0]), "rest_us": spread(times[-1])}


def nonsense(sides: Mapping[str, Mapping[str, Any]], engine_us: Spread) -> list[str]:
    """What cannot be in one shape's numbers. engine_us: of the graph that the engine itself replays."""
    found = []
    for side, record in sides.items():
        for kind, us in record["layer_us"].items():
            if us["median"] <= 0:
                found.append(f"{side}: {kind}: found {us['median']:.2f} us a layer, expected more than 0")
        rest, graph = record["rest_us"]["median"], record["graph_us"]["median"]
        if not LEAST_REST * graph <= rest < graph:
            found.append(f"{side}: without attention: found {rest:.0f} of {graph:.0f} us, expected a part of them")
    again = sides[STEP]["graph_us"]["median"]
    if abs(again / engine_us["median"] - 1) > MOST_APART:
        found.append(f"{STEP}: found {again:.0f} us, the engine's own graph takes {engine_us['median']:.0f}")
    return found


def check_attention(engine: Engine, steps: Steps, graphs: Mapping[str, Sequence[Graphs]]) -> Report:
    """Times all graphs over batches of each shape."""
    runner = engine.runner
    model, failures, runs, said = runner.get_model(), [], [], []
    kinds = {kind: len(numbers) for kind, numbers in layers_by_kind(model).items()}
    own = {desc.num_tokens: graph for desc, graph in runner.cudagraph_manager.graphs.items()}
    backbone = model.model
    for rows, context in SHAPES:
        order = [one[rows] for side in SIDES for one in graphs[side]]
        with decoding(engine, steps, rows, context):
            with fixed_routing(backbone.layers[backbone.start_layer : backbone.end_layer]):
                *times, engine_times = replay_times([*order, own[rows]], ROUNDS)
        each = len(kinds) + 1
        sides = {side: side_record(times[i * each : (i + 1) * each], kinds) for i, side in enumerate(SIDES)}
        engine_us = spread(engine_times)
        failures += [f"{rows}x{context}: {failure}" for failure in nonsense(sides, engine_us)]
        runs.append({"rows": rows, "context": context, "sides": sides, "engine_us": engine_us})
        said.append(f"{rows}x{context}: " + ", ".join(told(kind, sides) for kind in kinds))
    line = f"us a layer on {', '.join(SIDES)}: {'; '.join(said)}"
    return Report(line, failures, {"layers": kinds, "replays": ROUNDS, "runs": runs})


def told(kind: str, sides: Mapping[str, Mapping[str, Any]]) -> str:
    """A kind's medians, side by side."""
    medians = (record["layer_us"][kind]["median"] for record in sides.values())
    return f"{kind} {' / '.join(f'{median:.1f}' for median in medians)}"


def capture_all(
    engine: Engine, captured: Counter[int], constants: Constants, graphs: dict[str, list[Graphs]]
) -> Report:
    """Captures every side into `graphs`."""
    executor = engine.runner.model_state.executor
    failures = check_kernels(executor)
    if failures:
        return Report(failures[0], failures)
    warm_boundary(executor, constants)
    for side in SIDES:
        graphs[side] = capture_side(engine.runner, side, captured, constants)
    counts = {kind: len(numbers) for kind, numbers in layers_by_kind(engine.runner.get_model()).items()}
    return Report(f"{sum(map(len, graphs.values()))} times {len(ROWS)} graphs; layers {counts}")
