"""The families of kernels that an executor can be asked for."""

from collections.abc import Iterable

# Between sublayers (mHC and all-reduce); attention's projections, inserts and sparse MLA; routed and shared experts.
KERNELS = frozenset({"attention", "boundary", "moe"})


def kernel_families(asked: object) -> frozenset[str]:
    """What an option asks for: True for every family, False for none, or names of KERNELS. Raises ValueError."""
    if isinstance(asked, bool):
        return KERNELS if asked else frozenset()
    if isinstance(asked, Iterable) and not isinstance(asked, str):
        names = list(asked)
        if all(isinstance(name, str) and name in KERNELS for name in names):
            return frozenset(names)
    raise ValueError(f"found {asked!r}, expected true, false or a list of {', '.join(sorted(KERNELS))}")
