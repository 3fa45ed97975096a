"""Every way to load that is compared; `ALL` is the registry, in the order of the table."""

from __future__ import annotations

from . import own, safetensors_peers, streamers, vllm_patterns
from .runner import Job, Run, Runner, UnavailableError

ALL: tuple[Runner, ...] = (
    *own.RUNNERS,
    *safetensors_peers.RUNNERS,
    *vllm_patterns.RUNNERS,
    *streamers.RUNNERS,
)

__all__ = ["ALL", "Job", "Run", "Runner", "UnavailableError"]
