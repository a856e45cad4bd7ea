"""Prints what torch.compile would launch on an H200 in one micro-batch, on a machine without a GPU.

Each sub-model is compiled as benchmark.py does, of fake tensors, with Inductor's decisions for an
H200; no kernel is built or run. For each pass of each sub-model:

    kernels       calls of libraries (convolutions, matrix products, attention), and generated ones
    GB            that these read and write, if each reads and writes each of its tensors once
    ideal GB      inputs and outputs of the pass, each once: weights, gradients, kept activations
    turned        generated kernels that read images in one layout and write them in another
    short GB      that generated kernels read in pieces below a line of 128 bytes

The flags are those of benchmark.py. SD2's U-Net takes 3 minutes and 3 GB:

    python tools/compiled_step.py --model_name tiny --image_size 128
    python tools/compiled_step.py --precision bf16 --device_train_microbatch_size 32
    python tools/compiled_step.py --latents precomputed --group_norm fused --kernels kernels.csv
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import math
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import sympy
import torch
import torch._functorch.config
import torch._inductor.config
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode, SchedulerNode
from torch._inductor.utils import get_fused_kernel_name, sympy_subs
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode

from sdbench.measure.hardware import Machine
from sdbench.models.architecture import resolve_architecture
from sdbench.models.diffusion import MEMORY_FORMATS, build_model
from sdbench.models.lora import Lora
from sdbench.models.replay import Step, make_batch
from sdbench.ranks.distributed import Ranks
from sdbench.report.tables import make_table, to_markdown
from sdbench.settings.config import parse_request
from sdbench.settings.rules import settle
from sdbench.tasks.tuning import tune_model
from tools.fake_cuda import H200, pretend

GB = 1e9
LINE_BYTES = 128
ONE = Ranks(rank=0, world_size=1, local_rank=0, local_world_size=1)
MACHINE = Machine(
    device_type="cuda",
    device_name=H200.name,
    num_devices=1,
    device_memory_gib=140.0,
    free_memory_gib=139.0,
    held_memory_gib=0.5,
    num_cpu_cores=16,
    cpu_name="CPU",
    memory_gib=128.0,
    cpu_flags=(),
    platform="Linux-x86_64",
    compute_capability="9.0",
    cudnn_version=91900,
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that a compiled graph launches.

    Attributes:
        name: The library's function, or the operators that were fused.
        num_bytes: Read and written, each tensor once.
        short_bytes: Read in pieces that are shorter than a line of the GPU's memory.
        is_turning: Whether it reads images in one layout and writes them in another.
    """

    name: str
    is_library: bool
    num_bytes: int
    short_bytes: int = 0
    is_turning: bool = False


@dataclasses.dataclass(frozen=True)
class Graph:
    """A compiled graph: a pass of a sub-model."""

    part: str
    is_backward: bool
    ideal_bytes: int
    kernels: Sequence[Kernel]


