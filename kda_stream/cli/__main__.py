"""`python -m kda_stream.cli`, the same as `kda-stream`."""

from __future__ import annotations

import sys

from . import main

sys.exit(main())
