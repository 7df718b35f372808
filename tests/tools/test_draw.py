"""The pictures of the docs are what tools/draw.py draws, and the pages show them."""

import xml.etree.ElementTree as ElementTree

import pytest

from tools import draw, tables


@pytest.mark.parametrize("name", draw.PICTURES)
def test_picture_is_current(name: str) -> None:
    drawn = draw.PICTURES[name]().svg()
    assert (draw.DOCS / name).read_text(encoding="utf-8") == drawn, "run python -m tools.draw"


@pytest.mark.parametrize("name", draw.PICTURES)
def test_boxes_and_lines_lie_on_the_page(name: str) -> None:
    picture = draw.PICTURES[name]()
    corners = []
    for element in ElementTree.fromstring(picture.svg()).iter():
        if element.tag.endswith("rect"):
            x, y, width, height = (float(element.attrib[key]) for key in ("x", "y", "width", "height"))
            corners += [(x, y), (x + width, y + height)]
        elif element.tag.endswith("polyline"):
            points = [point.split(",") for point in element.attrib["points"].split()]
            corners += [(float(x), float(y)) for x, y in points]
    assert len(corners) > 50
    assert all(0 <= x <= picture.width and 0 <= y <= picture.height for x, y in corners)


@pytest.mark.parametrize("name", draw.PICTURES)
def test_picture_is_shown(name: str) -> None:
    assert any(f"{name})" in page.read_text(encoding="utf-8") for page in tables.pages(tables.ROOT))