class Recording:
    """Records what Inductor compiles, as `graphs`, while `recording` runs; names them by `part`."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self._part = ""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Compile a sub-model of this name within the block."""
        self._part = name
        yield

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Make fake tensors, and record in place of building kernels, within the block."""
        before = GraphLowering.compile_to_module
        GraphLowering.compile_to_module = lambda lowering: self._compile(lowering)
        try:
            with (
                FakeTensorMode(),
                torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
            ):
                yield
        finally:
            GraphLowering.compile_to_module = before

    def _compile(self, lowering: GraphLowering) -> Any:
        # As `codegen` begins. The scheduler fuses what it can; each of its nodes becomes a kernel.
        lowering.init_wrapper_code()
        lowering._update_scheduler()
        lowering.cache_key = lowering.cache_path = lowering.cache_linemap = None
        kernels = [_describe(node) for node in lowering.scheduler.nodes if _is_kernel(node)]
        ideal_bytes = _ideal_bytes(lowering)
        self.graphs.append(Graph(self._part, lowering.is_backward, ideal_bytes, kernels))
        outputs = [_Made.of(output) for output in lowering.graph_outputs]
        return types.SimpleNamespace(
            call=lambda args: [None if one is None else one.make() for one in outputs],
            runner=None,
            __file__=self._part,
        )


def compile_step(config: Any) -> list[Graph]:
    """Compile one micro-batch of a training step; its graphs in the order of compilation."""
    architecture = resolve_architecture(config.model_name)
    step = Step.of(config, architecture, on_cuda=True)
    record = Recording()
    with record.recording():
        model = build_model(
            architecture,
            seed=None,
            precision=config.precision,
            encoder_dtype=config.encoder_dtype,
            memory_format=config.memory_format,
            attention=config.attention,
            vae_attention=config.attention_of_vae,
            encoders=config.step_has_encoders,
            trained=config.trained_parts,
            lora=Lora.of(config, architecture),
            frozen_bits=config.frozen_bits,
            device="cuda",
            phase=record.phase,
        )
        lay_out(model, MEMORY_FORMATS[config.memory_format])
        tune_model(model, config)
        with torch.device("cuda"):
            model(make_batch(step, num_images=config.device_train_microbatch_size))
    return record.graphs


@dataclasses.dataclass(frozen=True)
class _Made:
    """An output of a compiled graph, as a fake tensor."""

    size: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype

    @staticmethod
    def of(output: Any) -> _Made | None:
        if not isinstance(output, ir.IRNode) or not output.has_tensor_output():
            return None
        sizes = ([*map(int, one)] for one in (output.get_size(), output.get_stride()))
        return _Made(*sizes, output.get_dtype())

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="cuda")


def lay_out(model: torch.nn.Module, memory_format: torch.memory_format) -> None:
    """Give the weights of convolutions a layout; those without content come contiguous."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim == 4:
                placed = weight.detach().contiguous(memory_format=memory_format)
                placed = torch.nn.Parameter(placed, requires_grad=weight.requires_grad)
                setattr(module, name, placed)


def _num_bytes(node: Any) -> int:
    if not isinstance(node, ir.IRNode) or not node.has_tensor_output():
        return 0
    return math.prod(map(int, node.get_size())) * node.get_dtype().itemsize


def _ideal_bytes(lowering: GraphLowering) -> int:
    outputs = {one.get_name(): one for one in lowering.graph_outputs if hasattr(one, "get_name")}
    return sum(_num_bytes(one) for one in {**lowering.graph_inputs, **outputs}.values())


def _is_kernel(node: BaseSchedulerNode) -> bool:
    return not isinstance(node, NopKernelSchedulerNode) and not isinstance(
        node.node, ir.MultiOutput
    )


def _describe(node: BaseSchedulerNode) -> Kernel:
    num_bytes = node.get_read_write_buffers_sizes()
    if node.is_extern():
        called = node.node.get_name() if node.node is None else node.node.python_kernel_name
        return Kernel(str(called), is_library=True, num_bytes=num_bytes)
    loops = [one for one in node.get_nodes() if isinstance(one, SchedulerNode)]
    return Kernel(
        get_fused_kernel_name(loops, "original_aten"),
        is_library=False,
        num_bytes=num_bytes,
        short_bytes=sum(map(_short_bytes, loops)),
        is_turning=any(map(_is_turning, loops)),
    )


