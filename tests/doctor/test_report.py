"""What a person and a script get to read, and the exit code."""

from __future__ import annotations

import json
import re

from sdbench.cli import main
from sdbench.doctor.finding import ERROR, OK, WARNING, Finding
from sdbench.doctor.printout import hide_hosts, make_report, merge, to_json, to_text
from tests.doctor.conftest import PATIENT
from tests.refusals import refusal_of

NAMES = [
    *("ranks", "driver", "GPUs", "GPU health", "NVLink", "network cards"),
    *("software", "model", "plan", "processes", "shared memory", "disk", "data"),
    *("nodes alike", "all-reduce"),
]


def test_a_terminal_gets_lines_of_its_width(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "72")
    main(["doctor", *PATIENT, "--model_name", "tiny", "--results_dir", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 72
    begins = [line[11:24].strip() for line in lines if re.match(r"  (ok|skipped|warn|error)", line)]
    assert begins == NAMES


def test_strict_lets_warnings_count(capsys, tmp_path):
    flags = ["doctor", "--model_name", "tiny", "--results_dir", str(tmp_path), "--json"]
    flags += ["--num_workers", "999", *PATIENT]
    for strict, status in (((), "ok"), (("--strict",), "error")):
        assert main([*flags, *strict]) == (status == "error")
        report = json.loads(capsys.readouterr().out)
        assert report["status"] == status
        (processes,) = (one for one in report["findings"] if one["name"] == "processes")
        assert processes["level"] == "warning"


def test_wrong_input_is_refused():
    assert refusal_of("doctor", "--timeout", 3).flag == "--timeout_s"
    assert refusal_of("doctor", "--data_format", "mds").flag == "--remote or --local"


HOSTS = ["gpu-1.cluster", "gpu-2.cluster", "gpu-3.cluster"]


def report_of(*nodes):
    return make_report(merge(nodes), model_name="tiny", hosts=HOSTS, num_ranks=3, strict=False)


def test_what_nodes_have_in_common_is_one_line():
    same = {"disk": Finding(OK, "free"), "driver": Finding(OK, "570")}
    report = report_of(same, {**same, "disk": Finding(ERROR, "full", "rm")}, same)
    assert to_text(report, hosts=HOSTS, width=60).splitlines() == [
        "tiny: ranks 3, nodes 3",
        "node 0 is gpu-1.cluster, node 1 is gpu-2.cluster, node 2 is",
        "gpu-3.cluster",
        "",
        "  ok       disk    node 0, 2: free",
        "  error    disk    node 1: full",
        "                   -> rm",
        "  ok       driver  570",
        "",
        "error 1, warning 0, ok 2, skipped 0",
    ]


def test_a_script_reads_no_host_name():
    clocks = Finding(WARNING, "gpu-2 is ahead of gpu-3.cluster:29500", "set gpu-2")
    document = json.loads(to_json(report_of({"clocks": clocks}), hosts=HOSTS))
    assert document["findings"] == [
        {
            "name": "clocks",
            "nodes": [0],
            "level": "warning",
            "found": "node 1 is ahead of node 2:29500",
            "advice": "set node 1",
        }
    ]
    assert hide_hosts("n1 in gen1, n10 and n1.x", ["n1.x"]) == "node 0 in gen1, n10 and node 0"


def test_no_secret_of_the_environment_is_printed(look, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_API_KEY", "very-secret-indeed")
    findings = look("--remote", str(tmp_path / "very-secret-indeed"))
    assert "very-secret-indeed" not in json.dumps(findings)
    assert "<MY_API_KEY>" in findings["data"]["found"]
