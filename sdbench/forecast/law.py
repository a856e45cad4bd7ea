"""`Law`: images/s of a GPU that were not measured, from figures of others, and their tested error.

A GPU takes for an image, in seconds,

    t = k (F / P)^a (B / W)^b  +  o n / m  +  x w / i

F, B, n and w belong to the work: 1e12 operations of products and convolutions of an image, 1e9
bytes that its other operators read and write in bf16, operators started for a micro-batch, 1e9
trained weights. P and W belong to the GPU: its published peak in bf16, TFLOP/s, and the bandwidth
of its memory, 1e12 bytes/s. m and i belong to the run: images of a micro-batch, and of a step on
one GPU. The last term is the exchange of gradients between machines, with more than
`GPUS_OF_A_MACHINE`.

Fitted are the exponents, the time o of starting an operator, and k and x of each kind of software.
A source deviates from its kind by factors of its own, which a prior holds near 1. Software whose
kernels are fused or in CUDA graphs starts few operators, and its second term is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sdbench.base.carried import RESULTS, THROUGHPUT
from sdbench.base.yaml_file import read_mapping
from sdbench.record.configuration import group
from sdbench.record.formulas import PEAKS_FILE
from sdbench.record.store import OK
from sdbench.report.figures import (
    MEASURED,
    describe_source,
    device_of,
    names_device,
    read_figures,
)

WORK_FILE = Path(__file__).with_name("work.yaml")

EAGER, FUSED = "eager", "fused"
# Tables of results/quoted that are fitted: the source's name, and the kind of its software.
SOURCES = {
    "aws_p4de_p5_single_node": ("AWS", EAGER),
    "aws_p5_scaling": ("AWS", EAGER),
    "mosaicml_diffusion_benchmark_a100": ("MosaicML, benchmark", EAGER),
    "mosaicml_diffusion_a100": ("MosaicML, latents", EAGER),
    "milabench_diffusion": ("milabench", EAGER),
    "mlperf_training_sd2": ("MLPerf, Stable Diffusion", FUSED),
    "mlperf_training_flux1": ("MLPerf, Flux.1", FUSED),
}
# Runs of this suite, by preset.
PRESETS = {"seed": ("this suite, seed", EAGER), "fast": ("this suite, fast", FUSED)}

GPUS_OF_A_MACHINE = 8
# Beyond, a step has few images on a GPU, and the network, which no source describes, decides.
MAX_GPUS = 128
# Share of the tested predictions inside an interval, and whose intervals held in further tests.
LEVEL, PROVEN = 0.95, "one machine"

# What is believed before any figure is seen: mean and standard deviation.
EXPONENTS = ((0.65, 0.3), (0.35, 0.3))
LOG_START_US = (3.0, 1.0)  # 7 to 55 microseconds for an operator
LOG_FACTOR = (1.0, 10.0)  # k: nothing is believed
LOG_EXCHANGE_MS = (4.0, 1.5)  # 12 to 245 ms for 0.87e9 weights
SPREAD_OF_SOURCES = (0.15, 1.0)  # of k and of x within a kind of software
ERROR = 0.08  # of a figure, beside what its source deviates
WEIGHTS_OF_SD2 = 0.866
# Exponents, o, and k and x of both kinds of software; the factors of each source follow.
NUM_COMMON = 7


class Card(NamedTuple):
    """A GPU: its peak in bf16, TFLOP/s, and the bandwidth of its memory, 1e12 bytes/s.

    `memory_gb` is the memory in its name, as in `memory_tables.CARDS`; None: it is not predicted.
    """

    name: str
    tflops: float
    tb_per_s: float
    memory_gb: int | None


class Work(NamedTuple):
    """The work of an image: see the formula above."""

    tera_operations: float
    gigabytes: float
    num_operators: int
    giga_weights: float


@dataclasses.dataclass(frozen=True)
class Case:
    """A run whose speed is asked for or known.

    Attributes:
        source: Whose software it is.
        kernels: ``eager`` or ``fused``.
        num_own: Images of a step on one GPU.
        seconds: Time of an image on one GPU; NaN if unknown.
        origin: Who published it.
    """

    card: Card
    work: Work
    model: str
    image_size: int
    latents: str
    source: str
    kernels: str
    num_gpus: int
    micro_batch: float
    num_own: float
    seconds: float = math.nan
    origin: str = ""

    @property
    def images_per_second(self) -> float:
        """Of all GPUs."""
        return self.num_gpus / self.seconds

    def features(self) -> tuple[float, float, float, float]:
        """Logarithms of both times in seconds, seconds per o in us, and seconds per x in ms."""
        starts = 0.0 if self.kernels == FUSED else self.work.num_operators / self.micro_batch
        is_exchanged = self.num_gpus > GPUS_OF_A_MACHINE
        exchanged = is_exchanged * self.work.giga_weights / WEIGHTS_OF_SD2 / self.num_own
        return (
            math.log(self.work.tera_operations / self.card.tflops),
            math.log(self.work.gigabytes / self.card.tb_per_s / 1000),
            1e-6 * starts,
            1e-3 * exchanged,
        )


class Law:
    """The formula with the constants that fit cases best."""

    def __init__(self, cases: Sequence[Case]) -> None:
        """Fit it: least squares of logarithms; each source counts as the root of its figures."""
        from scipy.optimize import least_squares

        self._sources = sorted({case.source for case in cases})
        counts = Counter(case.source for case in cases)
        weights = np.array([counts[case.source] ** -0.25 for case in cases]) / ERROR
        known = np.log([case.seconds for case in cases])
        rows = self._rows(cases)
        spreads = [(0.0, spread) for spread in SPREAD_OF_SOURCES for _ in self._sources]
        believed = [*EXPONENTS, LOG_START_US, *[LOG_FACTOR] * 2, *[LOG_EXCHANGE_MS] * 2, *spreads]
        mean, spread = np.array(believed).T

        def misses(constants: np.ndarray) -> np.ndarray:
            errors = np.log(_times_s(constants, *rows).sum(0)) - known
            return np.concatenate([errors * weights, (constants - mean) / spread])

        self.constants = least_squares(misses, mean).x

    def _rows(self, cases: Sequence[Case]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each case the features, and what adds up to the logarithms of k and of x."""
        num = len(self._sources)
        log_k, log_x = np.zeros((2, len(cases), NUM_COMMON + 2 * num))
        for index, case in enumerate(cases):
            kind = (EAGER, FUSED).index(case.kernels)
            log_k[index, 3 + kind] = log_x[index, 5 + kind] = 1
            if case.source in self._sources:
                place = NUM_COMMON + self._sources.index(case.source)
                log_k[index, place] = log_x[index, place + num] = 1
        return np.array([case.features() for case in cases]), log_k, log_x

    def parts_s(self, case: Case) -> tuple[float, float, float]:
        """Seconds of an image: arithmetic and memory, starting operators, exchange."""
        first, second, third = _times_s(self.constants, *self._rows([case]))[:, 0]
        return float(first), float(second), float(third)

    def predict(self, case: Case) -> Case:
        """The case with the predicted time."""
        return dataclasses.replace(case, seconds=sum(self.parts_s(case)))


