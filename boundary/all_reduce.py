"""BoundaryAllReduce: the boundary's fused op over the tensor-parallel group, and its publishing protocol."""

import torch
from torch import Tensor

from specialized_decode.boundary import reference
from specialized_decode.boundary.types import Pending, QuantizedInput, TpGroup, UnfinalizedRows


class BoundaryAllReduce:
    """All-reduce of a pending TP-partial output, fused with the mHC post-mix, collapse and norm that follow it.

    A producer may store its output into the mailbox itself: `publish_target` hands out this rank's slot and
    `mark_published` says that the slot is written; the next reduce must be of that tensor. Misuse raises at once, on
    the host.
    """

    def __init__(self, hidden: int, max_rows: int, group: TpGroup, device: torch.device) -> None:
        self.hidden, self.max_rows, self.group = hidden, max_rows, group
        self._slot = torch.zeros(max_rows, hidden, dtype=torch.bfloat16, device=device)
        self._target: Tensor | None = None
        self._published = False

    def reset(self) -> None:
        """Starts a step: forgets a publish that an aborted step left without its reduce."""
        self._target, self._published = None, False

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

    def reduce(self, pending: Pending) -> Tensor:
        """pending: this rank's contribution -> [T, hidden] float32, the same bits on all ranks."""
        contribution = reference.finalize(pending) if isinstance(pending, UnfinalizedRows) else pending
        if self._target is not None:
            if not self._published:
                raise RuntimeError("reduce: found a slot handed out and not published, expected mark_published first")
            if contribution.data_ptr() != self._target.data_ptr() or contribution.shape != self._target.shape:
                raise RuntimeError("reduce: found another tensor, expected the published one")
            self._target, self._published = None, False
        if contribution.shape[0] > self.max_rows or contribution.shape[1] != self.hidden:
            found = tuple(contribution.shape)
            raise ValueError(f"reduce: found a tensor of {found}, expected at most [{self.max_rows}, {self.hidden}]")
        return reference.all_reduce(self.group.all_gather(contribution))

    def residual_only(self, pending: Pending, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """The streams [T, n, hidden] after the sublayer whose output is pending."""
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
    ) -> tuple[Tensor, Tensor, QuantizedInput | None]:
        """As `residual_only`, then the next sublayer's input: (streams, input [T, hidden], its MXFP8 form if asked)."""
        streams = self.residual_only(pending, residual, post, comb)
        x = reference.rms_norm(reference.collapse(streams, pre), norm, eps)
        return streams, x, reference.quantize_mxfp8(x) if quantize else None
