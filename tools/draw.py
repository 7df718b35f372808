"""The pictures of the docs: `python -m tools.draw` writes docs/architecture.svg and docs/step.svg.

Both stand on a background of their own, so that they read the same on light and dark pages.
"""

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).absolute().parent.parent / "docs"

INK, FAINT, FRAME = "#1f2933", "#52606d", "#c3cad3"
FORK, JOIN, CALL = "#b45309", "#15803d", "#6d28d9"
# Fill and outline by kind of box.
STYLES = {
    "main": ("#dbe8fb", "#3566a8"),
    "side": ("#fdeacc", "#b0701f"),
    "package": ("#eef2f6", "#52606d"),
    "planned": ("#ffffff", "#8a94a0"),
    "part": ("#ffffff", "#9aa5b1"),
}


class Picture:
    """An SVG of `width` by `height` units, built from boxes, lines and text."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._under: list[str] = []
        self._over: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, lines: Sequence[str], kind: str, size: int = 11) -> None:
        """A box with centered lines."""
        fill, stroke = STYLES[kind]
        dash = ' stroke-dasharray="5 4"' if kind == "planned" else ""
        self._over.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{fill}" stroke="{stroke}"{dash}/>'
        )
        top = y + h / 2 - (len(lines) - 1) * (size + 2) / 2 + size * 0.36
        for index, line in enumerate(lines):
            self.text(x + w / 2, top + index * (size + 2), line, size, "middle")

    def panel(self, x: float, y: float, w: float, h: float, heading: str, note: str, kind: str = "package") -> None:
        """A box with a heading and a note at its top, for other boxes to stand in."""
        self.box(x, y, w, h, (), kind)
        self.text(x + 12, y + 20, heading, 14, weight="bold")
        self.text(x + 12, y + 36, note, 11, color=FAINT)

    def text(
        self,
        x: float,
        y: float,
        line: str,
        size: int = 11,
        anchor: str = "start",
        color: str = INK,
        weight: str = "normal",
    ) -> None:
        self._over.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}" '
            f'font-weight="{weight}">{escape(line)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], color: str, arrow: bool = True, dash: str = "") -> None:
        """A polyline under the boxes, with an arrowhead at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        end = f' marker-end="url(#{color[1:]})"' if arrow else ""
        style = f' stroke-dasharray="{dash}"' if dash else ""
        self._under.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"{style}{end}/>')

    def dot(self, x: float, y: float, color: str) -> None:
        self._over.append(f'<circle cx="{x:g}" cy="{y:g}" r="3" fill="{color}"/>')

    def svg(self) -> str:
        """The picture as an SVG document."""
        markers = "".join(
            f'<marker id="{color[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{color}"/></marker>'
            for color in (FORK, JOIN, CALL, FAINT)
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="Helvetica, Arial, sans-serif" role="img">'
        )
        ground = (
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8" fill="#fcfdfe" '
            f'stroke="{FRAME}"/>'
        )
        body = [f"<title>{escape(self.title)}</title>", f"<defs>{markers}</defs>", ground, *self._under, *self._over]
        return "\n".join([head, *body, "</svg>"]) + "\n"


