"""GPUs that a plan can be made for, by the numbers of their data sheets, and the one of this machine.

Owns: memory, rates and bandwidths. Refuses: clocks; what kernels and collectives reach of these is in seconds.py and
exchange.py. Links between GPUs are half of what data sheets say of NVLink, which count both directions; networks are
those of NVIDIA's own machines (DGX A100: 200 Gb/s for each GPU, DGX H100, H200 and B200: 400 Gb/s). GPUs without NVLink
reach each other as they reach the host, and machines of them share 100 Gb/s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from temper.errors import UserError, did_you_mean
from temper.planning.host import free_host_bytes
from temper.runs.flops import is_called, peak_flops

GIB = 2**30
MOST_GPUS = 4096
"""That a plan is made for."""
UNKNOWN_FLOPS = 50e12
"""Of a GPU that no table knows: enough to tell what dominates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    """As --gpu takes it."""
    device_name: str
    """As torch calls it."""
    memory_bytes: float
    """All of it, as torch sees it."""
    bandwidth: float
    """Bytes per second of its memory."""
    link: float = 25e9
    """Bytes per second from and to the memory of the host."""
    peer_link: float = 25e9
    """Bytes per second from and to another GPU of the same machine."""
    network: float = 100e9 / 8 / 8
    """Bytes per second from and to another machine, for each GPU."""
    per_machine: int = 8
    """GPUs of one machine."""
    free_bytes: float | None = None
    """What is free now, where the GPU is here; None: all of it."""
    host_free_bytes: float | None = None
    """What is free now in the memory of the host, where the GPU is here; None: nobody knows."""

    @property
    def usable_bytes(self) -> float:
        return self.memory_bytes if self.free_bytes is None else self.free_bytes

    @property
    def host_room(self) -> float:
        """What may be planned for the memory of the host."""
        return math.inf if self.host_free_bytes is None else self.host_free_bytes

    def flops(self, dtype: str) -> float:
        """Matrix rate in this dtype; what has no hardware for it falls back to float32."""
        return peak_flops(self.device_name, dtype) or peak_flops(self.device_name, "float32") or UNKNOWN_FLOPS


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="b200", device_name="B200", memory_bytes=178 * GIB, bandwidth=8.0e12, link=50e9,
            peer_link=900e9, network=50e9),
        Gpu(name="h200", device_name="H200", memory_bytes=139.8 * GIB, bandwidth=4.8e12, link=50e9,
            peer_link=450e9, network=50e9),
        Gpu(name="gh200", device_name="GH200", memory_bytes=94.5 * GIB, bandwidth=4.0e12, link=450e9,
            peer_link=50e9, network=50e9, per_machine=1),
        Gpu(name="h100-80", device_name="H100", memory_bytes=79.1 * GIB, bandwidth=3.35e12, link=50e9,
            peer_link=450e9, network=50e9),
        Gpu(name="a100-80", device_name="A100", memory_bytes=79.1 * GIB, bandwidth=2.0e12,
            peer_link=300e9, network=25e9),
        Gpu(name="a100-40", device_name="A100", memory_bytes=39.4 * GIB, bandwidth=1.55e12,
            peer_link=300e9, network=25e9),
        Gpu(name="l40s", device_name="L40S", memory_bytes=44.4 * GIB, bandwidth=0.864e12),
        Gpu(name="l4", device_name="L4", memory_bytes=22.0 * GIB, bandwidth=0.3e12),
        Gpu(name="a10-24", device_name="A10", memory_bytes=22.0 * GIB, bandwidth=0.6e12),
        Gpu(name="4090", device_name="RTX 4090", memory_bytes=23.5 * GIB, bandwidth=1.0e12),
        Gpu(name="3090", device_name="RTX 3090", memory_bytes=23.6 * GIB, bandwidth=0.936e12),
        Gpu(name="t4", device_name="T4", memory_bytes=14.6 * GIB, bandwidth=0.32e12, link=12e9, peer_link=12e9),
    )
}  # fmt: skip


def find_gpu(name: str) -> Gpu:
    """UserError names the nearest one."""
    if name not in GPUS:
        raise UserError(f'--gpu "{name}" is unknown.{did_you_mean(name, GPUS)} Known: {", ".join(GPUS)}.')
    return GPUS[name]


def this_gpu() -> Gpu | None:
    """The GPU that training would use, with what is free on it now; None: there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    # What torch keeps for later is free for whoever asks torch.
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    device_name = torch.cuda.get_device_name()
    known = _find_alike(device_name, total) or Gpu(name="", device_name="", memory_bytes=total, bandwidth=1e12)
    host = free_host_bytes()
    if host is not None:  # the same of what torch keeps of pinned memory
        pinned = torch.cuda.host_memory_stats()
        host += pinned.get("allocated_bytes.current", 0) - pinned.get("active_bytes.current", 0)
    return replace(
        known, name="this machine's", device_name=device_name, memory_bytes=total, free_bytes=free + kept,
        host_free_bytes=host,
    )  # fmt: skip


def _find_alike(device_name: str, memory_bytes: float) -> Gpu | None:
    """By the words of its name, for "L4" is in "L40", and of those that share them by memory; None: nobody knows it."""
    alike = [gpu for gpu in GPUS.values() if is_called(device_name, gpu.device_name)]
    return min(alike, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes), default=None)