def _times_s(
    constants: np.ndarray, features: np.ndarray, log_k: np.ndarray, log_x: np.ndarray
) -> np.ndarray:
    device_s = np.exp(log_k @ constants + features[:, :2] @ constants[:2])
    start_s = np.exp(constants[2]) * features[:, 2]
    return np.array([device_s, start_s, np.exp(log_x @ constants) * features[:, 3]])


class Tested(NamedTuple):
    """A figure that was predicted without some others, its own among them.

    Attributes:
        left_out: ``GPU``, ``source`` or ``model``: which figures were left out with it.
        is_new: Whether no figure of the same model was left in.
    """

    case: Case
    left_out: str
    is_new: bool
    predicted: float

    @property
    def log_error(self) -> float:
        """Logarithm of the predicted over the known images/s."""
        return math.log(self.predicted / self.case.images_per_second)

    @property
    def group(self) -> tuple[str, str]:
        """What was left out."""
        return self.left_out, _LEFT_OUT[self.left_out](self.case)

    @property
    def pool(self) -> str:
        """Predictions with this in common have one error."""
        return pool_of(self.case.num_gpus, is_new=self.is_new)


def pool_of(num_gpus: int, *, is_new: bool = False) -> str:
    """The predictions that one of so many GPUs, and of a new model or not, has its error from."""
    if is_new:
        return "work without a figure"
    return PROVEN if num_gpus <= GPUS_OF_A_MACHINE else "several machines"


