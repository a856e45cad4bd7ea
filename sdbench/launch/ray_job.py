"""`launch_ranks` runs the ranks of a command as workers of Ray Train.

    driver (this process) -> Ray Train's controller -> workers, each of which runs `rank_main`

The driver prints the output of the ranks, and passes a stop signal on, which ends their loop at the
next step. Both go through an actor, the desk.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from sdbench.base import stop
from sdbench.base.cause import LOST, report_cause
from sdbench.base.errors import EXIT_FAILED, EXIT_INTERRUPTED, RunError, first_line
from sdbench.base.files import refused_unless_written
from sdbench.launch.ray_worker import PERIOD_S, RankFailedError, run_rank
from sdbench.ranks import ray_cluster
from sdbench.record import store
from sdbench.settings.request import Request

if TYPE_CHECKING:
    from sdbench.settings.feed import FeedSettings
    from sdbench.settings.recipe import EngineConfig

# Without a rank for so long, a line says what Ray is waiting for; the next after twice the time.
PATIENCE_S = 30.0
# A rank that has failed first writes the record.
WRITTEN_WITHIN_S, WRITTEN_PERIOD_S = 3.0, 0.2
# A head may be started again meanwhile. After 60 s Ray would end this process without a reason.
HEAD_PATIENCE_S = 30.0


class Heard(NamedTuple):
    """What the driver hears at the desk."""

    text: str  # output of the ranks since the last visit
    num_starts: int  # of the first rank
    num_ranks: int  # at the last start
    folder: Path | None  # of the run


class Desk:
    """Where driver and ranks leave messages for each other; an actor beside the driver."""

    def __init__(self, *, began_s: float) -> None:
        """Wait for the ranks of a command that was given at `began_s` on this node's clock."""
        self._began_s = began_s
        self._texts: list[str] = []
        self._num_starts = self._num_ranks = 0
        self._folder: Path | None = None
        self._stop: int | None = None

    def begin(self, num_ranks: int) -> tuple[int, float]:
        """Called by the first rank: how often it began before, and seconds since the command."""
        self._num_starts += 1
        self._num_ranks = num_ranks
        return self._num_starts - 1, time.time() - self._began_s

    def begin_run(self, folder: Path) -> None:
        """Called by the first rank when it has made the folder of the run."""
        self._folder = folder

    def exchange(self, text: str) -> int | None:
        """Called by a rank with its output; returns the signal that asks it to stop, if any."""
        self._texts.append(text)
        return self._stop

    def collect(self) -> Heard:
        """Called by the driver for the messages of the ranks."""
        text, self._texts = "".join(self._texts), []
        return Heard(text, self._num_starts, self._num_ranks, self._folder)

    def ask_to_stop(self, number: int) -> None:
        """Called by the driver to pass a signal on; SIGKILL: the ranks end within the step."""
        self._stop = number


def launch_ranks(
    request: Request,
    *,
    command: list[str],
    rank_main: Callable[..., int],
    ahead: Callable[..., None],
    answer: Callable[[Path | None], None] | None = None,
) -> int:
    """Run a command's ranks; returns the exit code of the first one, or 1 if a rank was lost.

    `rank_main(command, began=...)` runs a rank and returns its exit code. `ahead(is_here=...)`
    raises an error that ranks would raise before they begin, here or on unknown machines.
    `answer` is called with the folder of the run when it has ended.
    """
    ray_cluster.check_installed()
    ahead(is_here=ray_cluster.address_of(request.config.ray_address) is None)
    _check_storage(request.config)
    ray_cluster.connect(request.config.ray_address)
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    began_s = psutil.Process().create_time()
    actor = ray.remote(Desk).options(num_cpus=0, scheduling_strategy=here)
    desk = actor.remote(began_s=began_s)
    variables = ray_cluster.carried_variables()
    rank = functools.partial(run_rank, desk, rank_main, command, os.getcwd(), began_s, variables)
    rank.__name__ = "sdbench rank"  # Ray names its threads by it
    with tempfile.TemporaryDirectory(prefix="sdbench-ray-", ignore_cleanup_errors=True) as scratch:
        driver = None
        try:
            driver = _Driver(desk, request.config, _make_trainer(request.config, rank, scratch))
            with _signals_counted() as signals:
                exit_code = driver.run(signals)
            if answer is not None:
                answer(driver.folder)
        finally:
            if driver is None or driver.can_shut_down():
                ray.shutdown()
    if not ray.is_initialized():
        return exit_code
    ray_cluster.tidy_up()
    # The end of this process ends the job as well.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


