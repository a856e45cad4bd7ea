r"""Prints what torch.compile would launch on an H200 in a micro-batch, on a machine without a GPU.

Each sub-model is compiled as benchmark.py does, of fake tensors, with Inductor's decisions for an
H200; no kernel is built or run. For each pass of each sub-model:

    library       calls of convolutions, matrix products, attention; GB if each tensor moves once
    generated     the kernels that Inductor writes, GB in the same way
    ideal GB      inputs and outputs of the pass, each once: weights, gradients, kept activations
    turned        generated kernels that read images in one layout and write them in another
    short GB      read by sums in pieces below a line of 128 bytes, once for each sum

The flags are those of benchmark.py; the size of pictures and micro-batch must be given. It takes
torch 2.11 with CUDA, and two to four minutes for SD2:

    python tools/compiled_step.py --image_size 512 --batch_size 32 \
        --device_train_microbatch_size 32 --precision bf16 --latents precomputed
    python tools/compiled_step.py ... --group_norm fused --kernels kernels.csv
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pandas as pd
import sympy
import torch
import torch._functorch.config
from torch._dynamo.utils import counters
from torch._inductor import ir
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode, SchedulerNode
from torch._inductor.utils import get_fused_kernel_name, sympy_subs
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode

from sdbench.measure.hardware import inspect_machine
from sdbench.models.architecture import resolve_architecture
from sdbench.models.diffusion import MEMORY_FORMATS, build_model
from sdbench.models.replay import Step, make_batch
from sdbench.ranks.distributed import Ranks
from sdbench.report.tables import make_table, to_markdown
from sdbench.settings.config import BenchmarkConfig, parse_request
from sdbench.settings.rules import settle
from sdbench.training.tuning import tune_model
from tools.fake_cuda import H200, pretend

GB = 1e9
LINE_BYTES = 128
GPU = {"device_type": "cuda", "device_name": H200.name, "num_devices": 1}
GPU |= {"compute_capability": "9.0", "cudnn_version": 91900}


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
    """Records the graphs that Inductor compiles within `recording`."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self._part = ""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name the graphs that are compiled within the block."""
        self._part = name
        yield

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Make fake tensors, and record kernels in place of building them, within the block."""
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
        outputs = {one.get_name(): one for one in lowering.graph_outputs if _is_tensor(one)}
        ideal_bytes = sum(map(_num_bytes, {**lowering.graph_inputs, **outputs}.values()))
        self.graphs.append(Graph(self._part, lowering.is_backward, ideal_bytes, kernels))
        layouts = [
            ([*map(int, one.get_size())], [*map(int, one.get_stride())], one.get_dtype())
            if _is_tensor(one)
            else None
            for one in lowering.graph_outputs
        ]
        return types.SimpleNamespace(
            call=lambda args: [
                one and torch.empty_strided(one[0], one[1], dtype=one[2], device="cuda")
                for one in layouts
            ],
            runner=None,
            __file__=self._part,
        )


def compile_step(config: BenchmarkConfig) -> list[Graph]:
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
            lora=step.lora,
            device="cuda",
            phase=record.phase,
        )
        lay_out(model, MEMORY_FORMATS[config.memory_format])
        tune_model(model, config)
        with torch.device("cuda"):
            batch = make_batch(step, num_images=config.device_train_microbatch_size)
        model(batch)
    if breaks := counters["graph_break"]:
        sys.exit(f"a graph breaks, and would run in pieces: {[*breaks]}")
    return record.graphs


def lay_out(model: torch.nn.Module, memory_format: torch.memory_format) -> None:
    """Give the weights of convolutions a layout; those without content come contiguous."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim == 4:
                placed = weight.detach().contiguous(memory_format=memory_format)
                setattr(module, name, torch.nn.Parameter(placed, weight.requires_grad))


def _is_tensor(node: Any) -> bool:
    return isinstance(node, ir.IRNode) and node.has_tensor_output()


def _num_bytes(node: Any) -> int:
    if not _is_tensor(node):
        return 0
    return math.prod(map(int, node.get_size())) * node.get_dtype().itemsize


def _is_kernel(node: Any) -> bool:
    is_view = isinstance(node.node, ir.MultiOutput)
    return not is_view and not isinstance(node, NopKernelSchedulerNode)


