"""Copies of checkpoints in a store, which may be slower than the saves."""

from __future__ import annotations

import types

from sdbench.ranks.distributed import ALONE
from sdbench.state.ray_storage import RayStorage
from tests.state.states import make_checkpoints, names, save


def test_a_checkpoint_stays_until_a_slow_store_has_it(tmp_path, monkeypatch):
    uploads = []
    context = types.SimpleNamespace(
        get_storage=lambda: types.SimpleNamespace(
            persist_current_checkpoint=lambda checkpoint, name: checkpoint
        )
    )
    monkeypatch.setattr("ray.train.get_context", lambda: context)
    monkeypatch.setattr("ray.train.report", lambda metrics, **report: uploads.append(report))
    checkpoints = make_checkpoints(tmp_path, keep=1)
    storage = RayStorage(checkpoints, ranks=ALONE)
    save(checkpoints, 10)
    storage.keep(10)
    save(checkpoints, 20)
    save(checkpoints, 30)
    assert names(tmp_path) == ["step_00000010", "step_00000030"]
    (upload,) = uploads
    upload["checkpoint_upload_fn"](upload["checkpoint"], upload["checkpoint_dir_name"])
    save(checkpoints, 40)
    assert names(tmp_path) == ["step_00000040"]