@contextlib.contextmanager
def _signals_counted() -> Iterator[list[int]]:
    """Add stop signals to the list during the block; several at once count as one."""
    signals: list[int] = []
    last_s = 0.0

    def add(number: int, frame: Any) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > stop.SAME_REQUEST_S:
            signals.append(number)
        last_s = time.monotonic()

    with stop.keep_handlers():
        if threading.current_thread() is threading.main_thread():
            for number in stop.STOP_SIGNALS:
                # nohup has SIGHUP ignored.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, add)
        yield signals


class _Driver:
    """Waits for the ranks, and prints their output."""

    def __init__(self, desk: Any, config: EngineConfig | FeedSettings, trainer: Any) -> None:
        self._desk = desk
        self._config = config
        self._trainer = trainer
        self._heard = Heard("", 0, 0, None)
        self._collecting: Any = None  # the desk's answer, while it is not there yet
        self._head = ray_cluster.head_address()
        self._head_seen_s = time.monotonic()
        self._result: Any = None
        self._error: Exception | None = None
        # In the main thread Ray would answer Ctrl-C itself, and kill the ranks.
        self._thread = threading.Thread(target=self._fit, daemon=True)

    def run(self, signals: list[int]) -> int:
        """Start the ranks, and wait for their end or for a second signal."""
        thread = self._thread
        thread.start()
        began_s = looked_s = time.monotonic()
        next_told_s, no_room_s = PATIENCE_S, 0.0
        num_passed_on = 0
        while thread.is_alive():
            thread.join(PERIOD_S)
            if not self._listen() or self._has_lost_head():
                thread.join(PERIOD_S)  # Ray may know more
                return self._conclude()
            if len(signals) > num_passed_on:
                num_passed_on = len(signals)
                if num_passed_on > 1 or not self._heard.num_starts:
                    return self._end_at_once(signals[0])
                print("The ranks end after the step under way.", file=sys.stderr, flush=True)
                self._desk.ask_to_stop.remote(signals[0])
            if self._heard.num_starts or not ray_cluster.is_listening(self._head):
                continue
            has_room, now_s = self._has_room(), time.monotonic()
            if not has_room:
                no_room_s += now_s - looked_s
            looked_s = now_s
            if no_room_s > self._config.dist_timeout:
                return self._give_up()
            if now_s - began_s > next_told_s:
                next_told_s *= 2
                self._tell_of_wait(has_room=has_room)
        self._listen()
        return self._conclude()

    @property
    def folder(self) -> Path | None:
        """The folder of the run, once the first rank has made it."""
        return self._heard.folder

    def can_shut_down(self) -> bool:
        """Whether Ray can: it crashes while a thread waits for it, or without the head."""
        return not self._thread.is_alive() and ray_cluster.is_listening(self._head)

    def _fit(self) -> None:
        try:
            self._result = self._trainer.fit()
        except Exception as error:
            self._error = error

    def _listen(self) -> bool:
        """Print the output of the ranks; False if the desk, and so the cluster, is gone."""
        import ray

        self._collecting = self._collecting or self._desk.collect.remote()
        try:
            heard = ray.get(self._collecting, timeout=stop.PATIENCE_S)
        except ray.exceptions.GetTimeoutError:
            return True  # a busy machine, or a lost head, which is looked for as well
        except (ray.exceptions.RayError, ConnectionError) as error:
            self._error = self._error or error
            return False
        self._collecting = None
        if heard.num_starts > self._heard.num_starts:
            if heard.num_starts > 1:
                print(f"Ray has started the ranks again, time {heard.num_starts - 1}.", flush=True)
            if heard.num_ranks < (self._config.num_ray_workers or 0):
                print(
                    f"Ray has started {heard.num_ranks} of {self._config.num_ray_workers} ranks, "
                    "as it had no room for more (--min_ray_workers).",
                    flush=True,
                )
        self._heard = heard
        print(heard.text, end="", flush=True)
        return True

    def _has_lost_head(self) -> bool:
        """Return True if the head of the cluster has not answered for too long."""
        if ray_cluster.is_listening(self._head):
            self._head_seen_s = time.monotonic()
        if time.monotonic() < self._head_seen_s + HEAD_PATIENCE_S:
            return False
        self._error = RunError(f"no answer from its head at {self._head}")
        import ray

        # Nobody else would end the ranks for another half minute.
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._desk.ask_to_stop.remote(signal.SIGKILL), timeout=PERIOD_S)
        return True

    def _has_room(self) -> bool:
        """Whether the ranks have places, or Ray has not asked for any yet."""
        states = ray_cluster.states_of_places()
        # With a least number Ray asks when there is room for so many.
        return "PENDING" not in states if states else self._config.min_ray_workers is None

    def _tell_of_wait(self, *, has_room: bool) -> None:
        if has_room:
            print("Waiting for Ray, which is starting the ranks.", file=sys.stderr, flush=True)
            return
        import ray

        free = ray_cluster.resources_in_words(ray.available_resources())
        share = ray_cluster.resources_per_worker(self._config, ray.cluster_resources())
        needed = ray_cluster.resources_in_words(share)
        print(
            f"Waiting for room for the ranks. Each needs {needed}; free in the cluster: {free} "
            "(--num_ray_workers, --ray_worker_resources)",
            file=sys.stderr,
            flush=True,
        )

    def _give_up(self) -> int:
        reason = (
            f"the Ray cluster had no room for the ranks within {self._config.dist_timeout:g} s "
            "(--dist_timeout, --num_ray_workers, --ray_worker_resources)"
        )
        report_cause(LOST, reason)
        print(f"failed: {reason}", file=sys.stderr)
        return EXIT_FAILED

    def _end_at_once(self, number: int) -> int:
        reason = f"{signal.Signals(number).name}: the ranks were ended within a step"
        reason = self._complete_record(store.INTERRUPTED, reason)
        print(f"interrupted: {reason}", file=sys.stderr)
        return EXIT_INTERRUPTED

    def _conclude(self) -> int:
        """The exit code, with a reason where the ranks could not give one."""
        if self._error is None:
            return self._result.return_value
        failures = getattr(self._error, "worker_failures", {})
        # Ray wraps the error of a worker's function. If no worker failed, Ray itself has.
        causes = {rank: getattr(one, "_base_exc", one) for rank, one in failures.items()}
        if causes and all(isinstance(cause, RankFailedError) for cause in causes.values()):
            return EXIT_FAILED
        reason = self._complete_record(store.FAILED, _describe_loss(self._error, causes))
        report_cause(LOST, reason)
        where = f"\nrecord: {self._heard.folder}" if self._heard.folder else ""
        print(f"failed: {reason}{where}", file=sys.stderr)
        return EXIT_FAILED

    def _complete_record(self, status: str, reason: str) -> str:
        """Add the reason to the record, if this node sees one; returns it with a rank's own."""
        folder = self._heard.folder
        if folder is None or not (folder / store.RECORD_NAME).is_file():
            return reason
        run = store.RunFolder(folder)
        is_first = run.claim_failure()
        content = store.load_record(folder / store.RECORD_NAME)
        end_s = time.monotonic() + WRITTEN_WITHIN_S
        while content["reason"] == store.UNFINISHED_REASON and not is_first:
            if time.monotonic() > end_s:
                break  # the rank that was to write the record is dead
            time.sleep(WRITTEN_PERIOD_S)
            content = store.load_record(folder / store.RECORD_NAME)
        if content["reason"] not in (None, store.UNFINISHED_REASON):
            status, reason = content["status"], f"{reason}; {content['reason']}"
        return run.write_record(content | {"status": status, "reason": reason})["reason"]


