"""Can the model, the data and Weights & Biases be reached from this node?"""

from __future__ import annotations

import base64
import importlib
import json
import netrc
import os
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sdbench.base.errors import RunError
from sdbench.doctor.finding import Finding, error, number_of, ok, skipped, warning
from sdbench.doctor.gpus import count_gpus
from sdbench.doctor.job import Job, ModelFacts

if TYPE_CHECKING:
    from sdbench.data.source import SourceConfig
    from sdbench.models.architecture import Architecture

WANDB_URL = "https://api.wandb.ai"
BYTES_PER_MB = 1e6


def check_model(job: Job) -> Finding:
    """Whether the model can be had; what follows from it goes into the job."""
    from sdbench.models.architecture import resolve_architecture

    architecture, note = resolve_architecture(
        job.model_name, revision=job.model_revision, random_weights=job.random_weights
    )
    job.model = _derive_facts(architecture, job)
    size = (
        f"{architecture.name}, {job.model.num_trainable:,} of {job.model.num_parameters:,} "
        "parameters trained"
    )
    if architecture.weights_folder is None:
        return ok(f"{size}, random weights")
    num_files = _open_weights(architecture.weights_folder)
    found = f"{size}, weights in {number_of(num_files, 'file')} of {architecture.weights_folder}"
    return ok(found) if note is None else warning(f"{found}; {note}", "let the hub be reached")


def _derive_facts(architecture: Architecture, job: Job) -> ModelFacts:
    from sdbench.models.parameters import count_parameters
    from sdbench.plan.resolve import (
        CPU_MICROBATCH,
        GPU_BATCH_SIZE,
        GPU_NUM_WORKERS,
        default_image_size,
    )

    rows = count_parameters(architecture)
    on_gpu = count_gpus() > 0
    images_per_rank = GPU_BATCH_SIZE // job.num_ranks if on_gpu else CPU_MICROBATCH
    if job.batch_size is not None:
        images_per_rank = job.batch_size // job.num_ranks
    num_workers = GPU_NUM_WORKERS if on_gpu else 0
    return ModelFacts(
        num_parameters=sum(row.total for row in rows),
        num_trainable=sum(row.trainable for row in rows),
        image_size=job.image_size or default_image_size(architecture, on_gpu=on_gpu),
        text_embedding_dim=architecture.unet["cross_attention_dim"],
        images_per_rank=max(1, images_per_rank),
        num_workers=num_workers if job.num_workers is None else job.num_workers,
    )


def _open_weights(folder: Path) -> int:
    """Open each file of weights, which reads its list of tensors and finds truncated ones.

    Returns:
        The number of files.
    """
    from safetensors import safe_open

    from sdbench.models.architecture import WEIGHT_STEMS

    num_files = 0
    for part, stem in WEIGHT_STEMS.items():
        index = folder / part / f"{stem}.safetensors.index.json"
        names = {f"{stem}.safetensors"}
        if index.is_file():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        for name in names:
            with safe_open(folder / part / name, framework="pt"):
                num_files += 1
    return num_files


def check_data(job: Job) -> Finding:
    """Whether the first sample of the data can be read, as training reads it."""
    place = job.remote or job.local
    if place is None:
        return skipped("neither --remote nor --local: synthetic data")
    from sdbench.data.prepare.rows import open_rows
    from sdbench.data.prepare.verify import tell_kind
    from sdbench.data.remote import is_url

    # A cache of its own, because a copy of an earlier run would not show that the place answers.
    with tempfile.TemporaryDirectory(prefix="sdbench-doctor-") as cache:
        config = _describe_first_part(place, job, cache=cache if is_url(place) else None)
        _import_reader(config.data_format)
        started_s = time.perf_counter()
        rows = open_rows(tell_kind(config))
        rows.read(0)
        seconds = time.perf_counter() - started_s
        num_bytes = sum(file.stat().st_size for file in Path(cache).rglob("*") if file.is_file())
    found = f"the first of {len(rows)} samples of {config.remote} read in {seconds:.2f} s"
    if num_bytes:
        found += (
            f", {num_bytes / BYTES_PER_MB:.1f} MB copied at "
            f"{num_bytes / BYTES_PER_MB / seconds:.1f} MB/s"
        )
    return ok(found)


