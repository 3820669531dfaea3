"""A clock for code that waits: no time passes but what the code sleeps."""


class Clock:
    """A clock that only sleeping moves; `during_sleep` is what the world does meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0
        self.during_sleep = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.during_sleep()
