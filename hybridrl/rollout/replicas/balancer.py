"""Which replica gets which request."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping

from hybridrl.rollout.request import Request

_REMEMBERED_SESSIONS = 100_000


class Balancer:
    """A queue of requests, given out session by session: where the session was before, else where least is in flight.

    A replica gets at most `window` requests at once. What waits here goes to whichever replica has room next, so that
    long generations on one do not hold up what another could do.

    Args:
        window: requests in flight a replica.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._queue: deque[Request] = deque()
        self._home: OrderedDict[str, int] = OrderedDict()

    def add(self, requests: Iterable[Request], first: bool = False) -> None:
        """Queue requests, behind the others or (those of a lost replica) before them."""
        if first:
            self._queue.extendleft(reversed(list(requests)))
        else:
            self._queue.extend(requests)

    def __len__(self) -> int:
        return len(self._queue)

    def clear(self) -> list[Request]:
        """Take everything that waits."""
        waiting = list(self._queue)
        self._queue.clear()
        return waiting

    def forget(self, replica: int) -> None:
        """Sessions of this replica may go anywhere: what it had cached is lost."""
        for session in [name for name, home in self._home.items() if home == replica]:
            del self._home[session]

    def take(self, in_flight: Mapping[int, int]) -> dict[int, list[Request]]:
        """What each replica is to get now.

        Args:
            in_flight: requests at each replica that can take some.
        """
        loads = dict(in_flight)
        given: dict[int, list[Request]] = {}
        while self._queue and any(load < self.window for load in loads.values()):
            request = self._queue.popleft()
            home = self._home.get(request.session, -1)
            if loads.get(home, self.window) >= self.window:
                # A cached prefix saves less than an idle replica costs.
                home = min(loads, key=lambda index: (loads[index], index))
            if request.session:
                self._remember(request.session, home)
            loads[home] += 1
            given.setdefault(home, []).append(request)
        return given

    def _remember(self, session: str, replica: int) -> None:
        self._home[session] = replica
        self._home.move_to_end(session)
        while len(self._home) > _REMEMBERED_SESSIONS:
            self._home.popitem(last=False)
