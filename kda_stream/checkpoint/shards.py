"""The shards of a checkpoint: each opened, checked and held against the index, now or when needed.

No payload byte is read here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from ..closing import renew_locks_after_fork
from ..errors import (
    CheckpointError,
    ClosedError,
    ErrorCode,
    HeaderError,
    KdaStreamError,
    PathError,
    ShardIndexError,
    ShardsMissingError,
    listed,
)
from ..limits import SHOWN_ITEMS_MAX
from .listing import CheckpointFiles
from .shard import Shard, open_shard


class Shards(Mapping[str, Shard]):
    """The shards by file name, in the order of these; looking one up checks it, if none has yet.

    A lookup raises `PathError`, `HeaderError` or `ShardIndexError` when the shard is at fault, then
    and each time again, and `ClosedError` when the checkpoint was closed before it. Which files
    there are, and how many, is known without a lookup. Safe to use from several threads.
    """

    def __init__(self, files: CheckpointFiles, header_bytes_max: int, path: str) -> None:
        """`path` is what the checkpoint was opened under."""
        self._files = files
        self._header_bytes_max = header_bytes_max
        self._path = path
        self.renew_locks()
        renew_locks_after_fork(self)
        self._closed = False
        self._checked: dict[str, Shard] = {}
        self._unlisted: dict[str, tuple[str, ...]] = {}

    def renew_locks(self) -> None:
        """Make new locks, as in a forked child."""
        self._lock = threading.RLock()  # a destructor may come in between, and close

    # the mapping

    def __getitem__(self, file: str) -> Shard:
        found = self._checked.get(file)
        if found is not None:
            return found
        if file not in self:
            raise KeyError(file)
        with self._lock:
            if file not in self._checked:
                self._require_usable(file)
                self._add(file, self._open(file))
            return self._checked[file]

    def __contains__(self, file: object) -> bool:
        return file in self._files.shard_names

    def __iter__(self) -> Iterator[str]:
        return iter(self._files.shard_names)

    def __len__(self) -> int:
        return len(self._files.shard_names)

    # what is known so far

    @property
    def checked(self) -> tuple[Shard, ...]:
        """The shards that were checked, in the order of their file names."""
        checked = self._checked.copy()
        return tuple(checked[file] for file in self if file in checked)

    @property
    def unlisted(self) -> tuple[tuple[str, str], ...]:
        """(tensor, file) that a checked shard holds and the index does not place there."""
        unlisted = self._unlisted.copy()
        return tuple((name, file) for file in self for name in unlisted.get(file, ()))

    # the checks

    def require_present(self) -> None:
        """Raise `ShardsMissingError` when the index names files that are not there."""
        missing = self._missing()
        if missing:
            raise self._missing_error(missing)

    def check_all(self) -> None:
        """Check every shard, all headers first, and then each against the index.

        Raises what a lookup raises, or one `CheckpointError` when more than one shard is at fault.
        """
        missing = self._missing()
        opened: dict[str, Shard] = {}
        problems: list[KdaStreamError] = [self._missing_error(missing)] if missing else []

        def open_one(file: str) -> None:
            opened[file] = self._open(file)

        _note(problems, open_one, [file for file in self if file not in missing])
        _raise_all(problems, self._path, f"{len(self) - len(opened)} of {len(self)} shards")
        _note(problems, lambda file: self._add(file, opened[file]), opened)
        if len(problems) > 1:
            self._sort_as_indexed(problems)
        _raise_all(problems, self._path, f"{len(problems)} shards")

    def _missing(self) -> tuple[str, ...]:
        """The absent files that the index names: one look at each, and none is opened."""
        if self._files.index is None:
            return ()
        return tuple(file for file in self if not os.path.lexists(self._path_of(file)))

    def _require_usable(self, file: str) -> None:
        if self._closed:
            raise ClosedError(
                ErrorCode.CHECKPOINT_CLOSED,
                "the checkpoint was closed before this shard was checked",
                path=self._path_of(file),
                hint="open it again",
            )
        if self._files.index is not None and not os.path.lexists(self._path_of(file)):
            raise self._missing_error(self._missing())  # it was there when the index was read

    def _path_of(self, file: str) -> str:
        return os.path.join(self._files.directory, file)

    def _open(self, file: str) -> Shard:
        return open_shard(self._path_of(file), header_bytes_max=self._header_bytes_max)

    def _add(self, file: str, shard: Shard) -> None:
        """Count the shard as checked when it holds all that the index places in it."""
        index = self._files.index
        if index is not None:
            places = index.weight_map
            held = list(map(places.get, shard.header)).count(file)
            if held != index.shard_tensors[file]:
                raise self._lost_error(file, shard)
            if held != len(shard.header):
                self._unlisted[file] = tuple(n for n in shard.header if places.get(n) != file)
        self._checked[file] = shard
        if self._closed:  # by a destructor, in between
            shard.close()

    def _names_placed(self, file: str) -> list[str]:
        """The names that the index places in a file; only an error needs them."""
        places = {} if self._files.index is None else self._files.index.weight_map
        return [name for name, other in places.items() if other == file]

    def _lost_error(self, file: str, shard: Shard) -> ShardIndexError:
        placed = self._names_placed(file)
        lost = [name for name in placed if name not in shard.header]
        return ShardIndexError(
            ErrorCode.INDEX_TENSORS_MISSING,
            "the index places tensors in a shard that does not hold them",
            path=shard.path,
            tensor=lost[0],
            expected=f"{len(placed)} tensors of the index",
            got=f"{len(lost)} missing: {listed(lost)}",
            hint="the index and the shards are of different saves: fetch both again",
        )

    def _sort_as_indexed(self, problems: list[KdaStreamError]) -> None:
        """Sort what `_lost_error` gave by where the index has each error's tensor."""
        places: Mapping[str, str] = self._files.index.weight_map if self._files.index else {}
        order = {name: number for number, name in enumerate(places)}
        problems.sort(key=lambda error: order[error.tensor or ""])

    def _missing_error(self, missing: tuple[str, ...]) -> ShardsMissingError:
        error = ShardsMissingError(
            ErrorCode.INDEX_SHARDS_MISSING,
            "shards that the index names are missing",
            path=self._files.index_path,
            expected=f"{len(self)} shards",
            got=f"{len(missing)} of {len(self)} missing: {listed(list(missing))}",
            hint="the download is incomplete: fetch them",
        )
        error.missing = missing
        return error

    # the end

    def close(self) -> list[str]:
        """Close every shard; the file names of those that arrays keep mapped. Again: no effect."""
        with self._lock:
            self._closed = True
            return [shard.file_name for shard in self.checked if not shard.close()]


def _note(
    problems: list[KdaStreamError], check: Callable[[str], None], files: Iterable[str]
) -> None:
    """Add to `problems` what `check` raises for each of the files."""
    for file in files:
        try:
            check(file)
        except (HeaderError, PathError, ShardIndexError) as error:
            problems.append(error)


def _raise_all(problems: list[KdaStreamError], path: str, which: str) -> None:
    """Raise the one problem, or one `CheckpointError` with all of them; nothing without any."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        whole = CheckpointError(
            ErrorCode.CHECKPOINT_PROBLEMS,
            f"{which} cannot be used",
            path=path,
            got="; ".join(error.finding for error in problems[:SHOWN_ITEMS_MAX]),
            hint=problems[0].hint,
        )
        whole.problems = tuple(problems)
        raise whole