def _describe_first_part(place: str, job: Job, *, cache: str | None) -> SourceConfig:
    """The data, and of many tars or remote parquet files the first one alone."""
    from sdbench.data import detect_format
    from sdbench.data.prepare.rows import describe_source

    data_format = detect_format(place) if job.data_format == "auto" else job.data_format
    if data_format == "webdataset":
        from sdbench.data.formats.webdataset import find_tars

        place = find_tars(place)[0]
    elif data_format == "parquet" and cache is not None:
        from braceexpand import braceexpand

        from sdbench.data.remote import list_urls

        place = next(iter(braceexpand(place)))
        if not place.endswith(".parquet"):
            place = [*list_urls(place, suffix=".parquet"), place][0]
    options: dict[str, Any] = {"local": cache}
    if job.model is not None:
        options["text_embedding_dim"] = job.model.text_embedding_dim
    return describe_source(place, data_format=data_format, **options)


def _import_reader(data_format: str) -> None:
    """Load what reads this format and decodes its images, which is no time of the place's."""
    from sdbench.data import SOURCES

    reader = SOURCES[data_format].open
    assert reader is not None, "no place is given of data that is not stored"
    for module in (reader.split(":")[0], "sdbench.data.pipeline.transforms"):
        importlib.import_module(module)


def check_wandb(job: Job) -> Finding:
    """Whether W&B answers, and knows the key that a run would use."""
    if job.wandb_project is None:
        return skipped("no --wandb_project: nothing is logged to W&B")
    mode = os.environ.get("WANDB_MODE", "online")
    if mode != "online":
        return skipped(f"WANDB_MODE={mode}: nothing is sent to W&B")
    url = os.environ.get("WANDB_BASE_URL", WANDB_URL).rstrip("/")
    key = find_key(url)
    if key is None:
        return warning(
            f"no key for {url}: runs stay on disk, to be sent later",
            "wandb login, or WANDB_API_KEY from a secret",
        )
    started_s = time.perf_counter()
    try:
        answer = ask_wandb(url, key, timeout_s=job.timeout_s)
    except urllib.error.HTTPError as refusal:
        if refusal.code in (401, 403):
            return _refused(url, refusal.code)
        return error(f"{url} answers {refusal.code}", "look at W&B's status, and WANDB_BASE_URL")
    except OSError as problem:
        return error(
            f"{url} cannot be reached ({problem})",
            "open the way to it (https_proxy, WANDB_BASE_URL), or WANDB_MODE=offline",
        )
    except ValueError:
        return error(f"{url} does not answer as W&B does", "look at WANDB_BASE_URL")
    if not (answer.get("data") or {}).get("viewer"):
        return _refused(url, None)
    return ok(f"{url} knows the key, answered in {time.perf_counter() - started_s:.2f} s")


def _refused(url: str, code: int | None) -> Finding:
    how = "" if code is None else f" ({code})"
    return error(
        f"{url} does not accept the key{how}", "wandb login --relogin, or another WANDB_API_KEY"
    )


def find_key(url: str) -> str | None:
    """The key that wandb would use: of WANDB_API_KEY, else of the netrc file.

    Raises:
        RunError: That file is none.
    """
    if os.environ.get("WANDB_API_KEY"):
        return os.environ["WANDB_API_KEY"]
    file = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    if not file.is_file():
        return None
    try:
        found = netrc.netrc(str(file)).authenticators(urlsplit(url).hostname or "")
    except netrc.NetrcParseError as problem:  # whose text may be of a password
        raise RunError(f"{file} cannot be understood, line {problem.lineno}") from None
    return None if found is None else found[2]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key goes to the server that it is for and to no other."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


def ask_wandb(url: str, key: str, *, timeout_s: float) -> dict[str, Any]:
    """Ask who the key belongs to.

    Raises:
        urllib.error.HTTPError: The server answers with an error or with a redirection.
        OSError: It does not answer.
        ValueError: It answers with something else than JSON.
    """
    token = base64.b64encode(f"api:{key}".encode()).decode()
    request = urllib.request.Request(
        f"{url}/graphql",
        data=json.dumps({"query": "query Viewer { viewer { id } }"}).encode(),
        headers={"Authorization": f"Basic {token}", "Content-Type": "application/json"},
    )
    with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s) as answer:
        return json.loads(answer.read())
