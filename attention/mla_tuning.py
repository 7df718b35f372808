"""Launch configurations of the sparse MLA kernels: pure functions, each number with its measurement."""

from typing import NamedTuple

# Rows up to which a step runs the sparse MLA kernels. Not measured: all that a step can have.
MLA_MAX_ROWS = 384

# Keys of a tile: the 64-wide side of a multiplication.
MLA_KEYS = 64
# Programs of 4 and of 8 warps that run at once on an H200: two a multiprocessor, whose shared memory holds two tiles of
# keys, or one, which takes all registers. Not measured.
MLA_RESIDENT = {4: 264, 8: 132}


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
    """The launch for so many rows. Not measured: one tile a program and as many slices as run at once, or else five
    splits, two or one."""
    tiles = key_tiles(window, topk)
    # Sums of 32 heads and all columns do not fit into the registers beside several tiles.
    fewest = 1 if heads <= 16 else 2
    cuts = [(1, slices) for slices in (8, 4, 2, 1) if slices >= fewest]
    cuts += [(-(-tiles // splits), fewest) for splits in (5, 2, 1) if splits < tiles]
    launches = [mla_launch(rows, heads, tiles, count, slices) for count, slices in cuts]
    return next((launch for launch in launches if launch.early), launches[-1])


def mla_launch(rows: int, heads: int, all_tiles: int, tiles: int, slices: int) -> SparseMla:
    """A launch whose splits take `tiles` of a row's tiles of keys."""
    group = 16 if heads <= 16 else 32
    groups, splits = -(-heads // group), -(-all_tiles // tiles)
    # A loop's registers fit with twice the threads alone; so do more columns of 32 heads.
    warps = 4 if tiles == 1 and (group == 16 or slices == 8) else 8
    early = rows * groups * splits * slices <= MLA_RESIDENT[warps]
    return SparseMla(group, groups, tiles, splits, slices, warps, early)


# Slots of a table that a program works out. Not measured.
TABLE_BLOCK = 128
