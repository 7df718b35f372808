"""Launches of the boundary's kernels. `select` says where they serve; elsewhere this module is not imported."""

from contextlib import nullcontext

import torch
from torch import Tensor

from specialized_decode.boundary import tuning
from specialized_decode.boundary.coefficients import Mixes
from specialized_decode.boundary.kernels.coefficients import (
    coefficients_kernel,
    finish_kernel,
    projection_kernel,
    stream_mean_kernel,
)
from specialized_decode.boundary.kernels.fused import boundary_kernel
from specialized_decode.boundary.kernels.publish import advance_kernel, publish_kernel
from specialized_decode.boundary.mailbox import DEADLINE_SECONDS, PeerMailbox
from specialized_decode.boundary.streams import SideStream
from specialized_decode.boundary.types import MixerView, Pending, QuantizedInput, TpGroup, UnfinalizedRows


class FusedBoundary:
    """The boundary in one launch, for up to `max_rows` rows of `hidden` columns in four streams.

    Boundaries of a step are numbered from 0; the ranks' mailboxes count on over steps. Every rank runs the same steps.
    """

    def __init__(
        self, hidden: int, max_rows: int, group: TpGroup, device: torch.device, deadline: float = DEADLINE_SECONDS
    ) -> None:
        self.hidden, self.max_rows, self.rank, self.size = hidden, max_rows, group.rank, group.size
        self.mailbox: PeerMailbox | None = None
        if group.size > 1:
            assert group.process_group is not None, "a group of several ranks has a process group"
            self.mailbox = PeerMailbox(hidden, max_rows, group.process_group, device, deadline)
        self._none = torch.zeros(1, dtype=torch.int64, device=device)
        self._parts = tuning.parts(hidden)
        self.index = 0

    def publish(self, output: Tensor) -> None:
        """Sends this rank's contribution [T, hidden] to the next boundary, ahead of it. Only with peers."""
        assert self.mailbox is not None, "a single rank has nobody to send to"
        publish_kernel[(output.shape[0],)](
            output,
            self.mailbox.pointers,
            self.mailbox.generations,
            self.index,
            self.rank,
            H=self.hidden,
            MAIN=self._parts.main,
            REST=self._parts.rest,
            ROWS=self.max_rows,
            RANKS=self.size,
            num_warps=tuning.boundary_warps(self.hidden, output.shape[0]),
            launch_pdl=True,
        )

    def run(
        self,
        pending: Pending,
        published: bool,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        collapse: tuple[Tensor, Tensor, float] | None,
        quantize: bool,
        settled: bool = False,
    ) -> tuple[Tensor, Tensor | None, QuantizedInput | None]:
        """One boundary. pending: this rank's contribution, in the mailboxes already where published; residual: [T, 4,
        hidden]; collapse: pre-mix [T, 4], norm weight [hidden] and eps, or None for the streams alone; settled: the
        residual was written by launches before the preceding one, and may be read ahead of it.

        Returns the new streams, the next input [T, hidden], and its MXFP8 form if asked. Raises ValueError for inputs
        that are not contiguous.
        """
        rows, hidden = residual.shape[0], self.hidden
        unfinalized = pending if isinstance(pending, UnfinalizedRows) else None
        given = {"residual": residual, "post": post, "comb": comb}
        if isinstance(pending, UnfinalizedRows):
            given |= {"rows": pending.rows, "weights": pending.weights, "shared": pending.shared}
        else:
            given["pending"] = pending
        if collapse is not None:
            given |= {"pre": collapse[0], "norm": collapse[1]}
        for name, tensor in given.items():
            if not tensor.is_contiguous():
                found = f"shape {list(tensor.shape)}, strides {list(tensor.stride())}"
                raise ValueError(f"boundary: {name}: found {found}, expected contiguous rows")
        streams = torch.empty_like(residual)
        x = residual.new_empty(rows, hidden) if collapse is not None else None
        quant = None
        if quantize:
            values = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device=residual.device)
            scales = torch.empty(rows, hidden // 32, dtype=torch.uint8, device=residual.device)
            quant = QuantizedInput(values, scales)
        plain = self.size == 1 and unfinalized is None and collapse is not None and not quantize
        pre, norm, eps = collapse or (post, residual, 0.0)
        mailbox = self.mailbox
        boundary_kernel[(rows,)](
            residual if isinstance(pending, UnfinalizedRows) else pending,
            unfinalized.rows if unfinalized else residual,
            unfinalized.weights if unfinalized else post,
            unfinalized.shared if unfinalized else residual,
            residual,
            post,
            comb,
            pre,
            norm,
            streams,
            streams if x is None else x,
            streams if quant is None else quant.values,
            streams if quant is None else quant.scales,
            mailbox.pointers if mailbox else self._none,
            mailbox.generations if mailbox else self._none,
            mailbox.report.data_ptr() if mailbox else 0,
            self.index,
            self.rank,
            eps,
            mailbox.deadline_ns if mailbox else 0,
            H=hidden,
            MAIN=self._parts.main,
            REST=self._parts.rest,
            ROWS=self.max_rows,
            RANKS=self.size,
            TOPK=unfinalized.rows.shape[1] if unfinalized else 0,
            PUBLISHED=published,
            # Many rows have no use for it: their programs outnumber the multiprocessors.
            SETTLED=settled and rows <= tuning.EARLY_ROWS,
            MANY=rows > tuning.EARLY_ROWS,
            FULL=collapse is not None,
            QUANTIZE=quantize,
            num_warps=tuning.boundary_warps(hidden, rows),
            maxnreg=tuning.boundary_registers(hidden, rows, plain),
            launch_pdl=True,
            # So that every variant rounds alike, whatever the compiler could have fused in it.
            enable_fp_fusion=False,
        )
        self.index += 1
        return streams, x, quant

    def restart(self, sent: bool) -> None:
        """Before a step. sent: an aborted step has sent what nobody took; then collective, and not in a capture."""
        if sent and self.mailbox is not None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("reset: found an aborted step and a capture, expected a reset between the two")
            self.mailbox.clear()
        self.index = 0

    def end_step(self) -> None:
        """After a step's last boundary: the mailboxes' count moves on by the step's boundaries."""
        if self.mailbox is not None:
            advance_kernel[(1,)](self.mailbox.generations, self.index, num_warps=1, launch_pdl=True)
        self.index = 0


def bfloat16_pieces(weight: Tensor) -> Tensor:
    """float32 [N, K] -> bfloat16 [3, N, K], whose sum it is but for values below 2^-110 (bfloat16's range)."""
    pieces, rest = [], weight
    for _ in range(3):
        pieces.append(rest.to(torch.bfloat16))
        rest = rest - pieces[-1].float()
    return torch.stack(pieces)


class FusedCoefficients:
    """The kernels, for four streams and up to `max_rows` rows. Its scratch serves one call at a time: calls of a step
    follow each other, on the side stream or on the main one."""

    def __init__(self, hidden: int, max_rows: int, device: torch.device) -> None:
        self.hidden, self.k = hidden, 4 * hidden
        self._arrived = torch.zeros(tuning.ONE_LAUNCH_ROWS, dtype=torch.int32, device=device)
        sums = [tuning.projection_split(self.k, rows).splits * rows for rows in range(1, max_rows + 1)]
        sums.append(tuning.one_launch_split(self.k).splits * tuning.ONE_LAUNCH_ROWS)
        self._partial = torch.empty(max(sums) * 32, device=device)
        # By the address of a mixer's weights.
        self._first: dict[int, Tensor] = {}
        self._pieces: dict[int, Tensor] = {}

    def prepare(self, mixer: MixerView) -> None:
        self._pieces[mixer.fn.data_ptr()] = bfloat16_pieces(mixer.fn)

    def prepare_first(self, mixer: MixerView) -> None:
        """The projection of streams that are all alike: [24, hidden], the streams' weights summed."""
        first = mixer.fn.unflatten(1, (4, -1)).sum(1).contiguous()
        self._first[mixer.fn.data_ptr()], self._pieces[first.data_ptr()] = first, bfloat16_pieces(first)

    @property
    def prepared_bytes(self) -> int:
        """What the prepared copies take."""
        return sum(copy.nbytes for copies in (self._first, self._pieces) for copy in copies.values())

    def first(self, x: Tensor, residual: Tensor, mixer: MixerView, finish_on: SideStream | None = None) -> Mixes:
        return self._run(x, self._first[mixer.fn.data_ptr()], mixer, finish_on)

    def __call__(self, residual: Tensor, mixer: MixerView, finish_on: SideStream | None = None) -> Mixes:
        return self._run(residual.flatten(1), mixer.fn, mixer, finish_on)

    def mean(self, residual: Tensor) -> Tensor:
        out = residual.new_empty(residual.shape[0], self.hidden)
        parts, warps = tuning.parts(self.hidden), tuning.boundary_warps(self.hidden, residual.shape[0])
        stream_mean_kernel[(residual.shape[0],)](
            residual, out, H=self.hidden, MAIN=parts.main, REST=parts.rest, num_warps=warps, launch_pdl=True
        )
        return out

    def _run(self, flat: Tensor, fn: Tensor, mixer: MixerView, finish_on: SideStream | None) -> Mixes:
        rows, k = flat.shape
        out = tuple(torch.empty(rows, n, device=flat.device) for n in (4, 4, 16))
        outputs = (mixer.base, mixer.scale)
        if rows <= tuning.ONE_LAUNCH_ROWS:
            split = tuning.one_launch_split(k)
            padded = 1 << (split.splits - 1).bit_length()
            coefficients_kernel[(split.splits, rows)](
                flat, fn, *outputs, self._partial, self._arrived, *out, mixer.rms_eps, mixer.hc_eps,
                K=k, SPLITS=split.splits, SPLITS_PADDED=padded, COLUMNS=split.columns,
                ITERATIONS=mixer.sinkhorn_iters, num_warps=4, launch_pdl=True,
            )  # fmt: skip
        else:
            split = tuning.projection_split(k, rows)
            padded, block = 1 << (split.splits - 1).bit_length(), tuning.projection_rows(rows)
            projection_kernel[(split.splits, -(-rows // block))](
                flat, self._pieces[fn.data_ptr()], self._partial, rows, K=k, SPLITS=split.splits,
                COLUMNS=split.columns, BLOCK_ROWS=block, BLOCK_K=tuning.PROJECTION_COLUMNS,
                num_warps=tuning.projection_warps(rows), num_stages=tuning.PROJECTION_STAGES, launch_pdl=True,
            )  # fmt: skip
            with nullcontext() if finish_on is None else finish_on.fork():
                finish_kernel[(rows,)](
                    self._partial, *outputs, *out, mixer.rms_eps, mixer.hc_eps, K=k, SPLITS=split.splits,
                    SPLITS_PADDED=padded, ITERATIONS=mixer.sinkhorn_iters, num_warps=1, launch_pdl=True,
                )  # fmt: skip
        return out[0], out[1], out[2].view(rows, 4, 4)
