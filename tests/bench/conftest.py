"""The bench is beside the package, not in it: the repository's root has to be on the path."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))
collect_ignore_glob = [] if (ROOT / "bench" / "__main__.py").exists() else ["test_*.py"]


@pytest.fixture
def results() -> dict[str, Any]:
    """Results with round figures, of packages that there are not: each test has its own."""
    from bench import report

    return report.load(Path(__file__).parent)