_LEFT_OUT = {
    "GPU": lambda case: case.card.name,
    "source": lambda case: case.source,
    "model": lambda case: case.model,
}


def leave_out(cases: Sequence[Case]) -> list[Tested]:
    """Predict each GPU, each source and each model from the figures of all others."""
    tested = []
    for kind, name_of in _LEFT_OUT.items():
        for name, left in group(cases, key_of=name_of).items():
            rest = [case for case in cases if name_of(case) != name]
            if not rest:
                continue
            law, models = Law(rest), {case.model for case in rest}
            for case in left:
                predicted = law.predict(case).images_per_second
                tested.append(Tested(case, kind, case.model not in models, predicted))
    return tested


def find_factor(tested: Iterable[Tested], pool: str) -> float:
    """The factor by which a prediction may be off: `LEVEL` of those tested were off by less."""
    errors = sorted(abs(one.log_error) for one in tested if one.pool == pool)
    return math.exp(errors[math.ceil(LEVEL * len(errors)) - 1])


@functools.cache
def load_cards() -> dict[str, Card]:
    """GPUs with a known bandwidth, by each of their names in lower case."""
    rows = json.loads(PEAKS_FILE.read_text(encoding="utf-8"))
    return {
        name: Card(
            row["devices"][0], row["peaks"]["bf16"], row["gb_per_s"] / 1000, row.get("memory_gb")
        )
        for row in rows
        if "gb_per_s" in row and "bf16" in row["peaks"]
        for name in map(str.lower, row["devices"])
    }


def load_cases(sources: Mapping[str, tuple[str, str]] = SOURCES) -> list[Case]:
    """The figures of results/ that the law is fitted to: published ones, and runs of this suite."""
    cases = []
    for table, software in sources.items():
        rows = read_figures(RESULTS / "quoted" / f"{table}.csv")
        cases += [case for row in rows if (case := _make_case(row, *software))]
    for row in read_figures(THROUGHPUT):
        is_known = row.get("kind") == MEASURED and row.get("status") == OK
        if is_known and row["preset"] in PRESETS and row["other_settings"] is None:
            case = _make_case(row, *PRESETS[row["preset"]])
            cases += [case] if case else []
    return cases


def _make_case(row: dict[str, Any], source: str, kernels: str) -> Case | None:
    """The case of a row; None without a rate, with too many GPUs, or of unknown GPU or work."""
    card = find_card(device_of(row))
    work = load_work().get((row["model"], row["image_size"], row["latents"]))
    rate, num_gpus = row["images_per_second"], row["num_gpus"]
    if card is None or work is None or rate is None or num_gpus > MAX_GPUS:
        return None
    micro_batch, num_images = row.get("micro_batch"), row.get("global_batch")
    num_own = (num_images or micro_batch * num_gpus) / num_gpus
    return Case(
        card=card,
        work=work,
        **{name: row[name] for name in ("model", "image_size", "latents")},
        source=source,
        kernels=kernels,
        num_gpus=num_gpus,
        micro_batch=min(micro_batch or num_own, num_own),
        num_own=num_own,
        seconds=num_gpus / rate,
        origin=", ".join(filter(None, (describe_source(row), row.get("precision")))),
    )


def find_card(name: str | None) -> Card | None:
    """The card of a name, which may have its machine in brackets: ``H100 (p5.48xlarge)``."""
    return load_cards().get((name or "").split(" (")[0].lower())


def find_cards(text: str) -> list[Card]:
    """The card of this name, or all that the text means: ``A100`` is that of several."""
    card = find_card(text)
    cards = [one for name, one in load_cards().items() if names_device(text, name)]
    return list(dict.fromkeys(cards)) if card is None else [card]


@functools.cache
def load_work() -> dict[tuple[str, int, str], Work]:
    """The work of what the figures train, by model, resolution and place of the encoders."""
    allowed = "the file as it is in the repository"
    rows = read_mapping(WORK_FILE, allowed=allowed, flag="work.yaml")["work"]
    return {
        (row.pop("model"), row.pop("image_size"), row.pop("latents")): Work(**row) for row in rows
    }