def _make_trainer(
    config: EngineConfig | FeedSettings, rank: Callable[[], int], scratch: str
) -> Any:
    # Ray would move the ranks to a folder of its own, and relative paths mean the driver's.
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # or each print would come twice
    # How often Ray looks whether the ranks have ended; its own 2 s are waited for at each end.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2._internal.callbacks.placement_group_callback import (
        PlacementGroupCleanerCallback,
    )

    class Trainer(TorchTrainer):
        def _create_default_callbacks(self) -> list[Any]:
            # The cleaner frees the places of the ranks if the controller is killed, which the end
            # of this command does as well. It asks the dashboard again and again whether the
            # controller lives; where no dashboard runs, the end of a run waits up to 12 s for it.
            unwanted = PlacementGroupCleanerCallback
            callbacks = super()._create_default_callbacks()
            return [one for one in callbacks if not isinstance(one, unwanted)]

    room, free = ray.cluster_resources(), ray.available_resources()
    resources = ray_cluster.resources_per_worker(config, room)
    num_workers = ray_cluster.num_workers(config, room)
    least = config.min_ray_workers
    in_words = ray_cluster.resources_in_words
    line = (
        f"Ray cluster with {in_words(room)}; starting ranks: {num_workers}, each with "
        f"{in_words(resources)}"
    )
    num_now = ray_cluster.num_fitting(resources, free)
    if num_now < (least or num_workers):
        line += (
            f"; free now: {in_words(free)}; they wait for room for up to "
            f"{config.dist_timeout:g} s (--dist_timeout)"
        )
    elif num_now < num_workers:
        line += (
            f"; free now: {in_words(free)}, in which {num_now} of them begin (--min_ray_workers)"
        )
    print(line, file=sys.stderr, flush=True)
    return Trainer(
        rank,
        scaling_config=ScalingConfig(
            num_workers=num_workers if least is None else (least, num_workers),
            use_gpu="GPU" in resources,
            resources_per_worker=dict(resources),
        ),
        run_config=RunConfig(
            name=getattr(config, "run_name", None),
            storage_path=_url_for_arrow(config.ray_storage_path or scratch),
            failure_config=FailureConfig(max_failures=config.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=getattr(config, "keep", None)),
            callbacks=[_carry_variables()],
        ),
        torch_config=TorchConfig(
            backend="nccl" if "GPU" in resources else "gloo", timeout_s=int(config.dist_timeout)
        ),
    )


