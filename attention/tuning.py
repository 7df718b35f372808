"""Launch configurations of the attention kernels: pure functions, each number with its measurement."""

from typing import NamedTuple

# Rows up to which a step runs the sparse MLA kernels. Not measured: all that a step can have.
MLA_MAX_ROWS = 384

# Keys of a tile: the 64-wide side of a multiplication.
MLA_KEYS = 64
# Programs that run at once: two a multiprocessor of an H200, whose shared memory holds two tiles of keys. Not measured.
MLA_PROGRAMS = 264


class SparseMla(NamedTuple):
    """How a launch is cut. group: heads of a program, padded to 16; tiles: tiles of keys that a split takes; slices:
    programs that share a row's output columns; warps: of a program. programs: of a row; early: whether the next launch
    may start beside this one."""

    group: int
    groups: int
    tiles: int
    splits: int
    slices: int
    warps: int
    early: bool

    @property
    def programs(self) -> int:
        """Programs of a row."""
        return self.groups * self.splits * self.slices

    @property
    def partial(self) -> int:
        """float32 sums that a row's programs leave: a slice's columns and the 64 rotated ones."""
        return self.programs * (512 // self.slices + 64) * self.group if self.splits > 1 else 0


def key_tiles(window: int, topk: int) -> int:
    """Tiles of a row's keys; window and selection begin one each."""
    return -(-window // MLA_KEYS) + -(-topk // MLA_KEYS)


def sparse_mla(rows: int, heads: int, window: int, topk: int) -> SparseMla:
    """The launch for so many rows. Not measured: one tile a program and as many slices as run at once, or as few
    splits as fill the GPU."""
    group = 16 if heads <= 16 else 32
    groups, tiles = -(-heads // group), key_tiles(window, topk)
    # Sums of 32 heads and all columns do not fit into the registers beside several tiles.
    fewest = 1 if group == 16 else 2
    for slices in (8, 4, 2, 1):
        if rows * groups * tiles * slices <= MLA_PROGRAMS and slices >= fewest:
            return mla_launch(rows, heads, tiles, 1, slices)
    for count in range(1, tiles + 1):
        if rows * groups * fewest * -(-tiles // count) <= MLA_PROGRAMS:
            return mla_launch(rows, heads, tiles, count, fewest)
    return mla_launch(rows, heads, tiles, tiles, fewest)


def mla_launch(rows: int, heads: int, all_tiles: int, tiles: int, slices: int) -> SparseMla:
    """A launch whose splits take `tiles` of a row's tiles of keys."""
    group = 16 if heads <= 16 else 32
    groups, splits = -(-heads // group), -(-all_tiles // tiles)
    early = rows * groups * splits * slices <= MLA_PROGRAMS
    # A loop's registers fit with twice the threads alone.
    return SparseMla(group, groups, tiles, splits, slices, 4 if tiles == 1 else 8, early)


# Slots of a table that a program works out. Not measured.
TABLE_BLOCK = 128
