"""Seconds of blocks that overlap, in any threads."""

import threading
import time

from hybridrl.utils.clock import OverlappingSeconds


def test_overlapping_blocks_count_once() -> None:
    seconds, inside, leave = OverlappingSeconds(), threading.Barrier(3), threading.Event()

    def block() -> None:
        with seconds.measured():
            inside.wait()
            leave.wait()

    begun = time.monotonic()
    threads = [threading.Thread(target=block) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait()
    time.sleep(0.05)
    first = seconds.take()  # while both run
    leave.set()
    for thread in threads:
        thread.join()
    whole = time.monotonic() - begun
    assert 0.05 <= first <= first + seconds.take() <= whole
    assert seconds.take() == 0.0, "nothing runs"
