"""Launch configurations of the sparse MLA kernels: pure functions, each number with its measurement."""

from typing import NamedTuple

# Rows up to which a step runs the sparse MLA kernels: all that one can have, at which they are right. In vLLM the
# `low_batch` gate shuts before, and its own kernels take the larger steps; above 8 rows these are not measured.
MLA_MAX_ROWS = 384

# Keys of a tile: the 64-wide side of a multiplication.
MLA_KEYS = 64
# Programs of 4 and of 8 warps that run at once on an H200: two a multiprocessor, whose shared memory holds two tiles of
# keys, or one, which takes all registers. Not measured.
MLA_RESIDENT = {4: 264, 8: 132}
# Programs of a launch with one tile each, at most, where there are slices to spare: all that run at once. With half of
# it the next launch's programs are all resident beside them, and read ahead. Not measured against each other.
MLA_PROGRAMS = 264


class SparseMla(NamedTuple):
    """How a launch is cut. group: heads of a program, padded to 16; tiles: tiles of keys that a split takes; slices:
    programs that share a row's output columns; warps: of a program; early: whether the next launch may start beside
    this one; keys: of a tile; spread: whether splits wait for each other and each adds up a share, not the last one
    all."""

    group: int
    groups: int
    tiles: int
    splits: int
    slices: int
    warps: int
    early: bool
    keys: int = MLA_KEYS
    spread: bool = False

    @property
    def programs(self) -> int:
        """Programs of a row."""
        return self.groups * self.splits * self.slices

    @property
    def inserts(self) -> bool:
        """Whether its registers suffice for storing a step's records as well."""
        return self.tiles == 1 and (self.warps == 8 or self.group == 16)

    @property
    def partial(self) -> int:
        """Averages that a row's programs leave."""
        return self.programs * (512 // self.slices) * self.group if self.splits > 1 else 0


def key_tiles(window: int, topk: int, keys: int = MLA_KEYS) -> int:
    """Tiles of a row's keys; window and selection begin one each."""
    return -(-window // keys) + -(-topk // keys)


def sparse_mla(rows: int, heads: int, window: int, topk: int) -> SparseMla:
    """The launch for so many rows: one tile a program and as many slices as MLA_PROGRAMS allows, or else five splits,
    two or one.

    On an H200 (2026-11-30, 16 heads, window and 512 selected, insert inside, us in a chain): at 1 row with 8 slices
    6.34, 4 slices 5.78, but a reader's whole step takes 25.2 with 8 and 25.9 with 4; at 8 rows with 2 slices 9.98, 1
    slice 10.34. With one split that adds up all, 6.77 and 11.39. Of more rows nothing is measured.
    """
    tiles = key_tiles(window, topk)
    # Sums of 32 heads and all columns do not fit into the registers beside several tiles.
    fewest = 1 if heads <= 16 else 2
    cuts = [(1, slices) for slices in (8, 4, 2, 1) if slices >= fewest]
    cuts += [(-(-tiles // splits), fewest) for splits in (5, 2, 1) if splits < tiles]
    launches = [mla_launch(rows, heads, tiles, count, slices) for count, slices in cuts]
    wanted = (one for one in launches if one.slices == fewest or rows * one.programs <= MLA_PROGRAMS)
    return next((launch for launch in wanted if launch.early), launches[-1])


def mla_launch(
    rows: int,
    heads: int,
    all_tiles: int,
    tiles: int,
    slices: int,
    warps: int | None = None,
    keys: int = MLA_KEYS,
) -> SparseMla:
    """A launch whose splits take `tiles` of a row's tiles of keys. warps: None for what the registers ask for. Splits
    of a launch that runs at once wait for each other."""
    group = 16 if heads <= 16 else 32
    groups, splits = -(-heads // group), -(-all_tiles // tiles)
    # A loop's registers fit with twice the threads alone; so do more columns of 32 heads, and larger tiles.
    warps = warps or (4 if tiles == 1 and (group == 16 or slices == 8) and keys == MLA_KEYS else 8)
    early = rows * groups * splits * slices <= MLA_RESIDENT[warps]
    return SparseMla(group, groups, tiles, splits, slices, warps, early, keys, early and splits > 1)


def candidates(rows: int, heads: int, window: int, topk: int) -> list[SparseMla]:
    """Launches that a benchmark tries: `sparse_mla`'s first. Of few rows one tile a program is known to be best."""
    found = [sparse_mla(rows, heads, window, topk)]
    for keys, warps in ((64, 4), (64, 8), (128, 8)):
        all_tiles = key_tiles(window, topk, keys)
        for tiles in (1,) if rows <= 8 else (1, 2, 5, 10):
            for slices in (1, 2, 4, 8):
                cut = mla_launch(rows, heads, all_tiles, tiles, slices, warps, keys)
                if tiles <= all_tiles and _fits(cut):
                    found += [cut, cut._replace(early=True), cut._replace(spread=False)]
    return list(dict.fromkeys(found))


def _fits(cut: SparseMla) -> bool:
    """Whether a launch, which inserts where it can, leaves its sums in registers."""
    if cut.keys > MLA_KEYS and (cut.tiles > 1 or cut.group > 16):
        return False
    return cut.slices > cut.group // 32 and (cut.warps == 8 or (cut.tiles == 1 and cut.group == 16))


# Slots of a table that a program works out. Not measured.
TABLE_BLOCK = 128