def _describe(node: Any) -> Kernel:
    num_bytes = node.get_read_write_buffers_sizes()
    if node.is_extern():
        return Kernel(str(node.node.python_kernel_name), is_library=True, num_bytes=num_bytes)
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
    loops = [variable for variable, size in body.var_ranges.items() if size != 1]
    num_iterations = math.prod(int(body.var_ranges[one]) for one in loops)
    expressions = body.get_all_read_expr if kind == "reads" else body.get_all_write_expr
    for name in {one.name for one in getattr(node.read_writes, kind)}:
        buffer = V.graph.name_to_buffer.get(name) or V.graph.graph_inputs.get(name)
        num_bytes = _num_bytes(buffer)
        if num_bytes == 0 or 4 * (num_bytes // buffer.get_dtype().itemsize) < num_iterations:
            continue
        for index in expressions(name):
            origin = dict.fromkeys(index.free_symbols, sympy.Integer(0))
            start, steps = sympy_subs(index, origin), {}
            for one in index.free_symbols.intersection(loops):
                step = sympy_subs(index, {**origin, one: sympy.Integer(1)}) - start
                steps[one] = step.expand(identity=True)
            yield {one: int(step) for one, step in steps.items() if step.is_Integer}, num_bytes


def _is_turning(node: SchedulerNode) -> bool:
    """Whether no loop is the innermost of both an image that is read and one that is written."""
    read, written = (
        [
            {loop for loop, stride in strides.items() if stride == 1}
            for strides, _ in _accesses(node, kind)
            if 1 in strides.values()
        ]
        for kind in ("reads", "writes")
    )
    return any(one.isdisjoint(other) for one in read for other in written)


def _short_bytes(node: SchedulerNode) -> int:
    """Bytes that a sum reads in pieces that are shorter than a line."""
    sizes = {one: int(node._body.var_ranges[one]) for one in node._body.reduce_vars}
    total = 0
    for strides, num_bytes in _accesses(node, "reads") if math.prod(sizes.values()) > 1 else ():
        run = 1
        for loop in sorted(strides.keys() & sizes, key=strides.__getitem__):
            if strides[loop] == run:
                run *= sizes[loop]
        if 1 < run < LINE_BYTES // 2:
            total += num_bytes
    return total


def summarize(graphs: Sequence[Graph]) -> Iterator[dict[str, Any]]:
    """Yield a row for each graph, and one for all."""
    for graph in graphs:
        direction = "backward" if graph.is_backward else "forward"
        yield {"pass": f"{graph.part} {direction}", **_sums([graph])}
    yield {"pass": "all", **_sums(graphs)}


def _sums(graphs: Sequence[Graph]) -> dict[str, Any]:
    kernels = [kernel for graph in graphs for kernel in graph.kernels]
    library = [one.num_bytes for one in kernels if one.is_library]
    generated = [one.num_bytes for one in kernels if not one.is_library]
    turned = [one.num_bytes for one in kernels if one.is_turning]
    return {
        "library": len(library),
        "library GB": round(sum(library) / GB, 2),
        "generated": len(generated),
        "generated GB": round(sum(generated) / GB, 2),
        "ideal GB": round(sum(graph.ideal_bytes for graph in graphs) / GB, 2),
        "turned": len(turned),
        "turned GB": round(sum(turned) / GB, 2),
        "short GB": round(sum(one.short_bytes for one in kernels) / GB, 2),
    }


def main(argv: list[str]) -> None:
    """Print the table; with --kernels, write all kernels as CSV, in the order of their launch."""
    path = None
    if not argv or "--help" in argv:
        sys.exit(__doc__)
    if "--kernels" in argv:
        place = argv.index("--kernels")
        path = Path(argv[place + 1])
        del argv[place : place + 2]
    request = parse_request(argv, description="", epilog="")
    machine = dataclasses.replace(inspect_machine(), **GPU)
    config, _ = settle(request, machine=machine, ranks=Ranks(0, 1, 0, 1))
    pretend()
    graphs = compile_step(config)
    print(to_markdown(make_table(summarize(graphs))))
    if path is not None:
        rows = [
            {"part": graph.part, "is_backward": graph.is_backward, **vars(kernel)}
            for graph in graphs
            for kernel in graph.kernels
        ]
        pd.DataFrame(rows).to_csv(path, index=False)


if __name__ == "__main__":
    main(sys.argv[1:])
