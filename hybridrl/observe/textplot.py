"""Draws a curve with characters for terminals: with braille dots, or with ASCII if the terminal supports only that."""

import numpy as np

# Bits of a braille character by column and row of its 2 x 4 dots, from the top (Unicode, block U+2800).
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def draw(steps: np.ndarray, values: np.ndarray, width: int = 60, height: int = 8, *, ascii_only: bool = False) -> str:
    """Draw the curve as lines of text, with its scale on the left and the first and last step below.

    Args:
        steps: `[K]`, ascending.
        values: `[K]`; points that are not finite are left out.
        width, height: size of the drawing itself in characters, without the scale.
        ascii_only: draw with `*` and ASCII axes.

    Returns:
        `height + 2` lines; the empty string if there is no point to draw.
    """
    finite = np.isfinite(values)
    steps, values = np.asarray(steps)[finite], np.asarray(values, dtype=np.float64)[finite]
    if not len(values):
        return ""
    low, high = float(values.min()), float(values.max())
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = low - 0.5 * max(abs(low), 1e-3), high + 0.5 * max(abs(high), 1e-3)
    columns, rows = (1, 1) if ascii_only else (2, 4)
    grid = _trace(steps, values, low, high, width * columns, height * rows)
    body = _characters(grid, ascii_only)
    corner, side, line, tick = ("+", "|", "-", "|") if ascii_only else ("└", "│", "─", "┤")
    labels = {0: f"{high:.4g}", height // 2: f"{(high + low) / 2:.4g}", height - 1: f"{low:.4g}"}
    # The middle label is correct only if there is a middle row.
    if height < 5:
        labels.pop(height // 2, None)
        labels |= {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    margin = max(len(label) for label in labels.values())
    lines = [f"{labels.get(i, ''):>{margin}} {tick if i in labels else side}{row}" for i, row in enumerate(body)]
    first, last = str(steps[0]), str(steps[-1])
    scale = first if len(steps) == 1 else first + last.rjust(width - len(first))
    return "\n".join([*lines, " " * (margin + 1) + corner + line * width, " " * (margin + 2) + scale])


def _trace(steps: np.ndarray, values: np.ndarray, low: float, high: float, width: int, height: int) -> np.ndarray:
    """Return the cells `[height, width]` (row 0 on top) that the line through the points touches."""
    grid = np.zeros((height, width), dtype=bool)
    span = max(float(steps[-1] - steps[0]), 1.0)
    x = (steps - steps[0]) / span * (width - 1)
    y = (high - values) / (high - low) * (height - 1)
    for i in range(len(x)):
        j = min(i + 1, len(x) - 1)
        count = int(max(abs(x[j] - x[i]), abs(y[j] - y[i]))) + 2
        part = np.linspace(0.0, 1.0, count)
        grid[np.rint(y[i] + part * (y[j] - y[i])).astype(int), np.rint(x[i] + part * (x[j] - x[i])).astype(int)] = True
    return grid


def _characters(grid: np.ndarray, ascii_only: bool) -> list[str]:
    if ascii_only:
        return ["".join("*" if cell else " " for cell in row) for row in grid]
    rows, columns = grid.shape[0] // 4, grid.shape[1] // 2
    codes = np.zeros((rows, columns), dtype=int)
    for dx, column in enumerate(_DOTS):
        for dy, bit in enumerate(column):
            codes |= grid[dy::4, dx::2] * bit
    return ["".join(chr(0x2800 + code) for code in row) for row in codes]
