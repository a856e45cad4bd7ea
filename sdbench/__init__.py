"""How fast does a machine train Stable Diffusion, and what limits it?"""

import logging
import os
import sys

if sys.version_info < (3, 11):  # noqa: UP036
    print(f"error: Python 3.11 or newer is needed: got {sys.version.split()[0]}", file=sys.stderr)
    sys.exit(2)

__version__ = "0.1.0"
# CPUs that this process may run on, read before torch is imported: with OMP_PLACES or OMP_PROC_BIND
# its OpenMP then binds the first thread to one of them, and the process seems to have no other.
NUM_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
# diffusers warns that it cannot import all of torchao's tensors, which are not used here.
logging.getLogger("diffusers.quantizers.torchao").setLevel(logging.ERROR)
