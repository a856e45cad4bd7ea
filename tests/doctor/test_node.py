"""The checks of one node: each sees its own fault, and only that."""

from __future__ import annotations

import functools
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sdbench.doctor import gpus
from tests.data import datasets


def install(folder, package: str, version: str | None) -> None:
    """A package's metadata, earlier on the path than the real one's."""
    info = folder / f"{package}-{version or 0}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {package}"]
    if version is not None:
        lines.append(f"Version: {version}")
    (info / "METADATA").write_text("\n".join(lines) + "\n")


OLD = {"torch": "2.7.0", "torchvision": "0.22.0", "transformers": "4.57.6", "diffusers": "0.39.0"}
OLD |= {"numpy": "2.1.3", "pillow": "11.3.0"}
# numpy is pinned for each Python, and the one of these tests has its own.
NEW = {"torch": "2.11.0", "torchvision": "0.26.0", "transformers": "5.24.0", "diffusers": "0.42.1"}


@pytest.mark.parametrize(
    ("versions", "level"),
    [
        (OLD, "ok"),
        (OLD | {"torch": "2.7.0+cu126"}, "ok"),
        (OLD | {"diffusers": None}, "error"),
        (NEW, "ok"),
        (OLD | {"transformers": "5.24.0"}, "warning"),
        (NEW | {"torch": "2.14.1"}, "warning"),
    ],
)
def test_versions_are_those_of_one_set_of_packages(look, monkeypatch, tmp_path, versions, level):
    for package, version in versions.items():
        install(tmp_path / "site", package, version)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert look()["software"]["level"] == level


# --- GPUs ----------------------------------------------------------------------------------------


def test_without_gpus_their_checks_are_skipped_and_a_driver_is_an_error(
    look, set_gpus, monkeypatch, tmp_path
):
    set_gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    findings = look()
    for name in ("driver", "GPUs", "GPU health", "NVLink", "network cards"):
        assert findings[name]["level"] == "skipped"
    kernel = tmp_path / "version"
    kernel.write_text("570.133.20\n")
    monkeypatch.setattr(gpus, "KERNEL_DRIVER", kernel)
    finding = look()["driver"]
    assert finding["level"] == "error"
    assert "570.133.20" in finding["found"]


def test_idle_gpus_are_fine_and_torch_has_to_see_them(look, set_gpus):
    set_gpus({}, {})
    findings = look()
    assert findings["GPUs"]["found"] == "2 x NVIDIA H100 80GB HBM3"
    for name in ("GPUs", "GPU health", "NVLink"):
        assert findings[name]["level"] == "ok"
    assert findings["driver"]["level"] == "error"  # torch is built for the CPU, or finds none


@pytest.mark.parametrize(
    ("name", "fault", "level"),
    [
        ("GPUs", {"used_gib": 60.2, "ComputeRunningProcesses": [7]}, "error"),
        # From inside a container memory is seen, and no process.
        ("GPUs", {"used_gib": 60.2}, "error"),
        ("GPUs", {"used_gib": 0.4, "ComputeRunningProcesses": [7, 8]}, "warning"),
        ("GPUs", {"used_gib": 1.5}, "warning"),
        ("GPU health", {"TotalEccErrors": 3}, "error"),
        ("GPU health", {"CurrentClocksThrottleReasons": 0x40}, "warning"),
        # At its power cap, as under load.
        ("GPU health", {"CurrentClocksThrottleReasons": 0x04}, "ok"),
        ("GPU health", {"MigMode": [1, 1]}, "warning"),
        ("GPU health", {"PersistenceMode": 0}, "warning"),
        ("NVLink", {"num_links": 16}, "error"),
    ],
)
def test_a_faulty_gpu_is_named(look, set_gpus, name, fault, level):
    set_gpus({}, fault)
    findings = look()
    assert findings[name]["level"] == level
    assert ("GPU 1" in findings[name]["found"]) == (level != "ok")
    others = {"GPUs", "GPU health", "NVLink"} - {name}
    assert {findings[other]["level"] for other in others} == {"ok"}


