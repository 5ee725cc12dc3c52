"""A few shapes in SVG: boxes, arrows, bars and texts, in one style."""

from __future__ import annotations

from xml.sax.saxutils import escape

__all__ = ["BLUE", "GREEN", "GREY", "INK", "RED", "YELLOW", "Canvas"]

INK, PAPER = "#1f2933", "#ffffff"
GREY, BLUE, GREEN, YELLOW, RED = "#e4e7eb", "#cfe3fa", "#cdeccf", "#fbe9b7", "#f7cfcf"
FONT = "Helvetica, Arial, sans-serif"
LINE = 15
"""Pixels between two lines of text."""


class Canvas:
    """Collects shapes; ``svg`` gives the picture. Pixels, from the upper left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._shapes: list[str] = []

    def box(self, x: int, y: int, w: int, h: int, text: str = "", fill: str = GREY) -> None:
        """A rounded box with centred lines."""
        self._shapes.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="5" fill="{fill}" stroke="{INK}"/>'
        )
        lines = text.split("\n") if text else []
        top = y + h / 2 - (len(lines) - 1) * LINE / 2 + 4
        for i, line in enumerate(lines):
            self.text(x + w // 2, round(top + i * LINE), line, anchor="middle")

    def frame(self, x: int, y: int, w: int, h: int, title: str) -> None:
        """A dashed frame with a title inside its upper edge."""
        self._shapes.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8" fill="none" stroke="{INK}" '
            'stroke-dasharray="5 4"/>'
        )
        self.text(x + 10, y + 18, title, bold=True)

    def text(self, x: int, y: int, text: str, *, anchor: str = "start", bold: bool = False) -> None:
        """Lines of text; ``y`` is the base line of the first."""
        weight = ' font-weight="bold"' if bold else ""
        for i, line in enumerate(text.split("\n")):
            self._shapes.append(
                f'<text x="{x}" y="{y + i * LINE}" text-anchor="{anchor}"{weight}>'
                f"{escape(line)}</text>"
            )

    def line(self, *points: tuple[int, int], dashed: bool = False) -> None:
        self._path(points, dashed=dashed, end="")

    def arrow(self, *points: tuple[int, int], text: str = "", dashed: bool = False) -> None:
        """Through ``points``; the text stands above the middle of the first stretch."""
        self._path(points, dashed=dashed, end=' marker-end="url(#tip)"')
        if text:
            (ax, ay), (bx, by) = points[:2]
            lines = text.count("\n")
            self.text((ax + bx) // 2, (ay + by) // 2 - 6 - lines * LINE, text, anchor="middle")

    def _path(self, points: tuple[tuple[int, int], ...], *, dashed: bool, end: str) -> None:
        way = " L ".join(f"{x} {y}" for x, y in points)
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self._shapes.append(f'<path d="M {way}" fill="none" stroke="{INK}"{dash}{end}/>')

    def svg(self) -> str:
        width, height = self._size
        shapes = "\n".join(self._shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="{FONT}" font-size="12" '
            f'fill="{INK}">\n'
            f"<title>{escape(self._title)}</title>\n"
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse"><path d="M 0 0 L 10 5 L 0 10 z" '
            f'fill="{INK}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>\n'
            f"{shapes}\n</svg>\n"
        )
