"""The C routine on its own: warnings, symbols, and the self-test under the sanitizers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from conftest_types import Run

WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Wpedantic", "-Werror"]