def test_only_gpus_that_the_job_may_use_are_checked_and_may_lack_nvlink(
    look, set_gpus, monkeypatch
):
    set_gpus({"num_links": None}, {"used_gib": 60.2}, {"Name": "NVIDIA H200", "num_links": None})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-2")
    findings = look()
    assert findings["GPUs"]["level"] == findings["NVLink"]["level"] == "ok"
    assert findings["GPUs"]["found"] == "1 x NVIDIA H100 80GB HBM3, 1 x NVIDIA H200"


@pytest.mark.parametrize(
    ("name", "value", "num_gpus"),
    [("SLURM_GPUS_ON_NODE", "8", 7), ("CUDA_VISIBLE_DEVICES", "0,1,2,3", 3)],
)
def test_a_lost_gpu_is_an_error(look, set_gpus, monkeypatch, name, value, num_gpus):
    set_gpus(*[{}] * num_gpus)
    monkeypatch.setenv(name, value)
    assert look()["GPUs"]["level"] == "error"


# --- The model and the data ---------------------------------------------------------------------


def test_what_a_check_raises_is_an_error_of_its_own(look, monkeypatch):
    monkeypatch.setattr("sdbench.doctor.machine.private_folder", lambda: 1 / 0)
    finding = look()["disk"]
    assert (finding["level"], finding["found"]) == ("error", "ZeroDivisionError: division by zero")


@pytest.mark.slow
def test_a_hub_out_of_reach_is_an_error_unless_weights_may_be_random(look, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = ("--model_name", "stabilityai/stable-diffusion-2-base")
    findings = look(*model)
    assert findings["model"]["level"] == findings["plan"]["level"] == "error"
    assert findings["model"]["advice"].endswith("set --model_name")
    findings = look(*model, "--random_weights")
    assert findings["model"]["level"] == "ok"
    assert "865,910,724 of 1,289,952,427" in findings["model"]["found"]


@pytest.mark.parametrize("kind", ["mds", "webdataset", "parquet", "folder"])
def test_the_first_sample_is_read_and_decoded(look, tmp_path, kind):
    folder = tmp_path / "data"
    datasets.WRITERS[kind](folder)
    finding = look("--remote", str(folder))["data"]
    assert finding["level"] == "ok", finding
    num_samples = 5 if kind == "webdataset" else datasets.NUM_SAMPLES
    assert finding["found"].startswith(f"{kind}: read the first of {num_samples} samples ")


def test_latents_of_another_model_are_an_error(look, tmp_path):
    datasets.write_mds_latents(tmp_path / "latents")
    assert look("--remote", str(tmp_path / "latents"))["data"]["level"] == "error"


@pytest.mark.slow
def test_each_of_several_streams_is_read_and_a_missing_first_shard_is_an_error(look, tmp_path):
    for name in ("first", "second"):
        datasets.write_mds(tmp_path / name)
    flags = ("--streams", f"{tmp_path}/first=0.5,{tmp_path}/second=0.5")
    assert look(*flags)["data"]["level"] == "ok"
    (tmp_path / "second" / "shard.00000.mds").unlink()
    for place in (flags, ("--remote", f"{tmp_path}/second")):
        finding = look(*place)["data"]
        assert finding["level"] == "error"
        assert "shard.00000.mds" in finding["found"]


def test_of_many_tars_behind_a_url_only_the_first_is_copied(look, tmp_path):
    datasets.write_tars(tmp_path / "tars")
    asked = []

    class Files(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

    handler = functools.partial(Files, directory=str(tmp_path / "tars"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}/{{00000..00002}}.tar"
        level = look("--remote", place, "--data_format", "webdataset")["data"]["level"]
        server.shutdown()
    assert level == "ok"
    assert set(asked) == {"/00000.tar"}
