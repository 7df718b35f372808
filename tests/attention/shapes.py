"""The projections of DeepSeek-V4.1-Flash's attention, for the tests of their kernel."""

RANKS = (1, 2, 4, 8)
# [outputs, columns], groups: fused_wqa_wkv, wq_b, wo_a and wo_b of one rank.
SHAPES = [(1792, 5120, 1)]
SHAPES += [(64 * 512 // ranks, 1280, 1) for ranks in RANKS]
SHAPES += [(8 * 1024 // ranks, 4096, 8 // ranks) for ranks in RANKS]
SHAPES += [(5120, 8192 // ranks, 1) for ranks in RANKS]
