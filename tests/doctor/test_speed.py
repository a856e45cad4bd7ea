"""`doctor --speed`: what is measured, and what verdict follows from it.

GPUs are NVML's fakes and rates are given: of CUDA only the calls are seen here.
"""

from __future__ import annotations

import contextlib
import json
import os
from types import SimpleNamespace

import pytest
import torch

from sdbench.cli import main
from sdbench.doctor import doctor, speed
from sdbench.doctor.finding import Job, join
from sdbench.doctor.gpus import check_driver
from sdbench.doctor.machine import check_software
from sdbench.measure import ceilings, hardware
from sdbench.measure.ceilings import Ceiling
from sdbench.ranks.distributed import Ranks
from tests.doctor.conftest import PATIENT
from tests.machines import make_cpu_machine, make_machine

FLAGS = ("doctor", "--speed", "--model_name", "tiny", *PATIENT)
LINKS = {"from_host_gb_per_s": 55.0, "to_host_gb_per_s": 56.0, "to_peers_gb_per_s": 360.0}


@pytest.fixture(autouse=True)
def published(monkeypatch):
    """Three products of an H200 in bf16, and others that are not to be mistaken for such."""
    rows = [
        ("measured", "NVIDIA H200", 16, "amp_bf16", 660.0),
        ("measured", "NVIDIA H200", 16, "amp_bf16", 680.0),
        ("measured", "NVIDIA H200", 16, "bf16", 670.0),
        ("measured", "NVIDIA H200", 16, "amp_fp16", 1.0),
        ("published", "NVIDIA H200", 16, "bf16", 2.0),
        ("measured", "NVIDIA H100 80GB HBM3", 16, "bf16", 3.0),
        ("measured", "CPU", 2, "fp32", 0.4),
        ("measured", "CPU", 4, "fp32", 0.8),
    ]
    monkeypatch.setattr(speed.Neighbours, "describe", lambda self, own: None)
    names = ("kind", "device", "num_cpu_cores", "precision", "matmul_tflops")
    rows = [dict(zip(names, row, strict=True)) for row in rows]
    monkeypatch.setattr(speed, "read_figures", lambda path, required: rows)


@pytest.fixture
def measure(monkeypatch, set_gpus):
    """A function that lets each GPU have rates: those of an H200, unless changed; no GPU: cores."""
    current = [0]

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    def put(*gpus, **of_machine):
        h200 = {"bf16": 670.0, "memory_gb_per_s": 4000.0, **LINKS}
        cores = {"fp32": 0.36, "bf16": 1.25, "memory_gb_per_s": 40.0}
        rates = [h200 | gpu for gpu in gpus] or [cores]

        def rate_of(name, **_):
            rate = rates[current[-1]][name]
            if rate is None:
                raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
            return rate

        def copy(source, target):
            assert f"cuda:{current[-1]}" in (source, target)
            return rate_of(
                f"{'from' if source == 'cpu' else 'to'}_"
                f"{'host' if 'cpu' in (source, target) else 'peers'}_gb_per_s"
            )

        set_gpus(*({"Name": "NVIDIA H200"} for _ in gpus))
        # Other checks would ask torch for the GPUs that it believes to have.
        monkeypatch.setattr(doctor, "CHECKS", [check_driver, check_software])
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
        # torch counts them from the other end.
        uuids = [SimpleNamespace(uuid=str(index)) for index in reversed(range(len(gpus)))]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: uuids[index])
        monkeypatch.setattr(torch.cuda, "device", device)
        h200s = make_machine(device_name="NVIDIA H200")
        machine = h200s if gpus else make_cpu_machine(**of_machine)
        monkeypatch.setattr(hardware, "inspect_machine", lambda local_rank=0: machine)
        monkeypatch.setattr(ceilings, "measure_matmul_tflops", rate_of)
        monkeypatch.setattr(ceilings, "measure_copy", copy)
        monkeypatch.setattr(
            ceilings, "measure_bandwidth", lambda **_: Ceiling("copy", rate_of("memory_gb_per_s"))
        )

    return put


def job_of(num_ranks=1):
    ranks = Ranks(rank=0, world_size=num_ranks, local_rank=0, local_world_size=num_ranks)
    return Job(ranks=ranks, request=None, timeout_s=60.0, link_gbps=None)


def look(job):
    """The report's line about speed, and the figures of this node by device and name."""
    node = speed.measure_node(job)
    report = speed.report_speed([node], job)
    figures = {(one["device"], one["figure"]): one for one in report["figures"]}
    return join(speed.look(report, [node]), advice=speed.ADVICE), figures


