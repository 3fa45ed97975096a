"""What runs the pages: a block that fails, or prints something else, fails its page."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.pages import Runner, blocks_of


def runner(tmp_path: Path, text: str) -> Runner:
    page = tmp_path / "page.md"
    page.write_text(text.replace("'''", "```"))
    return Runner(page, tmp_path, is_left_out=lambda first_line: first_line == "left out")


GOOD = """
<!--- invisible-code-block: python
hidden = 1
-->
'''python
import os
print(hidden, "and", os.getpid())
'''
It prints
'''text
1 and ...
'''
'''sh
echo 2 > file; echo "to stderr" >&2
cat file
'''
'''text
to stderr
2
'''
'''sh
left out
'''
"""


def test_a_page_runs_in_order_with_what_is_hidden_and_what_is_printed(tmp_path: Path) -> None:
    assert runner(tmp_path, GOOD).run() == 3
    assert (tmp_path / "file").read_text() == "2\n"


@pytest.mark.parametrize(
    ("page", "what"),
    [
        ("'''python\n1 / 0\n'''\n", ZeroDivisionError),
        ("'''sh\nfalse\ntrue\n'''\n", AssertionError),
        ("'''sh\nfalse | cat\n'''\n", AssertionError),
        ("'''sh\nno-such-command\n'''\n", AssertionError),
        ("'''sh\necho 1\n'''\n'''text\n2\n'''\n", AssertionError),
        ("'''python\nprint(1)\n'''\n'''text\n1\n2\n'''\n", AssertionError),
        ("'''text\n1\n'''\n", AssertionError),
        ("'''sh\nleft out\n'''\n'''text\n\n'''\n", AssertionError),
        ("'''sh\necho 1\n'''\n'''text\n1\n'''\n'''text\n1\n'''\n", AssertionError),
    ],
)
def test_a_page_fails_by(page: str, what: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(what):
        runner(tmp_path, page).run()


def test_a_block_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.pages.SECONDS_MAX", 0.2)
    with pytest.raises(subprocess.TimeoutExpired):
        runner(tmp_path, "'''sh\nsleep 60\n'''\n").run()


def test_each_fenced_block_is_seen_with_its_language(tmp_path: Path) -> None:
    page = runner(tmp_path, GOOD + "\n   '''yaml\n   a: 1\n   '''\n'''{note}\nno code\n'''\n").page
    languages = [block.language for block in blocks_of(page)]
    assert languages == ["python", "text", "sh", "text", "sh", "yaml"]
