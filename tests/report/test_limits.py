"""Floors of published profiles, and what a step takes above them."""

from __future__ import annotations

import json

from sdbench.analysis.report import LIMITS_PAGE
from sdbench.cli import main
from tests.report.results_folder import RESULTS, make_results, make_text

(ONLINE,) = RESULTS.glob("profiles/20261123T082754Z_*/profile.json")


def row(phase, operator, time_ms, gflop=0.0):
    return {"phase": phase, "operator": operator, "time_ms": time_ms, "gflop": gflop}


def test_the_parts_above_the_floor_add_up_to_it(tmp_path):
    operators = [
        row("backward", "aten::mm", 70.0, 9.0),
        row("unet_forward", "aten::convolution", 10.0, 1.0),
        row("backward", "aten::_to_copy", 6.0),
        row("optimizer", "aten::_foreach_copy_", 5.0),
        row("optimizer", "aten::_fused_adamw_", 8.0),
        row("backward", "sdbench::adamw_one_pass", 4.0),
        row("backward", "aten::silu_backward", 3.0),
        row("backward", "aten::view", None),
    ]
    step = {
        "ideal_floor_ms": 50.0,
        "needed_floor_ms": 60.0,
        "step_ms": 100.0,
        "images_per_second": 20.0,
        "profiled_step_ms": 110.0,
        "outside_operators_ms": 4.0,
    }
    results = make_results(tmp_path, quoted=False)
    make_text(results, LIMITS_PAGE)
    (results / "profiles" / "one").mkdir(parents=True)
    profile = json.loads(ONLINE.read_text())
    profile |= {"operators": operators, "step": profile["step"] | step}
    (results / "profiles" / "one" / "profile.json").write_text(json.dumps(profile))
    assert main(["report", "--folder", str(results)]) == 0
    lines = (results / "limits.md").read_text().splitlines()
    floors, rest = (line for line in lines if line.startswith("| 1 x AMD EPYC"))
    # 60 of 100 ms; of the 50 ms above: 80 - 50, 6, 5 + 8 + 4 - 10, 3 and 4.
    assert floors.endswith("| 50 | 60 | 100 | 20 | 60 |")
    assert rest.endswith("| 50 | 30 | 6 | 7 | 3 | 4 |")


NO_PROFILES = ["{", "[]", "{}", '{"kind": "profile"}', '{"kind": "profile", "step": "x"}']
NO_FIGURES = '{"kind": "profile", "step": {"needed_floor_ms": 1.0}}'


def test_what_is_no_profile_is_named_and_left_out(tmp_path, capsys):
    results = make_results(tmp_path, quoted=False)
    paths = []
    for number, content in enumerate([*NO_PROFILES, NO_FIGURES]):
        paths.append(results / "profiles" / f"{number}" / "profile.json")
        paths[-1].parent.mkdir(parents=True)
        paths[-1].write_text(content)
    assert main(["report", "--folder", str(results)]) == 1
    printed = capsys.readouterr().err
    assert [path for path in paths if str(path) not in printed] == []
