"""A version table for a reader, as text and as a picture (SVG): which weights each stage uses for each mini-batch.

Expected alone, or beside what was observed. The same input gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from xml.sax.saxutils import escape

from equivtests.reference.versions import Table, Used

Observed = Mapping[tuple[int, int], tuple[int, int]]
"""By (stage, mini-batch): the versions that the forward and the backward pass really used."""


def text(expected: Table, observed: Observed | None = None) -> str:
    """One line per stage, one column per mini-batch; below it what the cells mean.

    observed: cells that differ from the table read used!prescribed, cells that were not observed prescribed?.
    Observations of stages or mini-batches outside the table are not shown.
    """
    rows = [["stage", *map(str, range(len(expected)))]]
    rows += [[str(s), *(cell(expected, observed, s, t) for t in range(len(expected)))] for s in _stages(expected)]
    width = max(len(word) for row in rows for word in row[1:])
    lines = ["  ".join([row[0].rjust(5), *(word.ljust(width) for word in row[1:])]).rstrip() for row in rows]
    return "\n".join(["       mini-batch", *lines, "", *legend(expected, observed)])


def cell(expected: Table, observed: Observed | None, stage: int, minibatch: int) -> str:
    """Such as `2`; `2/4` forward and backward; `2+1` predicted; `3!2` used 3 where 2 is prescribed; `2?` not observed."""
    prescribed = label(expected[minibatch][stage])
    if observed is None:
        return prescribed
    seen = observed.get((stage, minibatch))
    if seen is None:
        return f"{prescribed}?"
    return f"{label(Used(*seen))}!{prescribed}" if differs(expected, observed, stage, minibatch) else prescribed


def label(used: Used) -> str:
    ahead = f"+{used.ahead}" if used.ahead else ""
    return (f"{used.forward}" if used.forward == used.backward else f"{used.forward}/{used.backward}") + ahead


def differs(expected: Table, observed: Observed | None, stage: int, minibatch: int) -> bool:
    """Whether other versions were observed than the table prescribes; predictions are not observed."""
    prescribed, seen = expected[minibatch][stage], (observed or {}).get((stage, minibatch))
    return seen is not None and seen != (prescribed.forward, prescribed.backward)


def legend(expected: Table, observed: Observed | None = None) -> Iterator[str]:
    """What the cells that are there mean."""
    words = [cell(expected, observed, *c) for c in _cells(expected)]
    yield "v: weights after v updates of the stage, in both passes"
    for sign, meaning in LEGEND.items():
        if any(sign in word for word in words):
            yield meaning


LEGEND = {
    "/": "f/b: version f in the forward pass, b in the backward pass",
    "+": "v+n: version v, moved on by n updates along its momentum (version 0 has none, nor has plain SGD)",
    "!": "a!b: used a where b is prescribed",
    "?": "v?: v is prescribed, and nothing was observed",
}


def _stages(table: Table) -> range:
    return range(len(table[0]))


def _cells(table: Table) -> list[tuple[int, int]]:
    """(stage, mini-batch), stage by stage."""
    return [(s, t) for s in _stages(table) for t in range(len(table))]


# ------------------------------------------------------------------------------------------------ picture

COLOURS = ("#f7f7f7", "#a6cee3", "#fdd49e", "#b2df8a", "#e7c6ea", "#ffff99", "#9fd8cb", "#f4b6b0")
"""Of versions 0, 1, …, over and over: all light enough for the numbers in them, which say the same."""
MARK = "#b00020"
CHARACTER, ROW, LEFT, TOP, LINE = 8, 30, 88, 58, 18  # pixels


def svg(expected: Table, title: str, observed: Observed | None = None) -> str:
    """A picture: a box per stage and mini-batch, left its forward, right its backward pass, coloured by version.

    Cells that differ have a thick border. It needs no other file. Arguments otherwise as for `text`.
    """
    cells, below = _cells(expected), list(legend(expected, observed))
    box = max(5, *(len(cell(expected, observed, *c)) for c in cells)) * CHARACTER
    bottom = TOP + len(expected[0]) * ROW
    widest = max(LEFT + len(expected) * box, LEFT + KEY * len(COLOURS), 12 + CHARACTER * max(map(len, (title, *below))))
    width, height = widest + 12, bottom + LINE * (len(below) + 3)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' role="img" aria-labelledby="title description" font-family="sans-serif" font-size="12">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(_spoken(expected, observed))}</desc>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _written(12, 22, title),
        _written(12, TOP - 8, "mini-batch"),
        *(_written(LEFT + t * box + box // 2, TOP - 8, str(t), "middle") for t in range(len(expected))),
        *(_written(12, TOP + s * ROW + 19, f"stage {s}") for s in _stages(expected)),
        *(line for c in cells for line in _box(expected, observed, *c, box)),
        *_colours(expected, observed, bottom),
        *(_written(12, bottom + LINE * (n + 3), line) for n, line in enumerate(below)),
    ]
    return "\n".join([*lines, "</svg>"]) + "\n"


KEY = 12 * CHARACTER  # pixels of an entry of the colours' legend


def _box(expected: Table, observed: Observed | None, stage: int, minibatch: int, width: int) -> Iterator[str]:
    """The box of one cell; its colours are those of the versions that were used."""
    x, y = LEFT + minibatch * width, TOP + stage * ROW
    yield f"<g><title>{escape(_in_words(expected, observed, stage, minibatch))}</title>"
    for number, version in enumerate(_shown(expected, observed, stage, minibatch)):
        yield _rect(x + number * (width // 2), y, width // 2, ROW, COLOURS[version % len(COLOURS)])
    wrong = differs(expected, observed, stage, minibatch)
    yield _rect(
        x + wrong, y + wrong, width - 2 * wrong, ROW - 2 * wrong, "none", MARK if wrong else "#777777", 1 + 2 * wrong
    )
    yield _written(x + width // 2, y + 19, cell(expected, observed, stage, minibatch), "middle")
    yield "</g>"


def _shown(expected: Table, observed: Observed | None, stage: int, minibatch: int) -> tuple[int, int]:
    prescribed = expected[minibatch][stage]
    return (observed or {}).get((stage, minibatch), (prescribed.forward, prescribed.backward))


def _colours(expected: Table, observed: Observed | None, y: int) -> Iterator[str]:
    """The legend of the colours, for the versions that are there, up to where colours repeat."""
    versions = sorted({version for c in _cells(expected) for version in _shown(expected, observed, *c)})
    for number, version in enumerate(versions[: len(COLOURS)]):
        x = LEFT + number * KEY
        yield _rect(x, y + 10, 14, 14, COLOURS[version % len(COLOURS)], "#777777")
        yield _written(x + 20, y + 21, f"version {version}")


def _spoken(expected: Table, observed: Observed | None) -> str:
    """All cells, for a reader who does not see the picture."""
    rows = (
        f"stage {s}: {', '.join(cell(expected, observed, s, t) for t in range(len(expected)))}"
        for s in _stages(expected)
    )
    return "; ".join([*rows, *legend(expected, observed)])


def _in_words(expected: Table, observed: Observed | None, stage: int, minibatch: int) -> str:
    """What a pointer over the box reads."""
    forward, backward = _shown(expected, observed, stage, minibatch)
    words = f"stage {stage}, mini-batch {minibatch}: forward pass version {forward}, backward pass version {backward}"
    wrong = differs(expected, observed, stage, minibatch)
    return f"{words}; prescribed: {label(expected[minibatch][stage])}" if wrong else words


def _rect(x: int, y: int, width: int, height: int, fill: str, stroke: str = "none", thick: int = 1) -> str:
    border = f'stroke="{stroke}" stroke-width="{thick}"'
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" {border}/>'


def _written(x: int, y: int, words: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'
