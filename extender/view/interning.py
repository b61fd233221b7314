"""Numbers that stand for label values, so that rows can be compared fast (pure)."""

MISSING = 0
"""The number of a label that is missing or empty."""


class ValueNumbers:
    """Gives each value in use a number; numbers of values that nobody has any more are reused.

    So the memory is bounded by the nodes there are, however many come and go.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._users: dict[str, int] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, value: str) -> int:
        """Return the value's number, and count one more user of it."""
        if not value:
            return MISSING
        number = self._numbers.get(value)
        if number is None:
            number = self._free.pop() if self._free else len(self._numbers) + 1
            self._numbers[value] = number
            self._users[value] = 0
        self._users[value] += 1
        return number

    def release(self, value: str) -> None:
        """Count one user less."""
        if not value:
            return
        self._users[value] -= 1
        if not self._users[value]:
            del self._users[value]
            self._free.append(self._numbers.pop(value))