def architecture() -> Picture:
    """The packages, who imports whom, and what passes the host seam."""
    p = Picture(1060, 640, "Packages of specialized-decode and the host seam between them")
    p.panel(
        20,
        24,
        1020,
        50,
        "cli",
        "decode, doctor, make-checkpoint; builds an executor for a model that the backbone loaded",
    )
    p.panel(20, 130, 380, 300, "backbone", "the plain model and the local engine; imports none of the others")
    for index, (name, note) in enumerate(
        (
            ("LocalEngine", "prefill, capture, replay, greedy loop"),
            ("DeepseekV41.forward", "asks for a step, or runs its layers"),
            ("DecoderLayer, Mixer, Attention, MoE, Engram", "the plain layers"),
            ("Caches", "pages, block tables, metadata"),
            ("LocalHost", "CUDA graphs, or emulated ones on a CPU"),
        )
    ):
        p.box(36, 178 + index * 49, 348, 41, (name, note), "part")
    p.panel(20, 480, 380, 82, "integration", "planned, not in this version: the same seam towards vLLM,", "planned")
    p.text(32, 532, "which no other package may import", 11, color=FAINT)

    p.panel(640, 130, 400, 150, "runtime", "plans, gates, the layer loop, warm-up")
    p.box(656, 184, 180, 78, ("SpecializedDecode", "plan, run,", "compute_logits"), "part")
    p.box(848, 184, 176, 78, ("DecodeStep", "the gates of one", "captured step"), "part")
    for index, (name, first, second) in enumerate(
        (
            ("attention", "step, tables,", "sparse MLA"),
            ("moe", "router, experts,", "unfinalized rows"),
            ("engram", "prefetch,", "injection"),
            ("logits", "LM head,", "gather"),
        )
    ):
        x = 640 + index * 102
        p.box(x, 322, 94, 72, (), "package")
        p.text(x + 47, 344, name, 13, "middle", weight="bold")
        p.text(x + 47, 364, first, 11, "middle", FAINT)
        p.text(x + 47, 380, second, 11, "middle", FAINT)
        p.line([(x + 47, 280), (x + 47, 320)], FAINT)
        p.line([(x + 47, 394), (x + 47, 440)], FAINT)
    p.line([(1040, 205), (1051, 205), (1051, 466), (1042, 466)], FAINT)
    p.panel(640, 442, 400, 120, "boundary", "mHC between sublayers, all-reduce, side streams")
    p.box(656, 490, 112, 56, ("Boundaries", "coefficients"), "part")
    p.box(780, 490, 128, 56, ("BoundaryAllReduce", "publishing"), "part")
    p.box(920, 490, 104, 56, ("types, views", "SideStream"), "part")

    p.line([(210, 74), (210, 128)], FAINT)
    p.line([(840, 74), (840, 128)], FAINT)

    for start, end in ((118, 166), (440, 580)):
        p.line([(520, start), (520, end)], FRAME, arrow=False, dash="6 5")
    p.text(520, 108, "host seam: protocols, no imports", 12, "middle", FAINT, "bold")
    for y, label in (
        (190, "plan(positions)"),
        (222, "run(x, positions, ids, Engram)"),
        (254, "compute_logits(hidden)"),
    ):
        p.line([(402, y), (638, y)], CALL)
        p.text(520, y - 6, label, 11, "middle", CALL)
    for y, first, second in (
        (308, "layers, weights and caches", "as views"),
        (360, "capturing? graph mode? metadata?", "TP group, stream threshold"),
        (412, "emulated side streams", ""),
    ):
        p.line([(640, 272), (622, 272), (622, y), (402, y)], CALL, dash="4 3")
        p.text(514, y - 6, first, 11, "middle", CALL)
        if second:
            p.text(514, y + 13, second, 11, "middle", CALL)
    p.line([(402, 520), (520, 520)], STYLES["planned"][1], arrow=False, dash="4 3")

    p.line([(36, 602), (76, 602)], FAINT)
    p.text(84, 606, "imports", 11)
    p.line([(160, 602), (200, 602)], CALL)
    p.text(208, 606, "the host calls the executor", 11)
    p.line([(390, 602), (430, 602)], CALL, dash="4 3")
    p.text(438, 606, "the executor asks its host or reads through it", 11)
    p.box(716, 592, 40, 20, (), "planned")
    p.text(764, 606, "planned", 11)
    return p


BOX_H, LANE_H = 40, 62
# Where every strip's main stream starts and ends, and where its sparse MLA stands.
LEFT, RIGHT, MLA = 132, 1172, 724


class Strip:
    """One layer of the step: lanes below each other, time from left to right."""

    def __init__(self, picture: Picture, top: int, heading: str, lanes: Sequence[tuple[str, str]]) -> None:
        self.p = picture
        self.center: dict[str, int] = {}
        picture.text(24, top + 4, heading, 13, weight="bold")
        for index, (lane, gate) in enumerate(lanes):
            y = self.center[lane] = top + 44 + index * LANE_H
            picture.text(24, y - 1 if gate else y + 4, lane, 12, weight="bold")
            picture.text(24, y + 13, gate, 10, color=FAINT)
        picture.line([(LEFT, self.center["main"]), (RIGHT, self.center["main"])], FAINT)

    def run(self, lane: str, x: float, w: float, *lines: str) -> None:
        """Work on a stream."""
        kind = "main" if lane == "main" else "side"
        self.p.box(x, self.center[lane] - BOX_H / 2, w, BOX_H, lines, kind, 10)

    def along(self, lane: str, start: float, end: float) -> None:
        """A side stream goes on from one box to the next."""
        self.p.line([(start, self.center[lane]), (end, self.center[lane])], STYLES["side"][1], arrow=False)

    def fork(self, x: float, source: str, lane: str, to: float) -> None:
        """Work on `lane`, whose box starts at `to`, waits for what `source` was given up to x."""
        self.p.line([(x, self.center[source]), (x, self.center[lane]), (to, self.center[lane])], FORK)
        self.p.dot(x, self.center[source], FORK)

    def join(self, start: float, lane: str, x: float, target: str) -> None:
        """`target` waits at x for `lane`, whose box ends at `start`."""
        self.p.line([(start, self.center[lane]), (x, self.center[lane]), (x, self.center[target])], JOIN)


def step() -> Picture:
    """Three layers of the tiny preset as runtime/executor.py and attention/step.py schedule them."""
    p = Picture(1190, 894, "Streams of one decode step: the main stream, its side streams, forks and joins")
    _engram_layer(p)
    _source_layer(p)
    _consumer_layer(p)
    y = 870
    p.line([(30, y), (58, y)], FORK)
    p.dot(30, y, FORK)
    p.text(66, y + 4, "fork: the side stream starts after this point")
    p.line([(310, y), (340, y)], JOIN)
    p.text(348, y + 4, "join: this stream waits here")
    p.text(
        520,
        y + 4,
        "Below a stream's name: its gate. Where that is shut, the work runs on the stream that forks or reads it.",
    )
    return p


