"""Prints a sweep for a GPU as one for a CPU: the same cells with tiny models and few steps.

Cells that need a GPU are left out and named in a comment. The preset's `compile` and `attention`
are those of a GPU, so that the code paths are the same. `make rehearse-gpu` makes the runs:

    python tools/gpu_stand_in.py sweeps/benchmark_gpu_1.yaml > stand-in.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

# The replacement of each value that a cell may have.
STAND_INS: dict[str, dict[Any, Any]] = {
    "model_name": {
        "sdxl": "tiny-sdxl",
        "sd3-medium": "tiny-sd3",
        "flux-schnell": "tiny-flux",
        "flux-schnell-5+10-blocks": "tiny-flux",
    },
    "image_size": {1024: 128, 512: 128, 256: 64},
    "batch_size": {128: 8, 32: 4, 8: 4, 4: 4},
    "device_train_microbatch_size": {32: 2, 64: 4, 16: 1, 8: 2, 4: 4, 2: 1},
    "encoder_batch_size": {128: 8},
    "warmup_batches": {3: 1, 20: 2},
    "max_warmup_batches": {3: 1, 20: 2},
    "measure_batches": {10: 2, 100: 3},
}
FOR_GPUS_ONLY = ("cuda_graph",)
# Compiling the miniature takes minutes on two cores.
TIMEOUT_S = 1800


def stand_in(sweep: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Make a sweep for a CPU from one for a GPU; return it and the cells that it leaves out."""
    left_out = [cell for cell in sweep["list"] if any(name in cell for name in FOR_GPUS_ONLY)]
    cells = [_smaller(cell) for cell in sweep["list"] if cell not in left_out]
    for cell in cells:
        if cell.get("preset") != "seed":
            cell["compile"] = "unet" if cell.get("latents") == "precomputed" else "all"
            cell.setdefault("attention", "sdpa")
    base = {"model_name": "nano", "num_workers": 0, **_smaller(sweep["base"])}
    return {"launcher": sweep["launcher"], "timeout_s": TIMEOUT_S, "base": base, "list": cells}, (
        left_out
    )


def _smaller(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        name: STAND_INS[name][value] if name in STAND_INS else value
        for name, value in settings.items()
    }


if __name__ == "__main__":
    content, without = stand_in(yaml.safe_load(Path(sys.argv[1]).read_text()))
    print(f"# Stands for {sys.argv[1]}. Left out, since they take a GPU: {without}")
    print(yaml.safe_dump(content, sort_keys=False), end="")