def _accesses(node: SchedulerNode, kind: str) -> Iterator[tuple[dict[Any, int], int]]:
    """Yield the strides of the loops in each large tensor that a loop nest accesses, and its bytes.

    A tensor is large if a quarter of the iterations have an element of it to themselves.
    """
    body = node._body
    ranges = {variable: int(size) for variable, size in body.var_ranges.items() if size != 1}
    num_iterations = math.prod(ranges.values())
    expressions = body.get_all_read_expr if kind == "reads" else body.get_all_write_expr
    for name in {one.name for one in getattr(node.read_writes, kind)}:
        buffer = V.graph.name_to_buffer.get(name) or V.graph.graph_inputs.get(name)
        num_bytes = _num_bytes(buffer)
        if num_bytes == 0 or 4 * (num_bytes // buffer.get_dtype().itemsize) < num_iterations:
            continue
        for index in expressions(name):
            origin = dict.fromkeys(index.free_symbols, sympy.Integer(0))
            start = sympy_subs(index, origin)
            nexts = {
                one: sympy_subs(index, {**origin, one: sympy.Integer(1)})
                for one in ranges
                if one in origin
            }
            steps = {one: (end - start).expand(identity=True) for one, end in nexts.items()}
            yield {one: int(step) for one, step in steps.items() if step.is_Integer}, num_bytes


def _fastest(strides: dict[Any, int]) -> set[Any]:
    return {variable for variable, stride in strides.items() if stride == 1}


def _is_turning(node: SchedulerNode) -> bool:
    read, written = (
        [fastest for strides, _ in _accesses(node, kind) if (fastest := _fastest(strides))]
        for kind in ("reads", "writes")
    )
    return any(one.isdisjoint(other) for one in read for other in written)


def _short_bytes(node: SchedulerNode) -> int:
    """Bytes that a reduction reads in pieces that are shorter than a line."""
    body = node._body
    inner = [one for one in body.reduce_vars if body.var_ranges[one] != 1]
    total = 0
    for strides, num_bytes in _accesses(node, "reads") if inner else ():
        run = 1
        for variable in sorted(inner, key=lambda one: strides.get(one, 0)):
            if strides.get(variable) == run:
                run *= int(body.var_ranges[variable])
        if run > 1 and run * 2 < LINE_BYTES:
            total += num_bytes
    return total


def summarize(graphs: Sequence[Graph]) -> Iterator[dict[str, Any]]:
    """Yield a row for each graph, and one for all."""
    for graph in graphs:
        direction = "backward" if graph.is_backward else "forward"
        yield {"pass": f"{graph.part} {direction}", **_sums(graph.kernels, graph.ideal_bytes)}
    kernels = [kernel for graph in graphs for kernel in graph.kernels]
    yield {"pass": "all", **_sums(kernels, sum(graph.ideal_bytes for graph in graphs))}


def _sums(kernels: Sequence[Kernel], ideal_bytes: int) -> dict[str, Any]:
    library = [one for one in kernels if one.is_library]
    generated = [one for one in kernels if not one.is_library]
    return {
        "library calls": len(library),
        "library GB": round(sum(one.num_bytes for one in library) / GB, 2),
        "generated kernels": len(generated),
        "generated GB": round(sum(one.num_bytes for one in generated) / GB, 2),
        "ideal GB": round(ideal_bytes / GB, 2),
        "turned": sum(one.is_turning for one in generated),
        "turned GB": round(sum(one.num_bytes for one in generated if one.is_turning) / GB, 2),
        "short GB": round(sum(one.short_bytes for one in generated) / GB, 2),
    }


def write_kernels(path: Path, graphs: Sequence[Graph]) -> None:
    """Write all kernels as CSV, by pass in the order of their launch."""
    with path.open("w", newline="") as file:
        names = [field.name for field in dataclasses.fields(Kernel)]
        rows = csv.writer(file)
        rows.writerow(["part", "is_backward", *names])
        for graph in graphs:
            for kernel in graph.kernels:
                rows.writerow([graph.part, graph.is_backward, *dataclasses.astuple(kernel)])


def main(argv: Sequence[str]) -> None:
    """Print the table, and write the kernels to the file of --kernels."""
    argv, kernels = list(argv), None
    if not argv or "--help" in argv:
        sys.exit(__doc__)
    if "--kernels" in argv:
        place = argv.index("--kernels")
        kernels = Path(argv[place + 1])
        del argv[place : place + 2]
    request = parse_request(argv, description="", epilog="")
    config, _ = settle(request, machine=MACHINE, ranks=ONE)
    pretend()
    graphs = compile_step(config)
    print(to_markdown(make_table(summarize(graphs))))
    if kernels is not None:
        write_kernels(kernels, graphs)


if __name__ == "__main__":
    main(sys.argv[1:])