@pytest.mark.parametrize("instructions", [("avx512f",), ("avx512f", "avx512_bf16")])
def test_cores_get_figures_beside_the_same_cores_and_no_verdict(
    measure, capsys, tmp_path, monkeypatch, instructions
):
    measure(cpu_flags=instructions)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    assert main([*FLAGS, "--json", "--results_dir", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["level"] for one in report["findings"] if one["name"] == "speed"] == ["skipped"]
    reached = {one["figure"]: one["reached"] for one in report["speed"]["figures"]}
    in_bf16 = {"bf16_product_tflops": 1.25} if "avx512_bf16" in instructions else {}
    assert reached == {"fp32_product_tflops": 0.36, **in_bf16, "memory_gb_per_s": 40.0}
    assert {one["verdict"] for one in report["speed"]["figures"]} == {None}
    assert report["speed"]["figures"][0]["elsewhere"] == 0.4


# torch's GPU 1 of 3 is NVML's GPU 1. The median of 670, 670, 602 is 670, that of others 670.
@pytest.mark.parametrize(
    ("name", "low", "high", "data_sheet", "elsewhere"),
    [
        ("bf16_product_tflops", 636.0, 637.0, 989, 670.0),  # 95 % of the node's 670
        ("memory_gb_per_s", 3799.0, 3801.0, 4800, None),
        ("from_host_gb_per_s", 52.0, 52.5, None, 48),
    ],
)
def test_a_gpu_slower_than_the_others_of_its_node_is_named(
    measure, name, low, high, data_sheet, elsewhere
):
    for rate, verdict in ((low, "slow"), (high, "ok")):
        measure({}, {name.removesuffix("_product_tflops"): rate}, {})
        line, figures = look(job_of())
        assert line.level == ("error" if verdict == "slow" else "ok")
        assert (f"GPU 1: {name} slow" in line.found) == (verdict == "slow")
        one = figures["GPU 1", name]
        known = (one["reached"], one["data_sheet"], one["elsewhere"], one["verdict"])
        assert known == (rate, data_sheet, elsewhere, verdict)
        others = {other["verdict"] for key, other in figures.items() if key != ("GPU 1", name)}
        assert others == {"ok"}


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("bf16", 602.0, 604.0),  # 90 % of 670, the median in results/
        ("to_host_gb_per_s", 43.1, 43.3),  # 90 % of 48, from which on Azure accepts a node
        ("to_peers_gb_per_s", 301.0, 302.0),  # of 335
    ],
)
def test_gpus_alike_and_slower_than_elsewhere_are_slow(measure, name, low, high):
    for rate, num_slow in ((low, 2), (high, 0)):
        measure({name: rate}, {name: rate})
        line, figures = look(job_of())
        assert line.level == ("error" if num_slow else "ok")
        assert [one["verdict"] for one in figures.values()].count("slow") == num_slow


def test_what_cannot_be_measured_fails_and_the_rest_is_measured(measure):
    measure({"memory_gb_per_s": None}, {})
    line, figures = look(job_of())
    assert line.level == "error"
    assert "memory_gb_per_s failed, OutOfMemoryError: CUDA out of memory." in line.found
    assert len(figures) == 2 * 5
    assert [one["verdict"] for one in figures.values()].count("failed") == 1


def test_cores_that_others_use_are_told(measure, monkeypatch):
    measure()
    monkeypatch.setattr(speed.Neighbours, "describe", lambda self, own: f"busy beside {own}")
    line, _ = look(job_of())
    assert line.level == "warning"
    assert line.found.startswith(f"node 0: busy beside [{os.getpid()}];")


def test_a_gpu_that_the_launcher_hides_is_missed(measure):
    measure({})
    line, _ = look(job_of(8))
    assert line.level == "error"
    assert "node 0: the first rank sees 1 of 8 GPUs" in line.found


@pytest.mark.parametrize(
    ("num_ranks", "num_trainable", "gb_per_s", "verdict"),
    [
        (8, 865_910_724, 387.0, "slow"),  # 90 % of 431
        (8, 865_910_724, 388.0, "ok"),
        (4, 865_910_724, 387.0, None),  # no figure is known of four GPUs
        (8, 933_508, 387.0, None),  # 4 MB are over too soon
    ],
)
def test_an_all_reduce_is_judged_where_others_did_the_same(
    num_ranks, num_trainable, gb_per_s, verdict
):
    job = job_of(num_ranks)
    job.num_trainable, job.bus_gb_per_s = num_trainable, gb_per_s
    device = {"device": "GPU 0", "name": "NVIDIA H200"}
    node = {"devices": [device], "figures": []}
    [figure] = speed.report_speed([node], job)["figures"]
    assert (figure["device"], figure["figure"]) == (f"{num_ranks} ranks", "all_reduce_gb_per_s")
    assert (figure["reached"], figure["verdict"]) == (gb_per_s, verdict)


def test_the_text_to_sign_has_date_host_serials_versions_and_verdicts(
    measure, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-17")
    monkeypatch.setattr(speed, "utc_now", lambda: "2026-11-28T20:00:00+00:00")
    measure({}, {"bf16": 500.0})
    assert main([*FLAGS, "--results_dir", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    for words in (
        "measured       2026-11-28T20:00:00+00:00",
        "node 0         gpu-17",
        "node 0, GPU 1  NVIDIA H200, UUID GPU-1, serial number 1650922000007",
        f"torch {torch.__version__.partition('+')[0]}",
    ):
        assert words in text
    # The GPUs of a figure are together; torch's first is NVML's second.
    rows = [line.split() for line in text.splitlines() if "bf16_product_tflops" in line]
    assert [" ".join(row) for row in rows if row[0] == "0"] == [
        "0 GPU 1 bf16_product_tflops 670 68% of 989 100% of 670 115% of 585 ok",
        "0 GPU 0 bf16_product_tflops 500 51% of 989 75% of 670 85% of 585 slow",
    ]
