"""How busy was this rank's GPU during the measured window?

NVML is read by a thread of its own about once a second, so that the training loop never waits.
"""

from __future__ import annotations

import threading
from typing import Any

PERIOD_S = 1.0


class GpuMonitor:
    """Samples the utilisation of one GPU from `start` to `stop`; without NVML it stays empty."""

    def __init__(self, *, device_index: int) -> None:
        self._device_index = device_index
        self._samples: list[float] = []
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to sample, where NVML is there."""
        handle = self._open()
        if handle is not None:
            self._thread = threading.Thread(target=self._sample, args=(handle,), daemon=True)
            self._thread.start()

    def stop(self) -> float | None:
        """End sampling.

        Returns:
            Mean utilisation in percent, or None where nothing was sampled.
        """
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        return sum(self._samples) / len(self._samples) if self._samples else None

    def _open(self) -> Any:
        """NVML's handle of the GPU torch calls `device_index`; by UUID, since the orders differ."""
        try:
            import pynvml
        except ImportError:
            return None
        import torch

        try:
            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(self._device_index).uuid)
            return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError:
            return None

    def _sample(self, handle: Any) -> None:
        import pynvml

        while not self._stopped.wait(PERIOD_S):
            try:
                self._samples.append(float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu))
            except pynvml.NVMLError:
                return