def _boundary_and_projections(s: Strip, mixer_fork: float) -> None:
    """Into the attention: the fused boundary and the critical path's projections."""
    s.run("main", 138, 96, "boundary:", "reduce, mix,", "collapse, norm")
    _attention_mixer(s, mixer_fork, "(and the aux mean, where asked for)")
    s.run("main", 272, 80, "qkv-a,", "q norm")
    s.run("main", 374, 80, "wq_b,", "RoPE")
    s.run("main", 464, 84, "kv norm,", "insert")


def _attention_mixer(s: Strip, fork: float, *also: str) -> None:
    s.fork(fork, "main", "mHC", fork + 30)
    s.run("mHC", fork + 30, 860 - fork, "coefficients of the attention sublayer", *also)
    s.join(890, "mHC", 902, "main")


def _from_sparse_mla(s: Strip) -> None:
    """From sparse MLA to the MoE: the same in every layer."""
    s.run("main", MLA, 62, "sparse", "MLA")
    s.run("main", 796, 96, "inverse RoPE,", "wo_a, wo_b")
    s.run("main", 912, 96, "boundary:", "reduce, mix,", "collapse, norm")
    s.fork(1016, "main", "mHC", 1032)
    s.run("mHC", 1032, 116, "coefficients of", "the FFN sublayer")
    s.run("main", 1026, 122, "MoE: gate, top-k,", "shared, routed")
    s.join(1148, "mHC", 1160, "main")


def _engram_layer(p: Picture) -> None:
    lanes = (("mHC", "side_stream"), ("main", ""), ("Engram 5", "engram_prefetch"))
    s = Strip(p, 28, "layer 5: Engram; reads the selection and the cache of layer 4", lanes)
    s.run("main", 138, 120, "boundary: reduce,", "mix (residual only)")
    s.run("Engram 5", 138, 120, "WKV, forked at the", "start of the step")
    s.join(258, "Engram 5", 268, "main")
    s.run("main", 278, 52, "inject")
    s.run("main", 340, 70, "collapse,", "norm")
    _attention_mixer(s, 418)
    s.run("main", 428, 80, "qkv-a,", "q norm")
    s.run("main", 518, 80, "wq_b,", "RoPE")
    s.run("main", 608, 84, "kv norm,", "insert")
    _from_sparse_mla(s)


def _source_layer(p: Picture) -> None:
    lanes = (
        ("mHC", "side_stream"),
        ("main", ""),
        ("indexer", "overlap_inputs"),
        ("compressor", "overlap_inputs"),
        ("candidates", "overlap_candidates"),
    )
    s = Strip(p, 248, "layer 6: source of KV, index and candidates", lanes)
    _boundary_and_projections(s, 240)
    s.fork(249, "main", "compressor", 268)
    s.run("compressor", 268, 176, "compress, insert latent;", "index key, insert")
    s.fork(258, "main", "indexer", 272)
    s.run("indexer", 272, 80, "weights_proj", "(head weights)")
    s.along("indexer", 352, 620)
    s.fork(362, "main", "indexer", 374)
    s.run("indexer", 374, 70, "wq_b,", "queries")
    s.join(444, "compressor", 455, "indexer")
    s.run("indexer", 466, 58, "scores")
    s.run("indexer", 532, 70, "candidate", "blocks")
    s.run("indexer", 622, 80, "top-k,", "index table")
    s.fork(612, "indexer", "candidates", 628)
    s.run("candidates", 628, 110, "block flags for", "the consumers")
    s.along("candidates", 738, RIGHT)
    p.text(RIGHT - 4, s.center["candidates"] - 7, "joined in layer 8", 10, "end", FAINT)
    s.join(702, "indexer", 713, "main")
    _from_sparse_mla(s)


def _consumer_layer(p: Picture) -> None:
    lanes = (("mHC", "side_stream"), ("main", ""), ("indexer", "overlap_inputs"), ("candidates", "overlap_candidates"))
    s = Strip(p, 592, "layer 8: index source, consumes candidates; reads the cache of layer 6", lanes)
    _boundary_and_projections(s, 244)
    s.fork(258, "main", "indexer", 272)
    s.run("indexer", 272, 80, "weights_proj", "(head weights)")
    s.along("indexer", 352, 620)
    s.fork(362, "main", "indexer", 374)
    s.run("indexer", 374, 70, "wq_b,", "queries")
    s.run("indexer", 454, 58, "scores")
    s.join(LEFT, "candidates", 523, "indexer")
    p.text(LEFT + 4, s.center["candidates"] - 7, "block flags of layer 6", 10, "start", FAINT)
    s.run("indexer", 534, 70, "mask by", "the flags")
    s.run("indexer", 622, 80, "top-k,", "index table")
    s.join(702, "indexer", 713, "main")
    _from_sparse_mla(s)


PICTURES = {"architecture.svg": architecture, "step.svg": step}


def main() -> None:
    """Writes every picture."""
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw().svg(), encoding="utf-8")
        print(f"docs/{name}")


if __name__ == "__main__":
    main()
