"""Versions, GPUs and threads: each line sees its own fault."""

from __future__ import annotations

import pytest

from sdbench.doctor import gpus


def install(folder, package: str, version: str | None) -> None:
    """A package's metadata, earlier on the path than the real one's."""
    info = folder / f"{package}-{version or 0}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {package}"]
    if version is not None:
        lines.append(f"Version: {version}")
    (info / "METADATA").write_text("\n".join(lines) + "\n")


def test_pinned_versions_are_fine(look):
    software = look()["software"]
    assert software["level"] == "ok"
    assert "torch 2.7.0" in software["found"]
    assert "diffusers 0.39.0" in software["found"]


def test_another_version_is_a_warning(look, monkeypatch, tmp_path):
    install(tmp_path / "site", "diffusers", "0.1.0")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    software = look()["software"]
    assert software["level"] == "warning"
    assert software["found"].startswith("diffusers 0.1.0 where 0.39.0 is pinned; python 3.")
    assert "pip install -r requirements.txt" in software["advice"]


@pytest.mark.parametrize(("package", "level"), [("diffusers", "error"), ("webdataset", "warning")])
def test_a_missing_package_is_an_error_if_every_run_needs_it(
    look, monkeypatch, tmp_path, package, level
):
    install(tmp_path / "site", package, None)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    software = look()["software"]
    assert software["level"] == level
    assert software["found"].startswith(f"not installed: {package}; ")


def test_without_gpus_their_lines_are_skipped(look, set_gpus):
    set_gpus()
    findings = look()
    for name in ("driver", "GPUs", "NVLink", "NCCL network"):
        assert findings[name]["level"] == "skipped"


def test_free_gpus_are_fine(look, set_gpus):
    set_gpus({}, {})
    findings = look()
    assert findings["GPUs"]["level"] == "ok"
    assert findings["GPUs"]["found"] == "2 x NVIDIA H100 80GB HBM3, all free"
    assert findings["NVLink"]["level"] == "ok"
    assert findings["NVLink"]["found"] == "18 connections active on each GPU"


@pytest.mark.parametrize(
    ("gpu", "level", "found"),
    [
        (
            {"used_gib": 60.2, "num_processes": 1},
            "error",
            "GPU 1 has 60.2 of 79.6 GiB taken by 1 other process; 2 x NVIDIA H100 80GB HBM3",
        ),
        # From inside a container memory is seen, and no process.
        (
            {"used_gib": 60.2},
            "error",
            "GPU 1 has 60.2 of 79.6 GiB taken; 2 x NVIDIA H100 80GB HBM3",
        ),
        (
            {"used_gib": 0.4, "num_processes": 2},
            "warning",
            "GPU 1 has 0.4 of 79.6 GiB taken by 2 other processes; 2 x NVIDIA H100 80GB HBM3",
        ),
        (
            {"used_gib": 1.5},
            "warning",
            "GPU 1 has 1.5 of 79.6 GiB taken; 2 x NVIDIA H100 80GB HBM3",
        ),
    ],
)
def test_a_busy_gpu_is_named(look, set_gpus, gpu, level, found):
    set_gpus({}, gpu)
    finding = look()["GPUs"]
    assert (finding["level"], finding["found"]) == (level, found)
    assert "other processes" in finding["advice"]


def test_only_gpus_that_the_job_may_use_are_looked_at(look, set_gpus, monkeypatch):
    set_gpus({}, {"used_gib": 60.2}, {"name": "NVIDIA H200"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-2")
    assert look()["GPUs"]["found"] == "1 x NVIDIA H100 80GB HBM3, 1 x NVIDIA H200, all free"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    finding = look()["GPUs"]
    assert finding["level"] == "error"
    assert finding["found"] == "CUDA_VISIBLE_DEVICES=7 leaves none of the 3 GPUs"


def test_gpus_that_were_promised_and_are_all_lost_are_an_error(look, set_gpus, monkeypatch):
    set_gpus()
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    finding = look()["GPUs"]
    assert finding["level"] == "error"
    assert finding["found"] == "SLURM_GPUS_ON_NODE=8 gives the job 8 GPUs, and 0 can be seen"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert look()["GPUs"]["level"] == "skipped"


@pytest.mark.parametrize(
    ("name", "value"),
    [("SLURM_GPUS_ON_NODE", "8"), ("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")],
)
def test_a_lost_gpu_is_an_error(look, set_gpus, monkeypatch, name, value):
    set_gpus(*[{}] * 7)
    monkeypatch.setenv(name, value)
    finding = look()["GPUs"]
    assert finding["level"] == "error"
    assert finding["found"].startswith(f"{name}={value} gives the job 8 GPUs, and 7 can be seen; ")


def test_a_lost_link_is_an_error(look, set_gpus):
    set_gpus({}, {"num_links": 16}, {}, {"num_links": 0})
    finding = look()["NVLink"]
    assert finding["level"] == "error"
    assert finding["found"] == "fewer NVLink connections than the 18 of the others: GPU 1, 3"


def test_gpus_without_nvlink_are_told_so(look, set_gpus):
    set_gpus(*[{"name": "NVIDIA L40S", "num_links": None, "fabric_state": 0}] * 2)
    finding = look()["NVLink"]
    assert finding["level"] == "ok"
    assert finding["found"] == "none: the GPUs exchange gradients over PCIe"


def test_a_fabric_manager_that_does_not_run_is_an_error(look, set_gpus):
    set_gpus({}, {"fabric_state": 2})
    finding = look()["NVLink"]
    assert finding["level"] == "error"
    assert finding["found"] == "the NVSwitch fabric is in progress on GPU 1"
    assert "nvidia-fabricmanager" in finding["advice"]


def test_gpus_that_torch_cannot_use_are_an_error(look, set_gpus, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    set_gpus({})
    finding = look()["driver"]
    assert finding["level"] == "error"
    assert finding["found"] == (
        "torch cannot use the GPUs: NVIDIA driver 570.133.20 for CUDA up to 12.8, "
        f"torch {torch.__version__} built for 12.6"
    )
    assert "Xid" in finding["advice"]
    monkeypatch.setenv("FAKE_CUDA", "11080")
    assert "newer driver" in look()["driver"]["advice"]
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "build of torch for CUDA" in look()["driver"]["advice"]


def test_gpus_that_torch_can_use_are_fine(look, set_gpus, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    set_gpus({})
    assert look()["driver"]["level"] == "ok"


def test_a_container_without_the_gpus_of_its_host_is_an_error(
    look, set_gpus, monkeypatch, tmp_path
):
    (tmp_path / "version").write_text("570.133.20\n")
    monkeypatch.setattr(gpus, "KERNEL_DRIVER", tmp_path / "version")
    set_gpus()
    finding = look()["driver"]
    assert finding["level"] == "error"
    assert finding["found"] == (
        "the kernel has NVIDIA's driver 570.133.20, and no GPU can be asked about from here"
    )
    assert "--gpus all" in finding["advice"]


def test_too_many_threads_are_a_warning(look, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "999")
    finding = look()["threads"]
    assert finding["level"] == "warning"
    assert finding["found"].startswith("999 threads of 1 rank on ")
    assert finding["advice"].startswith("unset OMP_NUM_THREADS, or set it to ")


def test_too_many_loaders_are_a_warning(look):
    finding = look("--num_workers", "999")["threads"]
    assert finding["level"] == "warning"
    assert finding["found"].startswith("999 loader processes on ")
