"""`python -m kda_stream`, the same as `kda-stream`."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
