"""A store in memory for several ranks, each of which may find that an operation fails, before or after it took effect."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class MemoryStore:
    """One rank's view. `failing` maps the numbers of its operations to whether they take effect all the same."""

    values: dict[str, bytes] = field(default_factory=dict)
    failing: dict[int, bool] = field(default_factory=dict)
    operations: int = 0

    def check(self, keys: list[str]) -> bool:
        self._fail(takes_effect=False)
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        self._fail(takes_effect=False)
        return self.values[key]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._fail(takes_effect=False)
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = desired.encode()
        self._fail(takes_effect=True)
        return self.values.get(key, expected.encode())

    def add(self, key: str, amount: int) -> int:
        self._fail(takes_effect=False)
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        self._fail(takes_effect=True)
        return total

    def _fail(self, *, takes_effect: bool) -> None:
        self.operations += not takes_effect
        if self.failing.get(self.operations) is takes_effect:
            raise ConnectionError
