"""Arrays that grow with the nodes and are copied only when somebody is to see a change (pure).

A row belongs to one node. When a node goes, the last row takes its place, so there are never
holes. What was published is never written to again: it is handed out until the column changes.
"""

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

_FIRST_ROWS = 64

Scalar = TypeVar("Scalar", bound=np.generic)


class Column(Generic[Scalar]):
    """One array with a row for each node; ``width`` columns, or one-dimensional without it.

    New rows and columns hold ``fill``.
    """

    def __init__(self, dtype: type[Scalar], fill: float, *, width: int | None = None) -> None:
        self._fill = fill
        shape = (_FIRST_ROWS,) if width is None else (_FIRST_ROWS, width)
        self._values: npt.NDArray[Scalar] = np.full(shape, fill, dtype)
        self._published: npt.NDArray[Scalar] | None = None

    @property
    def values(self) -> npt.NDArray[Scalar]:
        """The rows in use and some more; read only, call :meth:`put` to write."""
        return self._values

    def clear(self, row: int) -> None:
        """Make a row unknown again, growing as far as needed."""
        if row >= len(self._values):
            more = np.full_like(self._values, self._fill)
            self._values = np.concatenate((self._values, more))
        self._values[row] = self._fill
        self._published = None

    def put(self, row: int, value: float) -> None:
        """Write a row; one that already holds the value is left alone."""
        if self._values[row] != value:
            self._values[row] = value
            self._published = None

    def put_row(self, row: int, values: npt.NDArray[Scalar]) -> None:
        """Write the first values of a row and ``fill`` behind, widening the array if needed."""
        missing = len(values) - self._values.shape[1]
        if missing > 0:
            more = np.full((len(self._values), missing), self._fill, self._values.dtype)
            self._values = np.concatenate((self._values, more), axis=1)
            self._published = None
        padded = np.full(self._values.shape[1], self._fill, self._values.dtype)
        padded[: len(values)] = values
        if not np.array_equal(self._values[row], padded, equal_nan=padded.dtype.kind == "f"):
            self._values[row] = padded
            self._published = None

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        self._values[target] = self._values[source]
        self._published = None

    def publish(self, rows: int) -> npt.NDArray[Scalar]:
        """Return the first ``rows`` rows as an array that nobody can change."""
        if self._published is None or len(self._published) != rows:
            self._published = self._values[:rows].copy()
            self._published.flags.writeable = False
        return self._published
