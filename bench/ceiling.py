"""What the machine can do at best: the cases of ceiling.c, which see."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from .data import DataSet

SOURCE = Path(__file__).with_suffix(".c")
WINDOW_KIB = 8 * 1024


@dataclass(frozen=True)
class Case:
    """One way of ceiling.c; `reads_files` is False for memory to memory."""

    method: str
    threads: int
    stores: str = "streaming"
    block_kib: int = WINDOW_KIB
    pages: str = "huge"

    @property
    def name(self) -> str:
        told = [self.method, "1 thread" if self.threads == 1 else f"{self.threads} threads"]
        if self.method == "copy":
            told.append(f"{self.stores} stores")
        if self.method == "direct":
            told += [f"{self.block_kib // 1024} MiB blocks", f"{self.pages} pages"]
        return "ceiling: " + ", ".join(told)

    @property
    def reads_files(self) -> bool:
        return self.method != "copy"

    def command(self, program: Path, ranges: Path) -> list[str]:
        sizes = [str(self.threads), str(self.block_kib), self.pages]
        return [str(program), self.method, self.stores, *sizes, str(ranges)]


_PAGE_CACHE = tuple(
    Case(method, threads) for method in ("pread", "map", "map-drop") for threads in (1, 2)
)
WARM = (
    *(Case("copy", threads, stores) for stores in ("plain", "streaming") for threads in (1, 2)),
    *_PAGE_CACHE,
)
COLD = (
    *_PAGE_CACHE,
    *(Case("direct", threads, block_kib=mib * 1024) for mib in (4, 16) for threads in (1, 2, 4)),
    Case("direct", 2, block_kib=4 * 1024, pages="small"),
)


def compile_program(folder: Path) -> Path:
    """Compile ceiling.c into `folder`; raises CalledProcessError or FileNotFoundError."""
    program = folder / "ceiling"
    subprocess.run(
        ["cc", "-std=c11", "-O3", "-pthread", str(SOURCE), "-o", str(program)],
        check=True,
        capture_output=True,
        text=True,
    )
    return program


def write_ranges(data: DataSet, folder: Path) -> Path:
    path = folder / "ranges"
    lines = [f"{row.layer} {row.begin} {row.end} {row.path.resolve()}\n" for row in data.ranges()]
    path.write_text("".join(lines))
    return path