def _carry_variables() -> Any:
    """Sets the variables of this process in that of Ray Train's controller, which has the store."""
    from ray.train import UserCallback

    class Variables(UserCallback):
        def __setstate__(self, state: Mapping[str, str]) -> None:
            os.environ.update(state)

    callback = Variables()
    vars(callback).update(ray_cluster.carried_variables())
    return callback


def _check_storage(config: EngineConfig | FeedSettings) -> None:
    """Refuse a place for copies of checkpoints that Ray Train could not write.

    It would find that in another process, and end the run for a cause of its own.
    """
    if config.ray_storage_path is None:
        return
    ray_cluster.import_ray()
    from ray.train import RunConfig

    place = RunConfig(
        name=getattr(config, "run_name", None),
        storage_path=_url_for_arrow(config.ray_storage_path),
    )
    with refused_unless_written(
        config.ray_storage_path, what="the storage of checkpoints", flag="--ray_storage_path"
    ):
        try:
            place.storage_context  # noqa: B018  writes a file
        except (ValueError, RuntimeError, ImportError) as error:  # of Arrow
            raise OSError(first_line(error)) from None


def _url_for_arrow(storage: str) -> str:
    """An absolute folder or a URL, with the endpoint of `S3_ENDPOINT_URL` for S3."""
    if "://" not in storage:
        return os.path.abspath(os.path.expanduser(storage))
    endpoint = os.environ.get("S3_ENDPOINT_URL")
    if endpoint is None or not storage.startswith("s3://"):
        return storage
    scheme, _, host = endpoint.rstrip("/").partition("://")
    query = urllib.parse.urlencode({"scheme": scheme, "endpoint_override": host})
    return f"{storage}{'&' if '?' in storage else '?'}{query}"


def _describe_loss(error: Exception, causes: Mapping[int, BaseException]) -> str:
    lost = {rank: cause for rank, cause in causes.items() if not isinstance(cause, RankFailedError)}
    if not lost:
        return f"the Ray cluster has ended or no longer answers ({first_line(error)})"
    ranks = ", ".join(f"rank {rank}" for rank in sorted(lost))
    why = first_line(lost[min(lost)])
    return f"{ranks} was lost, and no restart is left (--max_failures): {why}"
