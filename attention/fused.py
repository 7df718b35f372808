"""Launches of the low-batch projections. `select` says where they serve; elsewhere this module is not imported."""

from itertools import product

import torch
from torch import Tensor

from specialized_decode.attention import projection_tuning as tuning
from specialized_decode.attention.kernels.projection import projection_kernel
from specialized_decode.attention.prepared import PreparedFp8, prepare_fp8
from specialized_decode.attention.projections import FusedProjections
from specialized_decode.attention.views import AttentionView
from specialized_decode.boundary import LinearView

MAX_ROWS = tuning.MAX_ROWS


def project_fp8(
    x: Tensor,
    weight: PreparedFp8,
    groups: int = 1,
    launch: tuning.Projection | None = None,
    out: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    first: int | None = None,
    settled: bool = False,
) -> Tensor:
    """x: [T, groups * K] bfloat16, T up to 16, through a prepared [N, K] whose outputs are split over the groups ->
    [T, N] bfloat16, accumulated in float32. launch: another than `tuning.projection` chooses; out: where the
    outputs are stored, None for a new tensor. norm: [K] bfloat16, by which rows of one group, which may then be columns
    of a wider tensor, are RMS-normed first, eps above their mean square. first: how many outputs lie ahead of the
    others, as [T, first] and [T, N - first] one behind the other. settled: whether x was there before the launch ahead
    lets this one start. Raises ValueError for other shapes."""
    rows, columns = x.shape
    n, k = weight.shape
    launch = launch or tuning.projection(n, k, groups)
    apart = x.is_contiguous() if norm is None else x.stride(1) == 1 and x.stride(0) % 8 == 0 and groups == 1
    if not 0 < rows <= MAX_ROWS or columns != groups * k or x.dtype != torch.bfloat16 or not apart:
        raise ValueError(
            f"projection: found {x.dtype} {list(x.shape)}, strides {x.stride()}, expected contiguous bfloat16 "
            f"[1 to {MAX_ROWS}, {groups * k}]"
        )
    if norm is not None and (norm.dtype != torch.bfloat16 or norm.shape != (k,)):
        raise ValueError(f"projection: norm: found {norm.dtype} {list(norm.shape)}, expected bfloat16 [{k}]")
    y = torch.empty(rows, n, dtype=torch.bfloat16, device=x.device) if out is None else out
    if y.shape != (rows, n) or y.dtype != torch.bfloat16 or not y.is_contiguous():
        raise ValueError(
            f"projection: found outputs of {y.dtype} {list(y.shape)}, strides {y.stride()}, expected contiguous "
            f"bfloat16 [{rows}, {n}]"
        )
    pairs = x.view(torch.int32)
    projection_kernel[grid(n // tuning.TILE // launch.program_tiles, rows)](
        pairs,
        weight.words,
        weight.scales,
        y,
        rows,
        pairs if norm is None else norm.view(torch.int32),
        eps,
        **constants(
            n, k, groups, launch, None if norm is None else x.stride(0), norm is not None, first, settled, rows
        ),
        num_warps=launch.warps,
        maxnreg=tuning.registers(launch),
        launch_pdl=True,
    )
    return y


def wide(rows: int) -> bool:
    """Whether a launch of so many rows has programs for more than the first eight."""
    return rows > tuning.ROWS


def grid(programs: int, rows: int) -> tuple[int, int]:
    """Of a launch that has so many programs for eight rows."""
    return programs, -(-rows // tuning.ROWS)


def constants(
    n: int,
    k: int,
    groups: int,
    launch: tuning.Projection,
    stride: int | None = None,
    norm: bool = False,
    first: int | None = None,
    settled: bool = False,
    rows: int = 1,
) -> dict[str, int]:
    """The kernel's compile-time arguments. stride: numbers from a row of the input to the next, None for its width;
    first, settled: as of `project_fp8`."""
    return {
        "N": n,
        "K": k,
        "GROUPS": groups,
        "TILE_WARPS": launch.tile_warps,
        "TILES": launch.tiles,
        "K_WARPS": launch.k_warps,
        "PER_WARP": launch.per_warp,
        "CHUNKS": launch.chunks,
        "STAGES": launch.stages,
        "AHEAD": launch.ahead,
        "EARLY": launch.early,
        "LATE": launch.late,
        "STRIDE": (groups * k if stride is None else stride) // 2,
        "NORM": norm,
        "FIRST": n if first is None else first,
        "SETTLED": settled,
        "DEPTH": launch.depth,
        "TURNED": launch.turned,
        "WIDE": wide(rows),
    }


class FusedLinear:
    """A dense FP8 layer [N, K] on the kernel; see `projections.FusedProjection`."""

    def __init__(self, linear: LinearView, groups: int = 1, early: bool = True) -> None:
        """early: whether the launch behind may start before this one has its input, where `tuning` has it so. Raises
        ValueError for a layer that is not FP8."""
        if linear.scale is None:
            raise ValueError(f"weight: found {linear.weight.dtype} without scales, expected FP8")
        self.groups, self.weight = groups, prepare_fp8(linear.weight, linear.scale)
        launch = tuning.projection(*self.weight.shape, groups)
        self.launch = launch if early else tuning.waiting(launch)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x: [1 to 16, groups * K] bfloat16 -> [T, N] bfloat16, in `out` where given."""
        return project_fp8(x, self.weight, self.groups, self.launch, out)

    def normed(self, x: Tensor, norm: Tensor, eps: float) -> Tensor:
        """x: [1 to 16, K] bfloat16 columns of a wider tensor, RMS-normed by norm [K] first -> [T, N] bfloat16."""
        return project_fp8(x, self.weight, self.groups, self.launch, None, norm, eps)

    @property
    def nbytes(self) -> int:
        """What the prepared copy takes."""
        return self.weight.words.nbytes + self.weight.scales.nbytes

    def warm(self, rows: int = MAX_ROWS) -> None:
        """Compiles and loads what calls of up to so many rows need. Not in a capture."""
        words = self.weight.words
        for count in {1, rows}:
            self(torch.zeros(count, self.groups * self.weight.shape[1], dtype=torch.bfloat16, device=words.device))


class NormedLinear(FusedLinear):
    """A dense FP8 layer [N, K] that norms its input too: the first K columns of a tensor `wider` by so many."""

    def __init__(self, linear: LinearView, wider: int, early: bool = True) -> None:
        """As FusedLinear's."""
        super().__init__(linear, early=early)
        self.wider = wider

    def warm(self, rows: int = MAX_ROWS) -> None:
        super().warm(rows)
        k, device = self.weight.shape[1], self.weight.words.device
        for count in {1, rows}:
            x = torch.zeros(count, k + self.wider, dtype=torch.bfloat16, device=device)[:, :k]
            self.normed(x, torch.ones(k, dtype=torch.bfloat16, device=device), 1.0)


class JoinedLinear:
    """Two dense FP8 layers of the same input in one launch."""

    def __init__(self, first: FusedLinear, second: FusedLinear) -> None:
        """From here on both read a copy of both. Raises ValueError for layers of other inputs."""
        (n, k), (others, columns) = first.weight.shape, second.weight.shape
        if columns != k or first.groups != 1 or second.groups != 1:
            raise ValueError(f"projections: found [{n}, {k}], [{others}, {columns}], expected two of one input")
        words, scales = (torch.cat(parts) for parts in zip(first.weight, second.weight, strict=True))
        self.weight, self.first = PreparedFp8(words, scales), n
        first.weight = PreparedFp8(words[: n // tuning.TILE], scales[: n // 32])
        second.weight = PreparedFp8(words[n // tuning.TILE :], scales[n // 32 :])
        self.launch = tuning.joined(n, others, k)

    def __call__(self, x: Tensor, settled: bool = False) -> tuple[Tensor, Tensor]:
        """x: [1 to 16, K] bfloat16 -> both layers' outputs [T, N] bfloat16. settled: as of `project_fp8`."""
        rows, first = x.shape[0], self.first
        y = project_fp8(x, self.weight, launch=self.launch, first=first, settled=settled).view(-1)
        return y[: rows * first].view(rows, first), y[rows * first :].view(rows, -1)

    def warm(self, rows: int = MAX_ROWS) -> None:
        """As FusedLinear's."""
        for count, settled in product({1, rows}, (False, True)):
            x = torch.zeros(count, self.weight.shape[1], dtype=torch.bfloat16, device=self.weight.words.device)
            self(x, settled)


def fused_projections(attn: AttentionView) -> FusedProjections:
    """One layer's projections, prepared."""
    return FusedProjections(
        FusedLinear(attn.fused_wqa_wkv),
        # Sparse MLA, next behind it, reads records or latents that the launch ahead of it writes, and does so before
        # its own wait: it may not start before this launch's wait is over.
        NormedLinear(attn.wq_b, attn.head_dim, early=False),
        FusedLinear(attn.wo_a, attn.o_groups),
        FusedLinear(attn.wo_b),
    )
