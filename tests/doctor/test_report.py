"""What a user and a script get to read, and the exit code."""

from __future__ import annotations

import json
import re

import pytest

from sdbench.cli import main
from sdbench.doctor.finding import error, ok, warning
from sdbench.doctor.printout import Report, hide_hosts, merge, shorten, to_json, to_text

NAMES = [
    *("ranks", "software", "driver", "GPUs", "NVLink", "network cards", "NCCL network", "model"),
    *("host memory", "threads", "limits", "shared memory", "stale memory", "disk", "data", "W&B"),
    *("nodes alike", "clocks", "all-reduce"),
]


def test_every_line_is_there_in_order(look):
    findings = look()
    assert list(findings) == NAMES
    assert findings["ranks"]["found"] == "a single one"
    num_trainable, num_parameters = count_tiny()
    assert findings["model"]["found"] == (
        f"tiny, {num_trainable:,} of {num_parameters:,} parameters trained, random weights"
    )


def count_tiny() -> tuple[int, int]:
    from sdbench.models.architecture import resolve_architecture
    from sdbench.models.parameters import count_parameters

    rows = count_parameters(resolve_architecture("tiny")[0])
    return sum(row.trainable for row in rows), sum(row.total for row in rows)


def test_a_terminal_gets_lines_of_its_width(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "72")
    main(["doctor", "--model_name", "tiny", "--results_dir", str(tmp_path)])
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert lines[0] == "tiny: 1 rank on 1 node"
    assert max(map(len, lines)) <= 72
    begins = [line[11:25].strip() for line in lines if re.match(r"  (ok|skipped|warn|error)", line)]
    assert begins == NAMES
    assert re.fullmatch(r"0 errors, \d+ warnings?, \d+ ok, \d+ skipped", lines[-1])


def test_strict_lets_warnings_count(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "999")
    flags = ["doctor", "--model_name", "tiny", "--results_dir", str(tmp_path), "--json"]
    assert main(flags) == 0
    assert main([*flags, "--strict"]) == 1
    first, second = capsys.readouterr().out.split("}\n{")
    assert '"status": "ok"' in first
    assert '"status": "error"' in second


@pytest.mark.parametrize(
    "flags", [["--timeout_s", "0"], ["--link_gbps", "fast"], ["--gradient_dtype", "int8"]]
)
def test_a_wrong_value_exits_with_2(capsys, flags):
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *flags])
    assert caught.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_flags_that_contradict_each_other_exit_with_2(capsys):
    assert main(["doctor", "--data_format", "mds"]) == 2
    assert "Data of the format mds needs a place" in capsys.readouterr().err


def make_report(*nodes):
    return Report("tiny", ["gpu-1.cluster", "gpu-2.cluster", "gpu-3.cluster"], 3, merge(nodes))


def test_what_nodes_have_in_common_is_one_line():
    same = {"disk": ok("free"), "driver": ok("570")}
    report = make_report(same, {**same, "disk": error("full", "rm")}, same)
    assert [(line.name, line.nodes, line.finding.level) for line in report.lines] == [
        ("disk", (0, 2), "ok"),
        ("disk", (1,), "error"),
        ("driver", (0, 1, 2), "ok"),
    ]
    assert to_text(report, width=60) == (
        "tiny: 3 ranks on 3 nodes\n"
        "\n"
        "node 0 is gpu-1.cluster, node 1 is gpu-2.cluster, node 2 is\n"
        "gpu-3.cluster\n"
        "\n"
        "  ok       disk    node 0, 2: free\n"
        "  error    disk    node 1: full\n"
        "                   -> rm\n"
        "  ok       driver  570\n"
        "\n"
        "1 error, 0 warnings, 2 ok, 0 skipped"
    )


def test_a_script_reads_no_host_name():
    report = make_report({"clocks": warning("gpu-2 is ahead of gpu-3.cluster:29500", "set gpu-2")})
    document = json.loads(to_json(report, strict=False))
    assert document["findings"] == [
        {
            "name": "clocks",
            "nodes": [0],
            "level": "warning",
            "found": "node 1 is ahead of node 2:29500",
            "advice": "set node 1",
        }
    ]
    assert "gpu-" not in json.dumps(document)


def test_a_host_name_is_hidden_only_as_a_whole_word():
    assert hide_hosts("n1 in gen1, n10 and n1.x", ["n1.x"]) == "node 0 in gen1, n10 and node 0"


def test_runs_of_nodes_are_shortened():
    assert shorten([0, 2, 3, 4, 7]) == "0, 2-4, 7"


def test_no_secret_of_the_environment_is_printed(look, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_API_KEY", "very-secret-indeed")
    findings = look("--remote", str(tmp_path / "very-secret-indeed"))
    assert "very-secret-indeed" not in json.dumps(findings)
    assert "<MY_API_KEY>" in findings["data"]["found"]
