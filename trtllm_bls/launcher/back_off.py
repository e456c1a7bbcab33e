"""How long to wait before something that failed is started again."""

FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 30.0
HEALTHY_S = 60.0  # what was up for so long begins with the first delay again


class BackOff:
    """Seconds to wait before the next start: 1, 2, 4 ... 30."""

    def __init__(self) -> None:
        self._next = FIRST_DELAY_S

    def delay(self, up_s: float) -> float:
        """After it was up for ``up_s`` seconds."""
        if up_s >= HEALTHY_S:
            self._next = FIRST_DELAY_S
        delay, self._next = self._next, min(2 * self._next, LONGEST_DELAY_S)
        return delay
