"""`run_rank` runs in a worker of Ray Train a rank as any launcher starts it."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sdbench.base import stop
from sdbench.base.errors import EXIT_FAILED
from sdbench.ranks.ray_cluster import (
    RAY_BEGAN_S,
    RAY_LAUNCH_S,
    RAY_RESTARTS,
    forget_threads_of_ray,
    head_address,
    is_listening,
    tidy_up,
)
from sdbench.record import store

# Between two visits to the desk, of the driver and of each rank. A visit takes time of four
# processes, which on two cores the training lacks.
PERIOD_S = 1.0
# The driver is asked for so long while the head of the cluster does not answer either. Ray itself
# would let the ranks go on for a minute.
HEAD_LOST_S = 10.0


class RankFailedError(Exception):
    """A rank has failed and has said why; Ray may start the ranks again."""


def run_rank(
    desk: Any,
    rank_main: Callable[..., int],
    command: list[str],
    cwd: str,
    began_s: float,
    variables: Mapping[str, str],
) -> int:
    """Run a rank in a worker; returns the exit code, or raises `RankFailedError`.

    `desk` is a handle of the driver's `Desk`. The driver's working folder `cwd` becomes the
    worker's on nodes that have it, and its `variables` are set.
    """
    import ray

    is_first = os.environ["RANK"] == "0"
    if os.path.isdir(cwd):
        os.chdir(cwd)
    num_ranks = int(os.environ["WORLD_SIZE"])
    num_before, launch_s = ray.get(desk.begin.remote(num_ranks)) if is_first else (0, 0.0)
    forget_threads_of_ray(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))
    os.environ |= {
        **variables,
        RAY_RESTARTS: str(num_before),
        RAY_BEGAN_S: str(began_s),
        RAY_LAUNCH_S: str(launch_s),
    }

    def began(folder: Path) -> None:
        talk.folder = folder.resolve()
        desk.begin_run.remote(talk.folder)

    with _talking(desk, is_first=is_first) as talk:
        exit_code = rank_main(command, began=began)
    if exit_code == EXIT_FAILED and not talk.is_stopped:
        raise RankFailedError(f"exit code {exit_code}")
    return exit_code


class _Talk(io.TextIOBase):
    """A text stream to the desk, whose answers may ask the rank to stop."""

    def __init__(self, desk: Any, *, is_first: bool) -> None:
        super().__init__()
        self._desk = desk
        self._is_first = is_first
        self._texts: list[str] = []
        self._lock = threading.Lock()
        self._head = head_address()
        self.folder: Path | None = None  # of the run
        self.is_over = threading.Event()
        self.is_stopped = False

    def write(self, text: str) -> int:
        with self._lock:
            self._texts.append(text)
        return len(text)

    def go_on(self) -> None:
        """Visit the desk until the rank ends; in a thread."""
        while not self.is_over.wait(PERIOD_S):
            self.visit()

    def visit(self) -> None:
        """Bring the output. The first rank comes every time: all ranks stop when one does."""
        import ray

        with self._lock:
            text, self._texts = "".join(self._texts), []
        if not (text or self._is_first) and is_listening(self._head):
            return
        coming = self._desk.exchange.remote(text)
        head_seen_s = time.monotonic()
        while True:
            try:
                number = ray.get(coming, timeout=PERIOD_S)
                break
            except ray.exceptions.GetTimeoutError:
                pass
            except ray.exceptions.ActorUnavailableError:  # the connection broke
                time.sleep(PERIOD_S)
                coming = self._desk.exchange.remote(text)
            except ray.exceptions.RayError:
                self._end_without_head()
            if is_listening(self._head):
                head_seen_s = time.monotonic()
            elif time.monotonic() > head_seen_s + HEAD_LOST_S:
                self._end_without_head()
        if number == signal.SIGKILL:  # the driver writes why
            tidy_up()
            os._exit(EXIT_FAILED)
        if number is not None and not self.is_stopped:
            self.is_stopped = True
            stop.ask_to_stop(number)

    def _end_without_head(self) -> None:
        """End the process: nobody waits for its work any more, and the last checkpoint stays."""
        if self._is_first and self.folder is not None:
            reason = f"the driver, or the head of the Ray cluster at {self._head}, is lost"
            with contextlib.suppress(OSError, ValueError):
                run = store.RunFolder(self.folder)
                if run.claim_failure():
                    record = store.load_record(self.folder)
                    run.write_record(record | {"status": store.FAILED, "reason": reason})
        tidy_up()
        os._exit(EXIT_FAILED)


@contextlib.contextmanager
def _talking(desk: Any, *, is_first: bool) -> Iterator[_Talk]:
    """Send the output of the block to the desk."""
    talk = _Talk(desk, is_first=is_first)
    visitor = threading.Thread(target=talk.go_on, daemon=True)
    visitor.start()
    try:
        with contextlib.redirect_stdout(talk), contextlib.redirect_stderr(talk):
            yield talk
    finally:
        talk.is_over.set()
        visitor.join()
        talk.visit()
        tidy_up()
