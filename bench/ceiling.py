"""What the machine can do at best: the cases of ceiling.c, which see."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from .data import load
from .sides import UnavailableError

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


ALL = (
    *(Case("copy", threads, stores) for stores in ("plain", "streaming") for threads in (1, 2)),
    *(Case(method, threads) for method in ("pread", "map", "map-drop") for threads in (1, 2)),
    *(Case("direct", threads, block_kib=mib * 1024) for mib in (4, 16) for threads in (1, 2, 4)),
    Case("direct", 2, block_kib=4 * 1024, pages="small"),
)


def program_in(scratch: Path) -> Path:
    """ceiling.c, compiled into `scratch`; raises `UnavailableError`."""
    program = scratch / "ceiling"
    if program.exists():
        return program
    command = ["cc", "-std=c11", "-O3", "-pthread", str(SOURCE), "-o", str(program)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise UnavailableError("there is no cc") from None
    except subprocess.CalledProcessError as error:
        raise UnavailableError(f"cc failed: {error.stderr.strip()[-200:]}") from None
    return program


def ranges_in(scratch: Path, folder: Path) -> Path:
    """What of the data set's files the cases read, written into `scratch`."""
    path = scratch / "ranges"
    if not path.exists():
        rows = load(folder).ranges()
        lines = [f"{row.layer} {row.begin} {row.end} {row.path.resolve()}\n" for row in rows]
        path.write_text("".join(lines))
    return path
