"""Two runs on one folder."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time

import pytest

from sdbench.state.lock import lock
from tests.refusals import refused


def hold(folder, pipe, worker_lives_s):
    with lock(folder):
        worker = os.fork()
        if worker == 0:  # as a loader has workers, that outlive a kill for a while
            time.sleep(worker_lives_s)
            os._exit(0)
        pipe.send(worker)
        signal.pause()


@pytest.fixture
def holder(tmp_path):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path, there, 60))
    process.start()
    worker = here.recv()
    yield process
    process.kill()
    process.join()
    os.kill(worker, signal.SIGKILL)


def test_a_second_run_is_told_of_the_first(tmp_path, holder):
    told = f"process {holder.pid} on {socket.gethostname()}"
    with refused("--resume", value=str(tmp_path)) as caught, lock(tmp_path):
        pass
    assert told in caught.value.allowed


def test_the_lock_is_gone_with_its_process(tmp_path, holder):
    holder.kill()
    holder.join()
    with lock(tmp_path):
        pass
    with lock(tmp_path):
        pass
