"""BoundaryAllReduce: the boundary's fused op over the tensor-parallel group, and its publishing protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specialized_decode.boundary import reference
from specialized_decode.boundary.types import Pending, QuantizedInput, TpGroup, UnfinalizedRows

if TYPE_CHECKING:
    from specialized_decode.boundary.fused import FusedBoundary


class BoundaryAllReduce:
    """All-reduce of a pending TP-partial output, fused with the mHC post-mix, collapse and norm that follow it.

    A producer may store its output into the mailbox itself: `publish_target` hands out this rank's slot and
    `mark_published` says that the slot is written; the next reduce must be of that tensor. Misuse raises at once, on
    the host.
    """

    def __init__(
        self, hidden: int, max_rows: int, group: TpGroup, device: torch.device, fused: FusedBoundary | None = None
    ) -> None:
        """fused: the kernels, None for the reference ops."""
        self.hidden, self.max_rows, self.group, self.fused = hidden, max_rows, group, fused
        self._slot = torch.zeros(max_rows, hidden, dtype=torch.bfloat16, device=device)
        self._target: Tensor | None = None
        self._published = False
        # Whether contributions went to peers, outside a capture, in a step that has not ended.
        self._sent = False

    def reset(self) -> None:
        """Starts a step: forgets a publish that an aborted step left without its reduce.

        Where such a step had sent to peers already, all ranks' mailboxes are emptied: collective then, as the step
        was, and not in a capture.
        """
        self._target, self._published = None, False
        if self.fused is not None:
            self.fused.restart(self._sent)
        self._sent = False

    def end_step(self) -> None:
        """After a step's last reduce."""
        if self.fused is not None:
            self.fused.end_step()
        self._sent = False

    def publish_target(self, rows: int) -> Tensor:
        """The slot [rows, hidden] bfloat16 that a producer may write its output into."""
        if not 0 < rows <= self.max_rows:
            raise ValueError(f"publish_target: found {rows} rows, expected 1 to {self.max_rows}")
        if self._target is not None:
            raise RuntimeError(
                "publish_target: found a slot handed out and not reduced, expected one producer a boundary"
            )
        self._target = self._slot[:rows]
        return self._target

    def mark_published(self, output: Tensor) -> None:
        """Says that the slot handed out holds this rank's contribution."""
        if self._target is None or output.data_ptr() != self._target.data_ptr() or output.shape != self._target.shape:
            raise RuntimeError("mark_published: found another tensor, expected the slot that publish_target handed out")
        if self._published:
            raise RuntimeError("mark_published: found the slot published already, expected one publish a boundary")
        self._published = True
        if self.fused is not None and self.group.size > 1:
            self._note_sending()
            self.fused.publish(output)

    def reduce(self, pending: Pending) -> Tensor:
        """pending: this rank's contribution -> [T, hidden] float32, the same bits on all ranks. Reference ops only: the
        kernels reduce within a boundary."""
        if self.fused is not None:
            raise RuntimeError("reduce: found the boundary kernels in use, expected full or residual_only")
        self._take(pending)
        contribution = reference.finalize(pending) if isinstance(pending, UnfinalizedRows) else pending
        return reference.all_reduce(self.group.all_gather(contribution))

    def _take(self, pending: Pending) -> bool:
        """Checks what is reduced against what was published; returns whether it was."""
        output = pending.shared if isinstance(pending, UnfinalizedRows) else pending
        published = self._target is not None
        if self._target is not None:
            if not self._published:
                raise RuntimeError("reduce: found a slot handed out and not published, expected mark_published first")
            same = output is pending and output.data_ptr() == self._target.data_ptr()
            if not same or output.shape != self._target.shape:
                raise RuntimeError("reduce: found another tensor, expected the published one")
            self._target, self._published = None, False
        if output.shape[0] > self.max_rows or output.shape[1] != self.hidden:
            found = tuple(output.shape)
            raise ValueError(f"reduce: found a tensor of {found}, expected at most [{self.max_rows}, {self.hidden}]")
        return published

    def residual_only(
        self, pending: Pending, residual: Tensor, post: Tensor, comb: Tensor, *, settled: bool = False
    ) -> Tensor:
        """The streams [T, n, hidden] after the sublayer whose output is pending.

        settled: says that `residual` was written by launches before the preceding one, as between sublayers, so that a
        kernel may read it before the preceding launch has ended.
        """
        if self.fused is not None:
            return self._launch(pending, residual, post, comb, None, False, settled)[0]
        return reference.mix_streams(self.reduce(pending), residual, post, comb)

    def full(
        self,
        pending: Pending,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        pre: Tensor,
        norm: Tensor,
        eps: float,
        quantize: bool,
        *,
        settled: bool = False,
    ) -> tuple[Tensor, Tensor, QuantizedInput | None]:
        """As `residual_only`, then the next sublayer's input: (streams, input [T, hidden], its MXFP8 form if asked)."""
        if self.fused is not None:
            streams, x, quant = self._launch(pending, residual, post, comb, (pre, norm, eps), quantize, settled)
            assert x is not None
            return streams, x, quant
        streams = self.residual_only(pending, residual, post, comb)
        x = reference.rms_norm(reference.collapse(streams, pre), norm, eps)
        return streams, x, reference.quantize_mxfp8(x) if quantize else None

    def _launch(
        self,
        pending: Pending,
        residual: Tensor,
        post: Tensor,
        comb: Tensor,
        collapse: tuple[Tensor, Tensor, float] | None,
        quantize: bool,
        settled: bool,
    ) -> tuple[Tensor, Tensor | None, QuantizedInput | None]:
        assert self.fused is not None
        published = self._take(pending) and self.group.size > 1
        if self.group.size > 1:
            self._note_sending()
        return self.fused.run(pending, published, residual, post, comb, collapse, quantize, settled)

    def _note_sending(self) -> None:
        # What a capture records is not sent.
        self._sent = self._sent or not torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """Waits for the current stream's work so far. Raises PeerTimeout, which names who is missing, as soon as a
        boundary gives up on a peer, and PeerLost where a rank has ended and work failed."""
        if self.fused is not None and self.fused.mailbox is not None:
            self.fused.mailbox.synchronize()
        elif self._slot.is_cuda:
            torch.cuda.current_stream().synchronize()
