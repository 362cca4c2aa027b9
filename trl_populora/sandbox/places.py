"""How many programs are under way: those that count, and slow ones behind them as far as memory lasts."""

from __future__ import annotations

from .pending import Pending


MOST_IN_BACKGROUND = 4  # slow programs per worker that go on side by side
# Programs under way per worker, so that one is run while others are handed over or end: 2 give 3 % less, 5 give 2 %
# more.
UNDER_WAY = 3


class Places:
    """
    Places for programs.

    Args:
        workers (`int`): Programs at a time.
        processes (`int`, *optional*, defaults to `1`): Processes that share this host's memory.

    Attributes:
        memory (`int`): Bytes that slow programs may ask for together.
    """

    def __init__(self, workers: int, processes: int = 1):
        self.workers, self.memory = workers, _free_memory() // 2 // processes
        self.foreground = self.background = self.asked_for = 0

    @property
    def is_free(self) -> bool:
        """Whether one more program may start."""
        return self.foreground < UNDER_WAY * self.workers

    @property
    def are_taken(self) -> bool:
        """Whether programs wait for a core, as far as zygotes with slow children need to know."""
        return self.foreground >= self.workers

    def take(self, pending: Pending) -> None:
        pending.foreground = True
        self.foreground += 1

    def has_room_behind(self, pending: Pending) -> bool:
        """Whether a slow program may go on in the background; one always may."""
        fits = self.asked_for + pending.limits.memory_bytes <= self.memory
        return (self.background < MOST_IN_BACKGROUND * self.workers and fits) or not self.background

    def move_behind(self, pending: Pending) -> None:
        pending.foreground = False
        self.foreground -= 1
        self.background += 1
        self.asked_for += pending.limits.memory_bytes

    def leave(self, pending: Pending) -> None:
        if pending.foreground:
            self.foreground -= 1
        else:
            self.background -= 1
            self.asked_for -= pending.limits.memory_bytes
        pending.foreground = False


def _free_memory() -> int:
    """Bytes that this host, or this container, has left."""
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                free = min(free, int(file.read()))
        except (OSError, ValueError):
            continue
    return free
